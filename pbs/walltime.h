#pragma once

#include <optional>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun::pbs {

/// The walltime of a job, and the time that it has run.
struct JobTime {
    Duration limit{};
    Duration elapsed{};
};

/// Parses the output of `qstat -f -F json JOB` (OpenPBS). The start is text in the server's time zone: when
/// the elapsed time differs from `age` (the job's age by this host) or from resources_used.walltime by whole
/// quarters of an hour, the zones differ and it is corrected. Reads TZ. Error: Protocol (no JSON, no such
/// job), NotFound (the job has no walltime, or has not started).
Result<JobTime> parse_qstat(std::string_view json, std::optional<Duration> age = std::nullopt);

/// "01:30:00", "90:00" (minutes), "5400" (seconds), "2:01:30:00" (days). Error: InvalidArgument.
Result<Duration> parse_walltime(std::string_view text);

}  // namespace ddprun::pbs
