#include "launcher/report/walltime.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>

#include "env/text.h"
#include "pbs/walltime.h"

namespace ddprun {
namespace {

/// Schedulers warn before and look late; what ends further from the limit has another reason.
constexpr Duration kNear = std::chrono::seconds(60);

/// Of the year 2255: nanoseconds from now to then fit into a Duration.
constexpr std::int64_t kLastSecond = 9'000'000'000;

}  // namespace

std::optional<Duration> walltime_left(const EnvironmentLookup& env, std::int64_t epoch, std::optional<Duration> job_age) {
    const Result<std::int64_t> end = parse_int_between(env("SLURM_JOB_END_TIME").value_or(""), 0, kLastSecond);
    if (end) return std::chrono::seconds(*end - epoch);
    const Result<Duration> limit = pbs::parse_walltime(env("PBS_WALLTIME").value_or(""));
    if (!limit || *limit == Duration::zero() || !job_age) return std::nullopt;
    return *limit - *job_age;
}

std::optional<Duration> walltime_left() { return walltime_left(process_environment, ::time(nullptr), pbs_job_age()); }

std::optional<Duration> pbs_job_age() {
    // MoM writes the node file when the job starts.
    struct stat file {};
    const std::optional<std::string> path = process_environment("PBS_NODEFILE");
    if (!path || ::stat(path->c_str(), &file) != 0) return std::nullopt;
    return std::chrono::seconds(std::max<std::int64_t>(0, ::time(nullptr) - file.st_mtime));
}

std::string walltime_note(Duration left) {
    if (left > kNear) return "";
    const std::string span = format_duration(std::chrono::round<std::chrono::seconds>(left < Duration::zero() ? -left : left));
    if (left < Duration::zero()) return fmt::format("killed at walltime: the scheduler's limit was over {} before", span);
    return fmt::format("stopped at walltime: {} before the scheduler's limit", span);
}

}  // namespace ddprun
