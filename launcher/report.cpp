#include "launcher/report.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "env/file.h"
#include "env/text.h"
#include "launcher/exit_codes.h"
#include "launcher/wrap.h"

namespace ddprun {
namespace {

constexpr std::size_t kColumn = 16;          ///< where the right column of the table begins
constexpr std::size_t kMaxOthers = 8;        ///< other failures that are listed one by one
constexpr std::size_t kMaxShownLine = 2000;  ///< bytes of one line of stderr
constexpr std::size_t kMaxErrorLines = 40;   ///< of a worker's error file

bool failed(const WorkerEnd& end) { return end.signaled || end.status != 0 || !end.exec_failure.empty(); }

/// A worker that exits with 0 because we stopped it has saved, not finished.
bool all_succeeded(const JobEnd& end) {
    return !end.workers.empty() && std::none_of(end.workers.begin(), end.workers.end(), [](const WorkerEnd& worker) {
        return failed(worker) || worker.by_us;
    });
}

/// Whether `reporter`'s error report shows that it failed before `other`, which exited first.
bool failed_before(const WorkerEnd& reporter, const WorkerEnd& other) {
    if (!other.exec_failure.empty()) return false;
    if (other.error_reported) return *reporter.error_reported + kFileClockTick < *other.error_reported;
    // A crash leaves no report, and its peers report theirs before a busy agent has seen it: a clear lead is asked for.
    constexpr Duration kClearLead = std::chrono::milliseconds(100);
    return *reporter.error_reported + kClearLead < other.ended;
}

int code_of(const WorkerEnd& end) {
    if (end.stopped_failing) return 1;  // what an uncaught error ends with; the signal was ours
    if (!end.exec_failure.empty()) {
        // "pipe2: Too many open files": what failed is the launcher's, not the program's.
        if (!end.exec_failure.starts_with("exec ")) return static_cast<int>(ExitCode::Internal);
        const bool absent = end.exec_failure.find("No such file") != std::string::npos;
        return static_cast<int>(absent ? ExitCode::NotFound : ExitCode::NotExecutable);
    }
    return end.signaled ? 128 + end.status : end.status;
}

/// Text of a worker on a terminal: its control characters must not move our cursor.
std::string printable(std::string_view text) {
    std::string out;
    for (const char c : text.substr(0, kMaxShownLine)) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '\t' || (byte >= 0x20 && byte != 0x7f)) out += c;
        else if (c != '\r') out += fmt::format("\\x{:02x}", byte);
    }
    return text.size() > kMaxShownLine ? out + " ..." : out;
}

/// The two-column table.
class Table {
  public:
    explicit Table(int width) : width_(static_cast<std::size_t>(std::clamp(width, 40, 200))) {}

    void row(std::string_view name, const std::string& text) {
        if (text.empty()) return;
        text_ += fmt::format("  {:<{}}{}\n", name, kColumn - 2, wrap(printable(text), width_, kColumn));
    }
    /// Lines of a worker, as it wrote them: not wrapped, so that they can be searched for and copied.
    void quote(std::string_view name, const std::vector<std::string>& lines) {
        for (std::size_t i = 0; i < lines.size(); ++i) {
            text_ += fmt::format("  {:<{}}| {}\n", i == 0 ? name : "", kColumn - 2, printable(lines[i]));
        }
    }
    void line(const std::string& text) { text_ += wrap(text, width_, 2) + '\n'; }
    std::string take() { return std::move(text_); }

  private:
    std::size_t width_;
    std::string text_;
};

std::string who(const WorkerEnd& end) {
    std::string text = fmt::format("rank {}", end.rank);
    if (!end.host.empty()) text += fmt::format(" on {}", end.host);
    return text;
}

std::string headline(const JobEnd& end, const WorkerEnd* cause) {
    const std::string job = end.program.empty() ? "the job" : end.program;
    if (end.preempted) return fmt::format("ddprun: {} was preempted", job);
    if (end.stopped_by_signal) return fmt::format("ddprun: {} was stopped by {}", job, signal_name(*end.stopped_by_signal));
    if (end.hung) return fmt::format("ddprun: {} hung: {}", job, end.failure);
    if (!end.failure.empty()) return fmt::format("ddprun: {} failed: {}", job, end.failure);
    if (cause == nullptr) return fmt::format("ddprun: {} failed", job);
    return fmt::format("ddprun: {} failed: {}: {}", job, who(*cause), describe_end(*cause));
}

std::vector<std::string> error_file_lines(const std::string& text) {
    std::vector<std::string> lines;
    std::string_view rest = trim(text);
    if (rest.empty()) return lines;
    for (const std::string_view line : split(rest, '\n')) {
        if (lines.size() == kMaxErrorLines) {
            lines.emplace_back("...");
            break;
        }
        lines.emplace_back(line);
    }
    return lines;
}

void describe_cause(Table& table, const WorkerEnd& cause) {
    table.row("first cause", fmt::format("{} (local rank {}{})", who(cause), cause.local_rank,
                                         cause.pid > 0 ? fmt::format(", pid {}", cause.pid) : ""));
    std::string how = describe_end(cause);
    if (cause.dumped_core) how += ", core dumped";
    if (cause.exec_failure.empty()) how += fmt::format(", {} after start", format_duration(cause.after_start));
    table.row("how", how);
    table.row("doing", cause.last_collective);
    table.row("meaning", cause.meaning.empty() ? explain_end(cause) : cause.meaning);
    table.quote("error report", error_file_lines(cause.error_file));
    table.quote("last stderr", cause.last_stderr);
}

/// Ranks that ended in the same way, on one line each: "ranks 0-3: exit code 1".
void describe_others(Table& table, const JobEnd& end, const WorkerEnd* cause) {
    std::map<std::string, std::vector<int>> alike;
    std::vector<int> stopped, succeeded;
    for (const WorkerEnd& worker : end.workers) {
        if (&worker == cause) continue;
        if (worker.by_us) stopped.push_back(worker.rank);
        else if (!failed(worker)) succeeded.push_back(worker.rank);
        else alike[describe_end(worker)].push_back(worker.rank);
    }
    std::size_t listed = 0;
    std::size_t left_out = 0;
    for (auto& [how, ranks] : alike) {
        std::sort(ranks.begin(), ranks.end());
        if (listed++ >= kMaxOthers) left_out += ranks.size();
        else table.row(listed == 1 ? "afterwards" : "", fmt::format("rank{} {}: {}", ranks.size() == 1 ? "" : "s", format_ranges(ranks), how));
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

std::string describe_job(const JobEnd& end) {
    std::string text = fmt::format("{} worker{}, ran {}", end.world_size, end.world_size == 1 ? "" : "s", format_duration(end.wall));
    if (end.max_restarts > 0) text += fmt::format(", {} of {} restarts used", end.restarts_used, end.max_restarts);
    if (!end.run_id.empty() && end.run_id != "none") text += fmt::format(", id {}", end.run_id);
    return text;
}

}  // namespace

const WorkerEnd* root_cause(std::span<const WorkerEnd> workers) {
    const WorkerEnd* first = nullptr;
    const WorkerEnd* first_report = nullptr;
    for (const WorkerEnd& worker : workers) {
        if (worker.by_us || !failed(worker)) continue;
        if (first == nullptr || worker.order < first->order) first = &worker;
        if (!worker.error_reported) continue;
        if (first_report == nullptr || *worker.error_reported < *first_report->error_reported) first_report = &worker;
    }
    return first_report != nullptr && failed_before(*first_report, *first) ? first_report : first;
}

int exit_code(const JobEnd& end) {
    const WorkerEnd* cause = root_cause(end.workers);
    // "Do not requeue" outweighs everything: the scheduler must not start this job again.
    if (cause != nullptr && code_of(*cause) == static_cast<int>(ExitCode::DoNotRequeue)) return code_of(*cause);
    if (all_succeeded(end) && end.failure.empty()) return static_cast<int>(ExitCode::Success);
    // Workers that die of the same signal as we (the whole process group was signalled) did not cause anything.
    if (end.preempted || end.stopped_by_signal) return static_cast<int>(ExitCode::TryAgain);
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

std::string render_report(const JobEnd& end, int width) {
    const int code = exit_code(end);
    if (code == static_cast<int>(ExitCode::Success)) return "";
    const WorkerEnd* cause = root_cause(end.workers);
    Table table(width);
    table.line(headline(end, cause));
    if (cause != nullptr) describe_cause(table, *cause);
    if (!end.failure.empty() && cause != nullptr) table.row("failure", end.failure);
    describe_others(table, end, cause);
    table.row("job", describe_job(end));
    for (const std::string& note : end.notes) table.row("note", note);
    table.row("logs", end.log_directory);
    if (end.loss.bytes > 0 || !end.loss.why.empty()) {
        table.row("output lost", fmt::format("{} ({})", format_bytes(end.loss.bytes), end.loss.why));
    }
    table.row("exit code", fmt::format("{}{}", code, code == static_cast<int>(ExitCode::TryAgain) ? " (can be started again)" : ""));
    return table.take();
}

}  // namespace ddprun
