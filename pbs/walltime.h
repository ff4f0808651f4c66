#pragma once

#include <optional>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun::pbs {

/// How long a job may run, and has run.
struct JobTime {
    Duration limit{};
    Duration elapsed{};
};

/// From what `qstat -f -F json JOB` prints (OpenPBS). The start is told as text in the server's own time
/// zone: where that makes the age differ from `age` (of the job, as this host knows it) or from
/// resources_used.walltime by whole quarters of an hour, it is another zone and is corrected. Reads TZ.
/// Error: Protocol (no JSON, no such job), NotFound (the job has no walltime, or has not started).
Result<JobTime> parse_qstat(std::string_view json, std::optional<Duration> age = std::nullopt);

/// "01:30:00", "90:00" (minutes), "5400" (seconds), "2:01:30:00" (days). Error: InvalidArgument.
Result<Duration> parse_walltime(std::string_view text);

}  // namespace ddprun::pbs
