#pragma once

#include <string>
#include <vector>

#include "env/clock.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The facts about a failed generation that a decision on a restart needs.
struct FailureFacts {
    /// exec failed: wrong program, no permission, missing interpreter, no more processes.
    bool never_ran = false;
    bool signaled = false;
    int status = 0;             ///< exit code or signal
    bool made_progress = true;  ///< the generation got further than the one before (steps, or time)
    std::string meaning = {};   ///< what the end probably means; "": no more than it says itself
    bool ran_before = false;    ///< all nodes have run the program in this job
};

struct RestartDecision {
    bool restart = false;
    TimePoint at{};   ///< when to restart; later than now with a back-off
    std::string why;  ///< "1 of 3 restarts left", "exit code 64 means wrong usage: a restart cannot help"
    bool out_of_time = false;  ///< no restart because of the walltime alone: the job may go on in another run
};

/// The past of a job that limits further restarts.
struct RestartHistory {
    std::vector<TimePoint> restarts;  ///< when each restart was decided, oldest first
    /// Generations in a row without progress, ended by failures or by nodes that came or went.
    int without_progress = 0;
    std::int64_t furthest_step = -1;  ///< of any worker; -1: no worker has reported one
    // Since all workers were last started.
    int stuck_recoveries = 0;          ///< recoveries in a row without a further step
    std::int64_t recovered_step = -1;  ///< the furthest step at the last of them; -1: none
};

/// After this many generations in a row without progress there are no more restarts, whatever the budget, and
/// new nodes have to wait.
inline constexpr int kStuckGenerations = 5;

/// A generation that ran this long counts as having made progress. A generation that has less time left
/// before the walltime ends is not started.
inline constexpr Duration kProgressAge = std::chrono::seconds(60);

/// Decides whether and when to restart. `random` in [0, 1) spreads the back-off (half to all of it), so that
/// jobs that lost the same file server do not restart at the same instant. `time_up`: when the job is stopped
/// for its walltime; kNever: not known. Pure.
RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random,
                               TimePoint time_up = kNever);

/// Why a restart of this program cannot help; "" when it may. It cannot after EX_USAGE, EX_DATAERR,
/// EX_NOINPUT, EX_CONFIG, 126, 127, 93 (do not requeue) and exec failures.
std::string permanent_failure(const FailureFacts& failure);

/// True for exit code 75: the worker was asked to stop, and has saved before its end. Pure.
bool stopped_early(const FailureFacts& failure);

}  // namespace ddprun
