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

/// Finds out when the walltime ends: from the environment, or where that does not tell (OpenPBS, LSF, Slurm
/// before 23.02) from the scheduler's own program (qstat, bjobs, squeue). Asks the program again from time to
/// time, because limits change while jobs run (qalter, scontrol update, bmod). Never blocks the loop. Borrows
/// its parts for its whole life.
class WalltimeWatch {
  public:
    WalltimeWatch(os::EventLoop& loop, os::System& system, os::Log& log)
        : loop_(loop), system_(system), log_(log) {}
    ~WalltimeWatch();
    WalltimeWatch(const WalltimeWatch&) = delete;
    WalltimeWatch& operator=(const WalltimeWatch&) = delete;

    /// Calls `known` with the moment at which the job is to be stopped, the walltime's end less `notice`,
    /// when it is known and with each other one that is heard later (kNever: there is none any more); and
    /// `time_is_up` when it has come, unless `notice` is zero. From here or later from the loop. Logs that
    /// there is no walltime, or why it is not known.
    void begin(Duration notice, std::function<void(TimePoint time_up)> known,
               std::function<void(std::chrono::seconds left)> time_is_up);
    /// nullopt: there is none, or it is not known (yet).
    [[nodiscard]] std::optional<TimePoint> end() const {
        return end_ == kNever ? std::nullopt : std::optional(end_);
    }

  private:
    void ask();
    void ask_later();
    void take(const Result<Duration>& left);
    void tell_end();
    void is_unknown(const std::string& why);

    os::EventLoop& loop_;
    os::System& system_;
    os::Log& log_;
    Duration notice_{};
    std::function<void(TimePoint)> known_;
    std::function<void(std::chrono::seconds)> time_is_up_;
    std::optional<BatchJob> job_;
    TimePoint end_ = kNever;
    bool has_looked_ = false;
    os::EventLoop::TimerId next_question_ = 0, notice_timer_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace ddprun
