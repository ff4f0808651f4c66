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

/// What is left of the scheduler's walltime, where the environment tells it: SLURM_JOB_END_TIME, or Torque's
/// PBS_WALLTIME with the job's age. Negative: it is over. `epoch` is the time of day in seconds since 1970.
/// Pure.
std::optional<Duration> walltime_left(const EnvironmentLookup& env, std::int64_t epoch,
                                      std::optional<Duration> job_age);

/// The same for this process, now.
std::optional<Duration> walltime_left();
/// The age of the PBS job that this process belongs to, by its node file.
std::optional<Duration> pbs_job_age();

/// What a scheduler's program is asked where the environment does not tell: a line for a shell, in which "$0"
/// is the job's id.
std::string walltime_question(Scheduler scheduler);
/// What is left of the walltime, by its answer. `epoch` is now, in seconds since 1970. Reads TZ. Pure
/// otherwise. Error: NotFound (the job has no limit), Protocol (the answer is none).
Result<Duration> walltime_answer(Scheduler scheduler, std::string_view answer, std::int64_t epoch,
                                 std::optional<Duration> job_age);

/// When a scheduler that was asked at `asked` is asked again, for a job's limit can be changed: in ten
/// minutes, and `spread`, by which jobs that began together do not ask together; sooner towards `due`, when
/// the job will be stopped for its walltime (kNever: not known): after half of what is left. kNever: not
/// again before then. Pure.
TimePoint next_walltime_question(TimePoint asked, TimePoint due, Duration spread);
/// What there is to say where the walltime's end (kNever: there is none, or it is not known) was `before`,
/// and is `after` by a newer answer: "the end of the walltime has changed: in 2 h (before: in 10 min)"; ""
/// where they are the same, as far as schedulers count, who count minutes. Pure.
std::string walltime_change(TimePoint before, TimePoint after, TimePoint now);

/// For the report of a job that was ended from outside with so much left: "killed at walltime: ..." when it
/// is over, "stopped at walltime: ..." before; "" when that is not why. Pure.
std::string walltime_note(Duration left);

}  // namespace ddprun
