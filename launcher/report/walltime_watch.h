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

/// When the walltime ends. At first the environment tells, or where it does not (OpenPBS, LSF, Slurm
/// before 23.02) the scheduler's own program (qstat, bjobs, squeue). That is asked again from time to time,
/// for limits are changed while jobs run (qalter, scontrol update, bmod). All of it beside the loop: answers
/// come later. Borrows its parts for its whole life.
class WalltimeWatch {
  public:
    WalltimeWatch(os::EventLoop& loop, os::System& system, os::Log& log)
        : loop_(loop), system_(system), log_(log) {}
    ~WalltimeWatch();
    WalltimeWatch(const WalltimeWatch&) = delete;
    WalltimeWatch& operator=(const WalltimeWatch&) = delete;

    /// Calls `known` when the end is known, and with each other end that is heard later (kNever: there is
    /// none any more); or `unknown` once, with the reason, where the first look does not tell it. From here
    /// or later from the loop. `notice`: the job is stopped so long before the end.
    void begin(Duration notice, std::function<void(TimePoint end)> known,
               std::function<void(const std::string& why)> unknown);
    /// nullopt: there is none, or it is not known (yet).
    [[nodiscard]] std::optional<TimePoint> end() const {
        return end_ == kNever ? std::nullopt : std::optional(end_);
    }

  private:
    void ask();
    void ask_later();
    void take(const Result<Duration>& left);

    os::EventLoop& loop_;
    os::System& system_;
    os::Log& log_;
    Duration notice_{};
    std::function<void(TimePoint)> known_;
    std::function<void(const std::string&)> unknown_;
    std::optional<BatchJob> job_;
    TimePoint end_ = kNever;
    bool has_looked_ = false;
    os::EventLoop::TimerId next_question_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
