#pragma once

#include <string>
#include <vector>

#include "env/clock.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// The end of a generation, as far as it matters for starting another.
struct FailureFacts {
    bool never_ran = false;    ///< exec failed: wrong program, no permission, missing interpreter
    bool signaled = false;
    int status = 0;            ///< exit code or signal
    bool made_progress = true; ///< the generation got further than the one before (steps, or time)
};

struct RestartDecision {
    bool restart = false;
    TimePoint at{};   ///< when; now unless we back off
    std::string why;  ///< "1 of 3 restarts left", "exit code 64 means wrong usage: a restart cannot help"
};

/// What has happened so far in this job.
struct RestartHistory {
    std::vector<TimePoint> restarts;  ///< when each restart was decided, oldest first
    int without_progress = 0;         ///< generations in a row that got nowhere
};

/// Generations in a row without any progress after which restarts stop, whatever the budget.
inline constexpr int kStuckGenerations = 5;

/// Pure. `random` in [0, 1) spreads the back-off (half to all of it), so that many jobs that lost the same
/// file server do not come back at the same instant.
RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random);

/// Why starting this program again cannot help; "" when it may. EX_USAGE, EX_DATAERR, EX_NOINPUT, EX_CONFIG,
/// 126, 127 and 93 (do not requeue), and exec failures.
std::string permanent_failure(const FailureFacts& failure);

}  // namespace ddprun
