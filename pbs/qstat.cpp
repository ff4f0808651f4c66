#include "pbs/qstat.h"

#include <fmt/core.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "env/json.h"
#include "env/text.h"

namespace ddprun::pbs {
namespace {

using Attributes = std::map<std::string, std::string, std::less<>>;

Error no_such_job() { return {Errc::NotFound, "qstat does not know the job", 0}; }

/// The path "node01.site:/home/u/train.o12" without the host.
std::string without_host(const std::string& path) {
    const std::size_t colon = path.find(':');
    return colon == std::string::npos || colon > path.find('/') ? path : path.substr(colon + 1);
}

QueuedJob job_of(std::string id, const Attributes& attributes) {
    const auto value = [&](std::string_view name) {
        const auto found = attributes.find(name);
        return found == attributes.end() ? std::string() : found->second;
    };
    QueuedJob job;
    job.id = std::move(id);
    job.state = value("job_state");
    job.queue = value("queue");
    job.comment = value("comment");
    job.exec_host = value("exec_host");
    job.output = without_host(value("Output_Path"));
    const std::string status = value("Exit_status").empty() ? value("exit_status") : value("Exit_status");
    if (const Result<std::int64_t> number = parse_int_between(status, -1000, 1000))
        job.exit_status = static_cast<int>(*number);
    job.run_count = static_cast<int>(parse_int_between(value("run_count"), 0, 1'000'000).value_or(0));
    return job;
}

Result<QueuedJob> job_in_json(const Json& answer) {
    const Json::object_t& jobs = members(member(answer, "Jobs"));
    if (jobs.empty() || !jobs.front().second.is_object()) return no_such_job();
    Attributes attributes;
    for (const auto& [name, value] : members(jobs.front().second)) {
        // OpenPBS writes some numbers with quotes and some without.
        if (const Result<std::string> text = as<std::string>(value)) attributes[name] = *text;
        else if (value.is_number()) attributes[name] = to_text(value);
    }
    return job_of(jobs.front().first, attributes);
}

/// Joins long values, which qstat continues in the next line after a tab.
std::string without_folds(std::string_view text) {
    std::string unfolded;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '\n' && i + 1 < text.size() && text[i + 1] == '\t') ++i;
        else unfolded += text[i];
    }
    return unfolded;
}

Result<QueuedJob> job_in_text(std::string_view answer) {
    constexpr std::string_view kBegin = "Job Id: ";
    const std::string text = without_folds(answer);
    std::string id;
    Attributes attributes;
    for (const std::string_view line : split(text, '\n')) {
        if (line.starts_with(kBegin) && !id.empty()) break;  // the next job
        if (line.starts_with(kBegin)) id = trim(line.substr(kBegin.size()));
        const std::size_t equals = line.find(" = ");
        if (id.empty() || equals == std::string_view::npos) continue;
        attributes.emplace(trim(line.substr(0, equals)), trim(line.substr(equals + 3)));
    }
    if (id.empty()) return no_such_job();
    return job_of(std::move(id), attributes);
}

/// The number of a job, with an array's brackets: "12" of "12.pbs01", even if a table has cut the rest.
std::string_view number_of(std::string_view id) { return id.substr(0, id.find('.')); }

}  // namespace

Result<QueuedJob> parse_job(std::string_view answer) {
    if (const Result<Json> json = parse_json_object(answer)) return job_in_json(*json);
    return job_in_text(answer);
}

Result<std::string> parse_submitted(std::string_view out) {
    // Sites' hooks may print lines before the id.
    std::string_view last;
    for (const std::string_view line : split(out, '\n')) {
        if (!trim(line).empty()) last = trim(line);
    }
    const bool is_id = !last.empty() && std::isdigit(static_cast<unsigned char>(last.front())) != 0 &&
                       last.find(' ') == std::string_view::npos;
    if (!is_id) return Error{Errc::Protocol, fmt::format("qsub: '{}' is no job id", excerpt(last)), 0};
    return std::string(last);
}

std::optional<QueuePlace> place_in_queue(std::string_view table, std::string_view job,
                                         std::string_view queue) {
    QueuePlace result;
    for (const std::string_view line : split(table, '\n')) {
        std::vector<std::string_view> words = split(line, ' ');
        std::erase_if(words, [](std::string_view word) { return trim(word).empty(); });
        // "Job id  Name  User  Time Use  S  Queue": a name has no spaces.
        if (words.size() < 6 || std::isdigit(static_cast<unsigned char>(words[0].front())) == 0 ||
            words[words.size() - 2] != "Q")
            continue;
        if (!queue.starts_with(words.back())) continue;  // the column may have cut its name
        ++result.waiting;
        if (number_of(words[0]) == number_of(job)) result.place = result.waiting;
    }
    return result.place == 0 ? std::nullopt : std::optional(result);
}

std::string hosts_of(std::string_view exec_host) {
    std::vector<std::string> hosts;
    for (const std::string_view place : split(exec_host, '+')) {
        std::string host(place.substr(0, place.find('/')));
        if (!host.empty() && std::find(hosts.begin(), hosts.end(), host) == hosts.end())
            hosts.push_back(std::move(host));
    }
    return join(hosts, ", ");
}

int exit_code_of(int exit_status) {
    if (exit_status < 0) return 1;
    return exit_status >= 256 ? 128 + (exit_status - 256) % 128 : exit_status;
}

std::string_view meaning_of(int exit_status) {
    struct Row {
        int code;
        std::string_view meaning;
    };
    static constexpr std::array<Row, 11> rows = {{{-3, "it could not be started and is tried again"},
                                                  {-11, "it was put back into the queue"},
                                                  {-14, "another host of the job failed"},
                                                  {-18, "a hook put it back into the queue"},
                                                  {-20, "its first host failed"},
                                                  {-24, "a limit on CPU time was exceeded"},
                                                  {-25, "a limit on memory was exceeded"},
                                                  {-26, "a limit on memory was exceeded"},
                                                  {-27, "a limit on CPUs was exceeded"},
                                                  {-28, "a limit on CPUs was exceeded"},
                                                  {-29, "the walltime was exceeded"}}};
    const auto* found =
        std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.code == exit_status; });
    return found == rows.end() ? std::string_view() : found->meaning;
}

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
