#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// The rest of the scheduler's walltime by the environment: SLURM_JOB_END_TIME, or Torque's PBS_WALLTIME with
/// the job's age. Negative: the walltime is over. nullopt: the environment does not tell. `epoch` is now, in
/// seconds since 1970. Pure.
std::optional<Duration> walltime_left(const EnvironmentLookup& env, std::int64_t epoch,
                                      std::optional<Duration> job_age);

/// The rest of this process's walltime now.
std::optional<Duration> walltime_left();
/// The age of the PBS job that this process belongs to, by its node file.
std::optional<Duration> pbs_job_age();

/// The shell line that asks the scheduler's program when the environment does not tell. "$0" in it is the
/// job's id.
std::string walltime_question(Scheduler scheduler);
/// The rest of the walltime by the program's answer. `epoch` is now, in seconds since 1970. Pure, but for TZ.
/// Error: NotFound (the job has no limit), Protocol (the answer is not understood).
Result<Duration> walltime_answer(Scheduler scheduler, std::string_view answer, std::int64_t epoch,
                                 std::optional<Duration> job_age);

/// The time to ask the scheduler again after `asked`, because a job's limit can be changed: ten minutes later
/// plus `spread`, so that jobs that began together do not ask together, or at half of the time to `due` if
/// that is sooner. `due` is when the job is stopped for its walltime (kNever: not known). kNever: do not ask
/// again. Pure.
TimePoint next_walltime_question(TimePoint asked, TimePoint due, Duration spread);
/// The log line for an end of the walltime (kNever: none, or not known) that moved: "the end of the walltime
/// has changed: in 2 h (before: in 10 min)". "" when the two are the same within a scheduler's minutes. Pure.
std::string walltime_change(TimePoint before, TimePoint after, TimePoint now);

/// The report's note for a job that was ended from outside with `left` of its walltime: "killed at walltime:
/// ..." when it was over, "stopped at walltime: ..." shortly before; "" when much was left. Pure.
std::string walltime_note(Duration left);

}  // namespace ddprun
