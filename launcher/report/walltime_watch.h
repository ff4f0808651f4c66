#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "env/nodes/batch_job.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"

namespace ddprun {

/// When the walltime ends. Where the environment does not tell (OpenPBS, LSF, Slurm before 23.02), the scheduler's own program
/// (qstat, bjobs, squeue) is asked once, beside the loop: its answer comes later. Borrows its parts for its whole life.
class WalltimeWatch {
  public:
    WalltimeWatch(os::EventLoop& loop, os::System& system, os::Log& log) : loop_(loop), system_(system), log_(log) {}
    ~WalltimeWatch() { *alive_ = false; }
    WalltimeWatch(const WalltimeWatch&) = delete;
    WalltimeWatch& operator=(const WalltimeWatch&) = delete;

    /// Calls `known` once when the end is known, or `unknown` once with the reason; from here or later from the loop.
    void begin(std::function<void(TimePoint end)> known, std::function<void(const std::string& why)> unknown);
    /// nullopt: there is none, or it is not known (yet).
    [[nodiscard]] std::optional<TimePoint> end() const { return end_; }

  private:
    void ask(const BatchJob& job);
    void ends_in(Duration left);

    os::EventLoop& loop_;
    os::System& system_;
    os::Log& log_;
    std::function<void(TimePoint)> known_;
    std::function<void(const std::string&)> unknown_;
    std::optional<TimePoint> end_;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
