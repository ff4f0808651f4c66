#include "pbs/walltime.h"

#include <fmt/core.h>
#include <time.h>

#include <cmath>
#include <string>
#include <vector>

#include "env/json.h"
#include "env/text.h"

namespace ddprun::pbs {
namespace {

using std::chrono::seconds;

/// resources_used.walltime is as old as MoM's last poll, up to two minutes.
constexpr double kStale = 180;
constexpr double kQuarterHour = 900;

/// Thirty years: longer than any job, and its nanoseconds fit into a Duration.
constexpr std::int64_t kMostSeconds = 1'000'000'000;
/// The year 5138, the limit on times in qstat's output.
constexpr std::int64_t kMostEpoch = 100'000'000'000;

Error not_understood(std::string_view what) { return {Errc::Protocol, fmt::format("qstat: {}", what)}; }

/// The object of the first job; null when there is none.
const Json* first_job(const Json& answer) {
    const Json::object_t& jobs = members(member(answer, "Jobs"));
    return jobs.empty() || !jobs.front().second.is_object() ? nullptr : &jobs.front().second;
}

/// A value as text; OpenPBS writes some numbers with quotes and some without.
std::string text_or_number(const Json& object, std::string_view name) {
    const Json& found = member(object, name);
    return found.is_number() ? to_text(found) : text_of(object, name);
}

std::optional<Duration> walltime_in(const Json& job, std::string_view resources) {
    const Result<Duration> span = parse_walltime(text_or_number(member(job, resources), "walltime"));
    return span ? std::optional(*span) : std::nullopt;
}

/// Parses "Sat Nov 21 14:55:33 2026", as ctime(3) writes it.
std::optional<std::int64_t> epoch_of(const std::string& text) {
    tm broken{};
    broken.tm_isdst = -1;
    if (::strptime(text.c_str(), "%a %b %d %H:%M:%S %Y", &broken) == nullptr) return std::nullopt;
    return ::mktime(&broken);
}

/// `told` without the difference between the server's time zone and ours.
double without_zone(double told, double known) {
    const double offset = std::round((told - known) / kQuarterHour) * kQuarterHour;
    return std::abs(told - known - offset) <= kStale ? told - offset : told;
}

}  // namespace

Result<Duration> parse_walltime(std::string_view text) {
    const auto invalid = [&] {
        return Error{Errc::InvalidArgument, fmt::format("'{}' is not a walltime (expected HH:MM:SS)", text)};
    };
    const std::vector<std::string_view> parts = split(trim(text), ':');
    if (parts.size() > 4) return invalid();
    std::int64_t total = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const Result<std::int64_t> number = parse_int_between(parts[i], 0, kMostSeconds);
        if (!number) return invalid();
        const bool after_days = parts.size() == 4 && i == 1;
        total = total * (i == 0 ? 0 : after_days ? 24 : 60) + *number;
        if (total > kMostSeconds) return invalid();
    }
    return Duration(seconds(total));
}

Result<JobTime> parse_qstat(std::string_view json, std::optional<Duration> age) {
    const Result<Json> answer = parse_json_object(json);
    if (!answer) return not_understood("its answer is not JSON");
    const Json* job = first_job(*answer);
    if (job == nullptr) return not_understood("the server does not know the job");
    const std::optional<Duration> limit = walltime_in(*job, "Resource_List");
    if (!limit) return Error{Errc::NotFound, "the job has no walltime"};
    const std::optional<std::int64_t> started = epoch_of(text_of(*job, "stime"));
    const Result<std::int64_t> now = parse_int_between(text_or_number(*answer, "timestamp"), 0, kMostEpoch);
    if (!started || !now) return Error{Errc::NotFound, "the job has not started"};

    const std::optional<Duration> used = walltime_in(*job, "resources_used");
    double elapsed = static_cast<double>(*now - *started);
    const std::optional<Duration> known = used ? used : age;
    if (known)
        elapsed = without_zone(elapsed, static_cast<double>(std::chrono::floor<seconds>(*known).count()));
    if (std::abs(elapsed) > static_cast<double>(kMostSeconds))
        return not_understood("the job's times are more than thirty years apart");
    return JobTime{*limit, seconds(std::llround(elapsed))};
}

}  // namespace ddprun::pbs
