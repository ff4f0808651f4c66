#include "launcher/ends/report.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "env/describe.h"
#include "env/io/file.h"
#include "env/text.h"
#include "launcher/ends/explain.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

constexpr std::size_t kColumn = 16;          ///< where the right column of the table begins
constexpr std::size_t kMaxOthers = 8;        ///< other failures that are listed one by one
constexpr std::size_t kMaxShownLine = 2000;  ///< bytes of one line of stderr
constexpr std::size_t kFirstErrorLines = 10, kLastErrorLines = 30;  ///< of a worker's error file

/// A worker that exits with 0 because we stopped it has saved its state but not finished.
bool all_succeeded(const JobEnd& end) {
    return !end.workers.empty() &&
           std::none_of(end.workers.begin(), end.workers.end(),
                        [](const WorkerEnd& worker) { return worker.failed() || worker.by_us; });
}

/// True when the worker failed by itself, before we had `decided` on another cause.
bool failed_by_itself(const WorkerEnd& end, std::optional<TimePoint> decided) {
    if (end.by_us || !end.failed()) return false;
    if (!decided) return true;
    return end.error_reported ? *end.error_reported + kFileClockTick < *decided : end.ended < *decided;
}

/// True when `reporter`'s error report shows that it failed before `other`, which exited first.
bool failed_before(const WorkerEnd& reporter, const WorkerEnd& other) {
    if (!other.exec_failure.empty()) return false;
    if (other.error_reported) return *reporter.error_reported + kFileClockTick < *other.error_reported;
    // A crash leaves no report, and peers report theirs before a busy agent has seen the crash: require a
    // clear lead.
    constexpr Duration kClearLead = std::chrono::milliseconds(100);
    return *reporter.error_reported + kClearLead < other.ended;
}

int code_of(const WorkerEnd& end) {
    if (end.stopped_failing) return 1;  // the code of an uncaught error: the signal was ours
    if (!end.exec_failure.empty()) {
        // A failure before exec ("pipe2: Too many open files") is the launcher's, not the program's.
        if (!end.failed_at_exec) return static_cast<int>(ExitCode::Internal);
        return static_cast<int>(end.start_errno == ENOENT ? ExitCode::NotFound : ExitCode::NotExecutable);
    }
    return end.signaled ? 128 + end.status : end.status;
}

/// A worker's line without the carriage returns of progress bars.
std::string shown_line(std::string_view text) {
    std::string line(text.substr(0, kMaxShownLine));
    std::erase(line, '\r');
    return printable(line) + (text.size() > kMaxShownLine ? " ..." : "");
}

/// The two-column table.
class Table {
  public:
    explicit Table(std::optional<int> width) {
        if (width) width_ = static_cast<std::size_t>(std::clamp(*width, 40, 200));
    }

    void row(std::string_view name, const std::string& text) {
        if (text.empty()) return;
        const std::string shown = shown_line(text);
        text_ +=
            fmt::format("  {:<{}}{}\n", name, kColumn - 2, width_ ? wrap(shown, *width_, kColumn) : shown);
    }
    /// Adds a worker's lines without wrapping them, so that they can be searched for and copied.
    void quote(std::string_view name, const std::vector<std::string>& lines) {
        for (std::size_t i = 0; i < lines.size(); ++i) {
            text_ += fmt::format("  {:<{}}| {}\n", i == 0 ? name : "", kColumn - 2, shown_line(lines[i]));
        }
    }
    /// Adds the headline, which is not wrapped either: people search for it in logs.
    void line(const std::string& text) { text_ += shown_line(text) + '\n'; }
    std::string take() { return std::move(text_); }

  private:
    std::optional<std::size_t> width_;  ///< nullopt: rows are not wrapped
    std::string text_;
};

std::string rank_and_host(const WorkerEnd& end) {
    std::string text = fmt::format("rank {}", end.rank);
    if (!end.host.empty()) text += fmt::format(" on {}", end.host);
    return text;
}

std::string headline_of(const JobEnd& end, const WorkerEnd* cause) {
    const std::string job = end.program.empty() ? "the job" : end.program;
    if (end.preempted) return fmt::format("{} was preempted", job);
    if (end.stopped_by_signal)
        return fmt::format("{} was stopped by {}", job, signal_name(*end.stopped_by_signal));
    if (end.hung) return fmt::format("{} hung: {}", job, end.failure);
    if (!end.failure.empty()) return fmt::format("{} failed: {}", job, end.failure);
    if (cause == nullptr) return fmt::format("{} failed", job);
    if (code_of(*cause) == static_cast<int>(ExitCode::TryAgain))
        return fmt::format("{} stopped before its end: {}: {}", job, rank_and_host(*cause),
                           describe_end(*cause));
    return fmt::format("{} failed: {}: {}", job, rank_and_host(*cause), describe_end(*cause));
}

/// The lines at both ends of the text: an exception's message is its last line.
std::vector<std::string> error_file_lines(const std::string& text) {
    const std::string_view trimmed = trim(text);
    if (trimmed.empty()) return {};
    const std::vector<std::string_view> all = split(trimmed, '\n');
    std::vector<std::string> lines(all.begin(), all.end());
    if (lines.size() <= kFirstErrorLines + kLastErrorLines) return lines;
    const auto begin = lines.begin() + kFirstErrorLines, end = lines.end() - kLastErrorLines;
    *begin = fmt::format("... {} lines left out", end - begin);
    lines.erase(begin + 1, end);
    return lines;
}

/// True when the error report repeats the last line of stderr: Python prints what `@record` reports.
bool is_reported(const std::vector<std::string>& last_stderr, const std::vector<std::string>& error_report) {
    if (last_stderr.empty()) return true;
    const std::string_view last = trim(last_stderr.back());
    return std::any_of(error_report.begin(), error_report.end(), [last](const std::string& line) {
        const std::string told(trim(line));
        return !told.empty() && (last == told || last.ends_with(": " + told));
    });
}

void describe_cause(Table& table, const WorkerEnd& cause) {
    table.row("first cause", fmt::format("{} (local rank {}{})", rank_and_host(cause), cause.local_rank,
                                         cause.pid > 0 ? fmt::format(", pid {}", cause.pid) : ""));
    std::string how = describe_end(cause);
    if (cause.dumped_core) how += ", core dumped";
    if (cause.exec_failure.empty())
        how += fmt::format(", {} after start", format_duration(Duration(cause.after_start_ns)));
    table.row("how", how);
    table.row("doing", cause.last_collective);
    table.row("meaning", cause.meaning.empty() ? explain_end(cause) : cause.meaning);
    const std::vector<std::string> error_report = error_file_lines(cause.error_file);
    table.quote("error report", error_report);
    if (!is_reported(cause.last_stderr, error_report)) table.quote("last stderr", cause.last_stderr);
}

/// Adds one line for all ranks that ended in the same way: "ranks 0-3: exit code 1".
void describe_others(Table& table, const JobEnd& end, const WorkerEnd* cause) {
    std::map<std::string, std::vector<int>> alike;
    std::vector<int> stopped, succeeded;
    for (const WorkerEnd& worker : end.workers) {
        if (&worker == cause) continue;
        if (worker.by_us) stopped.push_back(worker.rank);
        else if (!worker.failed()) succeeded.push_back(worker.rank);
        else alike[describe_end(worker)].push_back(worker.rank);
    }
    std::size_t listed = 0;
    std::size_t left_out = 0;
    for (auto& [how, ranks] : alike) {
        std::sort(ranks.begin(), ranks.end());
        if (listed++ >= kMaxOthers) left_out += ranks.size();
        else
            table.row(listed == 1 ? "afterwards" : "",
                      fmt::format("rank{} {}: {}", ranks.front() == ranks.back() ? "" : "s",
                                  format_ranges(ranks), how));
    }
    if (left_out > 0) table.row("", fmt::format("and {} more", left_out));
    const auto folded = [&](std::string_view name, std::vector<int>& ranks, std::string_view what) {
        if (ranks.empty()) return;
        std::sort(ranks.begin(), ranks.end());
        table.row(name, fmt::format("{} worker{} ({} {}){}", ranks.size(), ranks.size() == 1 ? "" : "s",
                                    ranks.size() == 1 ? "rank" : "ranks", format_ranges(ranks), what));
    };
    folded("stopped by us", stopped, "");
    folded("succeeded", succeeded, "");
}

/// Names the workers that the SIGTERM of a preemption notice ended: they had no handler, or raised the signal
/// again after saving.
std::string describe_unhandled(const JobEnd& end) {
    std::vector<int> ranks;
    for (const WorkerEnd& worker : end.workers) {
        if (worker.by_us && worker.signaled && worker.status == SIGTERM) ranks.push_back(worker.rank);
    }
    if (!end.preempted || ranks.empty()) return "";
    std::sort(ranks.begin(), ranks.end());
    return fmt::format("SIGTERM ended {} worker{} ({} {}): without a handler nothing is saved at a notice",
                       ranks.size(), ranks.size() == 1 ? "" : "s", ranks.size() == 1 ? "rank" : "ranks",
                       format_ranges(ranks));
}

std::string describe_job(const JobEnd& end) {
    std::string text = fmt::format("{} worker{}, ran {}", end.world_size, end.world_size == 1 ? "" : "s",
                                   format_duration(end.wall));
    if (end.max_restarts > 0)
        text += fmt::format(", {} of {} restarts used", end.restarts_used, end.max_restarts);
    if (end.recoveries > 0) text += fmt::format(", {} recovered in place", end.recoveries);
    if (!end.run_id.empty() && end.run_id != "none") text += fmt::format(", id {}", end.run_id);
    return text;
}

void describe(JsonWriter& json, const WorkerEnd& end) {
    json("rank", end.rank);
    json("local_rank", end.local_rank);
    json("node", end.node);
    json("host", end.host);
    json("pid", end.pid);
    if (!end.exec_failure.empty()) json("exec_failure", end.exec_failure);
    else if (!end.signaled) json("exit_code", end.status);
    else
        json.object("signal", [&] {
            json("number", end.status);
            json("name", signal_name(end.status));
        });
    json("dumped_core", end.dumped_core);
    json("stopped_by_ddprun", end.by_us || end.stopped_failing);
    if (end.error_reported)
        json("seconds_from_error_report_to_end", in_seconds(end.ended - *end.error_reported));
    json("seconds_after_start", in_seconds(Duration(end.after_start_ns)));
    json("order", end.order);
    if (!end.meaning.empty()) json("meaning", end.meaning);
    if (!end.last_collective.empty()) json("last_collective", end.last_collective);
    if (!end.last_stderr.empty()) json("last_stderr", end.last_stderr);
    if (!end.error_file.empty()) json("error_report", end.error_file);
}

/// The time that was not useful, by cause; null where no rank commits any step.
void describe_lost_time(JsonWriter& json, const JobEnd& end) {
    if (!end.time.useful) return json.null("lost_seconds");
    const LostTime& lost = end.time.lost;
    const Duration other = end.wall - *end.time.useful - lost.failures - lost.restarts - lost.rehearsals;
    json.object("lost_seconds", [&] {
        json("failures", in_seconds(lost.failures));
        json("restarts", in_seconds(lost.restarts));
        json("rehearsals", in_seconds(lost.rehearsals));
        json("other", in_seconds(std::max(other, Duration::zero())));
    });
}

}  // namespace

const WorkerEnd* root_cause(const JobEnd& end) { return root_cause(end.workers, end.failure_decided); }

const WorkerEnd* root_cause(std::span<const WorkerEnd> workers, std::optional<TimePoint> decided) {
    const WorkerEnd* first = nullptr;
    const WorkerEnd* first_report = nullptr;
    for (const WorkerEnd& worker : workers) {
        if (!failed_by_itself(worker, decided)) continue;
        if (first == nullptr || worker.order < first->order) first = &worker;
        if (!worker.error_reported) continue;
        if (first_report == nullptr || *worker.error_reported < *first_report->error_reported)
            first_report = &worker;
    }
    return first_report != nullptr && failed_before(*first_report, *first) ? first_report : first;
}

bool failed_alike(const WorkerEnd& one, const WorkerEnd& other) {
    const auto words = [](std::string text) {
        std::erase_if(text, [](unsigned char letter) {
            return std::isxdigit(letter) != 0;
        });  // addresses in stacks too
        return text;
    };
    return !one.error_file.empty() && words(one.error_file) == words(other.error_file);
}

int exit_code(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end);
    // "Do not requeue" outweighs all else: the scheduler must not start this job again.
    if (cause != nullptr && code_of(*cause) == static_cast<int>(ExitCode::DoNotRequeue))
        return code_of(*cause);
    if (all_succeeded(end) && end.failure.empty()) return static_cast<int>(ExitCode::Success);
    // Workers that die of the signal that ended us (sent to the whole process group) are not the cause.
    if (end.preempted || end.stopped_by_signal || end.out_of_time)
        return static_cast<int>(ExitCode::TryAgain);
    if (cause != nullptr) return code_of(*cause);
    if (end.hung) return static_cast<int>(ExitCode::Hung);
    if (!end.failure.empty()) return static_cast<int>(ExitCode::Unavailable);
    return static_cast<int>(ExitCode::Internal);
}

std::string describe_end(const WorkerEnd& end) {
    if (!end.exec_failure.empty()) return end.exec_failure;
    if (end.stopped_failing) return "reported an error, and was stopped before it exited";
    if (!end.signaled) return fmt::format("exit code {}", end.status);
    const std::string name = signal_name(end.status);
    if (!name.starts_with("SIG")) return name;
    return fmt::format("signal {} ({})", end.status, name);
}

std::string headline(const JobEnd& end) { return headline_of(end, root_cause(end.workers)); }

std::string render_report(const JobEnd& end, std::optional<int> width) {
    const int code = exit_code(end);
    if (code == static_cast<int>(ExitCode::Success)) return "";
    const WorkerEnd* cause = root_cause(end);
    Table table(width);
    table.line("ddprun: " + headline_of(end, cause));
    if (cause != nullptr) describe_cause(table, *cause);
    if (cause != nullptr) table.row("before", explain_early_end(*cause, end.workers));
    if (!end.failure.empty() && cause != nullptr) table.row("failure", end.failure);
    describe_others(table, end, cause);
    table.row("not handled", describe_unhandled(end));
    table.row("job", describe_job(end));
    for (const std::string& note : end.notes) table.row("note", note);
    table.row("logs", end.log_directory);
    if (end.loss.bytes > 0 || !end.loss.why.empty()) {
        table.row("output lost", fmt::format("{} ({})", format_bytes(end.loss.bytes), end.loss.why));
    }
    table.row("exit code",
              fmt::format("{}{}", code,
                          code == static_cast<int>(ExitCode::TryAgain) ? " (can be started again)" : ""));
    return table.take();
}

Status check_places(const JobSpec& spec) {
    if (!spec.report_file.empty()) {
        const Status possible = check_replaceable(spec.report_file);
        if (!possible) return possible.error().with("--report");
    }
    for (const auto& [option, directory] :
         {std::pair("--log-dir", &spec.output.log_dir), std::pair("--tensorboard", &spec.tensorboard)}) {
        const Status possible = directory->empty() ? Status() : check_makeable(*directory);
        if (!possible) return possible.error().with(option);
    }
    return {};
}

std::string note_of_returned_host(const JobEnd& end) {
    if (end.stopped_by_signal != SIGTERM || end.lost_hosts.empty()) return "";
    return fmt::format(
        "{} had been lost: PBS ends a job by SIGTERM when such a host comes back, and nothing tells that "
        "from a qdel",
        join(end.lost_hosts, ", "));
}

std::string render_report_json(const JobEnd& end) {
    JsonWriter json(2);
    json("version", 1);
    json("run_id", end.run_id);
    json("program", end.program);
    json("exit_code", exit_code(end));
    const WorkerEnd* const cause = root_cause(end);
    if (cause == nullptr) json.null("first_cause");
    else
        json.object("first_cause", [&] {
            describe(json, *cause);
            if (cause->meaning.empty()) json("meaning", explain_end(*cause));
        });
    json("failure", end.failure);
    json("generation", end.generation);
    json("restarts_used", end.restarts_used);
    json("max_restarts", end.max_restarts);
    json("recoveries", end.recoveries);
    json.or_null("useful_seconds",
                 end.time.useful ? std::optional(in_seconds(*end.time.useful)) : std::nullopt);
    describe_lost_time(json, end);
    json("world_size", end.world_size);
    json("seconds", in_seconds(end.wall));
    json("preempted", end.preempted);
    json("out_of_time", end.out_of_time);
    json("hung", end.hung);
    json.or_null("stopped_by_signal",
                 end.stopped_by_signal ? std::optional(signal_name(*end.stopped_by_signal)) : std::nullopt);
    json.objects("workers", end.workers, [&](const WorkerEnd& worker) { describe(json, worker); });
    json("notes", end.notes);
    json.object("lost_output", [&] {
        json("bytes", end.loss.bytes);
        json("why", end.loss.why);
    });
    json("log_directory", end.log_directory);
    return std::move(json).text() + '\n';
}

}  // namespace ddprun
