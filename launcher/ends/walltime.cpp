#include "launcher/ends/walltime.h"

#include <fmt/core.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>

#include "env/text.h"
#include "pbs/qstat.h"

namespace ddprun {
namespace {

/// Schedulers signal early or late by this much. An end further from the limit has another reason.
constexpr Duration kNear = std::chrono::seconds(60);

/// Hundreds of our jobs may ask one scheduler.
constexpr Duration kBetweenQuestions = std::chrono::minutes(10);
/// No question is asked when less than this is left.
constexpr Duration kLastQuestion = std::chrono::seconds(4);
/// Ends closer than this are equal: bjobs prints whole minutes.
constexpr Duration kSameEnd = std::chrono::seconds(90);

/// In the year 2255: a Duration in nanoseconds reaches that far.
constexpr std::int64_t kLastSecond = 9'000'000'000;

Error no_limit() { return {Errc::NotFound, "the job has no walltime", 0}; }

Error not_understood(std::string_view program, std::string_view answer) {
    if (answer.empty()) return {Errc::Protocol, fmt::format("{} gave no answer", program), 0};
    return {Errc::Protocol, fmt::format("{}: unknown answer '{}'", program, excerpt(answer)), 0};
}

/// Parses squeue's %e: seconds since 1970, or local time where squeue does not know SLURM_TIME_FORMAT=%s.
Result<Duration> left_by_squeue(std::string_view answer, std::int64_t epoch) {
    const std::string text(trim(answer));
    if (text == "NONE" || text == "N/A" || text == "Unknown") return no_limit();
    if (const Result<std::int64_t> end = parse_int_between(text, 1, kLastSecond))
        return Duration(std::chrono::seconds(*end - epoch));
    tm broken{};
    broken.tm_isdst = -1;
    const char* rest = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &broken);
    if (rest == nullptr || *rest != '\0') return not_understood("squeue", text);
    const std::int64_t end = ::mktime(&broken);
    if (end < 0 || end > kLastSecond) return not_understood("squeue", text);
    return Duration(std::chrono::seconds(end - epoch));
}

/// Parses bjobs' time_left: "2:30 L" (hours and minutes) is a hard limit. E and X mark estimates, which end
/// nothing.
Result<Duration> left_by_bjobs(std::string_view answer) {
    const std::string_view text = trim(answer);
    if (text == "-" || text.ends_with('E') || text.ends_with('X')) return no_limit();
    const std::size_t colon = text.find(':');
    if (colon == std::string_view::npos || !text.ends_with(" L")) return not_understood("bjobs", text);
    const Result<std::int64_t> hours = parse_int_between(text.substr(0, colon), 0, 1'000'000);
    const Result<std::int64_t> minutes =
        parse_int_between(trim(text.substr(colon + 1, text.size() - colon - 3)), 0, 59);
    if (!hours || !minutes) return not_understood("bjobs", text);
    return Duration(std::chrono::hours(*hours) + std::chrono::minutes(*minutes));
}

}  // namespace

std::optional<Duration> walltime_left(const EnvironmentLookup& env, std::int64_t epoch,
                                      std::optional<Duration> job_age) {
    const Result<std::int64_t> end =
        parse_int_between(env("SLURM_JOB_END_TIME").value_or(""), 0, kLastSecond);
    if (end) return std::chrono::seconds(*end - epoch);
    const Result<Duration> limit = pbs::parse_walltime(env("PBS_WALLTIME").value_or(""));
    if (!limit || *limit == Duration::zero() || !job_age) return std::nullopt;
    return *limit - *job_age;
}

std::optional<Duration> walltime_left() {
    return walltime_left(process_environment, ::time(nullptr), pbs_job_age());
}

std::optional<Duration> pbs_job_age() {
    // MoM writes the node file when the job starts.
    struct stat file {};
    const std::optional<std::string> path = process_environment("PBS_NODEFILE");
    if (!path || ::stat(path->c_str(), &file) != 0) return std::nullopt;
    return std::chrono::seconds(std::max<std::int64_t>(0, ::time(nullptr) - file.st_mtime));
}

std::string walltime_question(Scheduler scheduler) {
    switch (scheduler) {
        case Scheduler::Slurm: return "export SLURM_TIME_FORMAT=%s; exec squeue -h -j \"$0\" -o %e";
        case Scheduler::Pbs: return "exec qstat -f -F json \"$0\"";
        case Scheduler::Lsf: return "exec bjobs -noheader -o time_left \"$0\"";
    }
    return "";
}

Result<Duration> walltime_answer(Scheduler scheduler, std::string_view answer, std::int64_t epoch,
                                 std::optional<Duration> job_age) {
    if (scheduler == Scheduler::Slurm) return left_by_squeue(answer, epoch);
    if (scheduler == Scheduler::Lsf) return left_by_bjobs(answer);
    if (trim(answer).empty()) return not_understood("qstat", "");
    const Result<pbs::JobTime> time = pbs::parse_qstat(answer, job_age);
    if (!time) return time.error();
    return time->limit - time->elapsed;
}

TimePoint next_walltime_question(TimePoint asked, TimePoint due, Duration spread) {
    const TimePoint regular = deadline_after(asked, kBetweenQuestions + spread);
    if (due == kNever) return regular;
    return due - asked < kLastQuestion ? kNever : std::min(regular, asked + (due - asked) / 2);
}

std::string walltime_change(TimePoint before, TimePoint after, TimePoint now) {
    const bool is_same = before == after ||
                         (before != kNever && after != kNever && std::chrono::abs(after - before) < kSameEnd);
    if (is_same) return "";
    const auto describe = [now](TimePoint end) {
        return end == kNever ? "none"
                             : "in " + format_duration(std::chrono::round<std::chrono::seconds>(
                                           std::max(Duration::zero(), end - now)));
    };
    return fmt::format("the end of the walltime has changed: {} (before: {})", describe(after),
                       describe(before));
}

std::string walltime_note(Duration left) {
    if (left > kNear) return "";
    const std::string span =
        format_duration(std::chrono::round<std::chrono::seconds>(left < Duration::zero() ? -left : left));
    if (left < Duration::zero())
        return fmt::format("killed at walltime: the scheduler's limit was over {} before", span);
    return fmt::format("stopped at walltime: {} before the scheduler's limit", span);
}

}  // namespace ddprun
