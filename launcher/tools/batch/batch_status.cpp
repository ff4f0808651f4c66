#include "launcher/tools/batch/batch.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <map>

#include "env/text.h"

namespace ddprun {
namespace {

using Phase = BatchStatus::Phase;

Phase phase_of(char pbs_state) {
    switch (pbs_state) {
        case 'R':
        case 'E':
        case 'B':
        case 'S':
        case 'U': return Phase::Running;
        case 'F':
        case 'C':
        case 'X': return Phase::Ended;
        default: return Phase::Waiting;
    }
}

std::string_view state_text(char pbs_state) {
    switch (pbs_state) {
        case 'Q': return "queued";
        case 'H': return "held";
        case 'W': return "waiting for its time";
        case 'T':
        case 'M': return "being moved";
        case 'R':
        case 'B': return "running";
        case 'E': return "exiting";
        case 'S':
        case 'U': return "suspended";
        case 'F':
        case 'C':
        case 'X': return "ended";
        default: return "in an unknown state";
    }
}

/// A value in "JobState=RUNNING Reason=None Dependency=(null)"; the last value of a line may have blanks.
std::string field_of(std::string_view answer, std::string_view name) {
    const std::string begin = fmt::format("{}=", name);
    for (const std::string_view line : split(answer, '\n')) {
        std::size_t at = line.find(begin);
        while (at != std::string_view::npos && at > 0 && line[at - 1] != ' ') at = line.find(begin, at + 1);
        if (at == std::string_view::npos) continue;
        const std::string_view rest = line.substr(at + begin.size());
        const bool has_line = name == "StdOut";
        const std::string value(trim(has_line ? rest : rest.substr(0, rest.find(' '))));
        return value == "(null)" || value == "None" ? "" : value;
    }
    return "";
}

Phase phase_of_slurm(const std::string& state) {
    for (const std::string_view one : {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT",
                                       "RESV_DEL_HOLD", "CONFIGURING"}) {
        if (state == one) return Phase::Waiting;
    }
    for (const std::string_view one :
         {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}) {
        if (state == one) return Phase::Running;
    }
    return Phase::Ended;
}

/// The exit code of Slurm's text: "0:9" is signal 9, "75:0" exit code 75.
std::optional<int> exit_code_of(const std::string& text) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos) return std::nullopt;
    const Result<std::int64_t> code = parse_int_between(text.substr(0, colon), 0, 255);
    const Result<std::int64_t> signal = parse_int_between(text.substr(colon + 1), 0, 127);
    if (!code || !signal) return std::nullopt;
    return static_cast<int>(*signal > 0 ? 128 + *signal : *code);
}

std::string_view ordinal_ending(int number) {
    if (number % 100 >= 11 && number % 100 <= 13) return "th";
    switch (number % 10) {
        case 1: return "st";
        case 2: return "nd";
        case 3: return "rd";
        default: return "th";
    }
}

}  // namespace

BatchStatus to_batch_status(const pbs::QueuedJob& job) {
    const char state = job.state.empty() ? '?' : job.state.front();
    BatchStatus status;
    status.phase = phase_of(state);
    status.state = state_text(state);
    status.queue = job.queue;
    if (status.phase == Phase::Waiting) status.reason = job.comment;
    status.hosts = pbs::hosts_of(job.exec_host);
    status.log = job.output;
    if (status.phase == Phase::Ended && job.exit_status) {
        status.exit_code = pbs::exit_code_of(*job.exit_status);
        status.meaning = pbs::meaning_of(*job.exit_status);
    } else if (status.phase == Phase::Ended) {
        status.meaning = job.comment;  // it never ran
    }
    return status;
}

Result<BatchStatus> parse_scontrol_job(std::string_view answer) {
    const std::string state = field_of(answer, "JobState");
    if (state.empty()) return Error{Errc::NotFound, "scontrol does not know the job", 0};
    BatchStatus status;
    status.phase = phase_of_slurm(state);
    status.queue = field_of(answer, "Partition");
    status.hosts = field_of(answer, "NodeList");
    status.log = field_of(answer, "StdOut");
    if (status.phase == Phase::Waiting) status.reason = field_of(answer, "Reason");
    if (status.phase == Phase::Ended) status.exit_code = exit_code_of(field_of(answer, "ExitCode"));
    if (state == "PENDING") status.state = "queued";
    else if (status.phase == Phase::Ended) status.state = "ended";
    else status.state = lower(state);
    if (status.phase == Phase::Ended && state != "COMPLETED" && state != "FAILED") {
        status.meaning = state;
        // A job that was cancelled while it waited, or that Slurm ended, may have exit code 0.
        if (status.exit_code.value_or(0) == 0) status.exit_code = 1;
    }
    return status;
}

Result<std::string> parse_sbatch(std::string_view out) {
    std::string_view last;
    for (const std::string_view line : split(out, '\n')) {
        if (!trim(line).empty()) last = trim(line);
    }
    const std::string_view id = last.substr(0, last.find(';'));
    if (!parse_int_between(id, 1, INT64_MAX))
        return Error{Errc::Protocol, fmt::format("sbatch: '{}' is no job id", excerpt(last)), 0};
    return std::string(id);
}

std::optional<pbs::QueuePlace> place_in_squeue(std::string_view ids, std::string_view job) {
    pbs::QueuePlace result;
    for (const std::string_view line : split(ids, '\n')) {
        if (trim(line).empty()) continue;
        ++result.waiting;
        if (trim(line) == job) result.place = result.waiting;
    }
    return result.place == 0 ? std::nullopt : std::optional(result);
}

bool can_expedite(std::string_view sbatch_version) {
    const std::size_t at = sbatch_version.find_first_of("0123456789");
    if (at == std::string_view::npos) return false;
    const std::vector<std::string_view> parts = split(trim(sbatch_version.substr(at)), '.');
    if (parts.size() < 2) return false;
    const std::int64_t year = parse_int(parts[0]).value_or(0), month = parse_int(parts[1]).value_or(0);
    return year > 25 || (year == 25 && month >= 11);
}

std::string describe_status(const std::string& job, const BatchStatus& status) {
    std::string line = fmt::format("{}: {}", job, status.state);
    if (status.phase == Phase::Waiting) {
        if (!status.queue.empty()) line += fmt::format(" in {}", status.queue);
        if (status.place)
            line += fmt::format(", {}{} of {}", status.place->place, ordinal_ending(status.place->place),
                                status.place->waiting);
        if (!status.reason.empty()) line += fmt::format(": {}", status.reason);
        return line;
    }
    if (status.phase == Phase::Running)
        return status.hosts.empty() ? line : line + fmt::format(" on {}", status.hosts);
    line += status.exit_code ? fmt::format(" with exit code {}", *status.exit_code)
                             : std::string("; its exit code is not known");
    if (!status.meaning.empty()) line += fmt::format(" ({})", status.meaning);
    return line;
}

bool is_unreachable(std::string_view words) {
    const std::string text = lower(words);
    static constexpr std::array<std::string_view, 7> kSigns = {
        "connect", "communicat", "unable to contact", "no route", "timed out", "timeout", "not running"};
    return std::any_of(kSigns.begin(), kSigns.end(),
                       [&](std::string_view sign) { return text.find(sign) != std::string::npos; });
}

}  // namespace ddprun
