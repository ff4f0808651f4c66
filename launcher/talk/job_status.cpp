#include "launcher/talk/job_status.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "env/describe.h"
#include "env/text.h"
#include "launcher/talk/control.h"

namespace ddprun {
namespace {

const WorkerStatus* same_process(const JobStatus* before, const WorkerStatus& worker) {
    if (before == nullptr) return nullptr;
    const auto found =
        std::find_if(before->workers.begin(), before->workers.end(), [&](const WorkerStatus& other) {
            return other.rank == worker.rank && other.pid == worker.pid && other.seconds <= worker.seconds;
        });
    return found == before->workers.end() ? nullptr : &*found;
}

WorkerRates rates(double cpu, double steps, double comm, double seconds) {
    if (seconds <= 0) return {};
    return {100 * cpu / seconds, steps / seconds, 100 * comm / seconds};
}

/// A label's value, escaped for the text format.
std::string label(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '\\' || c == '"') out += '\\';
        if (c == '\n') out += "\\n";
        else out += c;
    }
    return out;
}

struct Loss {
    const char* cause;
    double seconds;
};
std::array<Loss, 3> losses(const JobStatus& status) {
    return {{{"failures", status.lost_to_failures},
             {"restarts", status.lost_to_restarts},
             {"rehearsals", status.lost_to_rehearsals}}};
}

class Metrics {
  public:
    explicit Metrics(const JobStatus& status)
        : status_(status),
          job_(fmt::format("run_id=\"{}\",host=\"{}\"", label(status.run_id), label(status.host))) {}

    void job(const char* name, const char* type, const char* help, double value) {
        head(name, type, help);
        text_ += fmt::format("ddprun_{}{{{}}} {}\n", name, job_, value);
    }
    template <class Value>
    void workers(const char* name, const char* type, const char* help, const Value& value,
                 bool WorkerStatus::*has_value = nullptr) {
        head(name, type, help);
        for (const WorkerStatus& worker : status_.workers) {
            if (has_value != nullptr && !(worker.*has_value)) continue;
            text_ += fmt::format("ddprun_{}{{{},rank=\"{}\"}} {}\n", name, job_, worker.rank, value(worker));
        }
    }
    void lost() {
        head("lost_seconds_total", "counter", "Time in which the job got nowhere, by cause.");
        for (const Loss& loss : losses(status_))
            text_ += fmt::format("ddprun_lost_seconds_total{{{},cause=\"{}\"}} {}\n", job_, loss.cause,
                                 loss.seconds);
    }
    std::string take() { return std::move(text_); }

  private:
    void head(const char* name, const char* type, const char* help) {
        text_ += fmt::format("# HELP ddprun_{0} {2}\n# TYPE ddprun_{0} {1}\n", name, type, help);
    }
    const JobStatus& status_;
    std::string job_;
    std::string text_;
};

std::string span(double seconds) {
    return format_duration(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

std::string line_of(std::string text, int width) {
    text = printable(text);
    return (width > 0 ? wrap(text, static_cast<std::size_t>(width), 4) : text) + '\n';
}

std::string title(const JobStatus& status) {
    std::string text = fmt::format("job {} (run id {}, pid {} on {}): {}", status.job, status.run_id,
                                   status.pid, status.host, status.phase);
    text += fmt::format(", generation {}", status.generation);
    if (status.is_head) text += fmt::format(", {} of {} restarts", status.restarts_used, status.max_restarts);
    text += fmt::format(", {} worker{}", status.world_size, status.world_size == 1 ? "" : "s");
    if (status.nodes > 1) text += fmt::format(" on {} nodes", status.nodes);
    return text + fmt::format(", {}, {}", span(status.seconds), status.program);
}

enum class Align : std::uint8_t { Left, Right };
constexpr int kAlways = 100;

/// Of the rank that has most. Ranks commit the same steps, so that they differ by one step and by the time
/// for which each waited before a generation.
std::optional<double> useful_seconds(const JobStatus& status) {
    std::optional<double> most;
    for (const WorkerStatus& worker : status.workers) most = std::max(most, worker.useful_seconds);
    if (most) *most += status.useful_before;
    return most;
}

/// "; 3 recoveries so far, 97.2 % of the time useful, 1.5 s lost in failures", or "".
std::string recovered_so_far(const JobStatus& status) {
    std::string text;
    if (status.recoveries > 0)
        text = fmt::format("; {} {} so far", status.recoveries,
                           status.recoveries == 1 ? "recovery" : "recoveries");
    std::string lost;
    for (const Loss& loss : losses(status)) {
        if (loss.seconds > 0) lost += fmt::format(", {} lost in {}", span(loss.seconds), loss.cause);
    }
    const std::optional<double> useful = useful_seconds(status);
    if (!useful || status.seconds <= 0 || (text.empty() && lost.empty())) return text;
    return fmt::format("{}{} {:.1f} % of the time useful{}", text, text.empty() ? ";" : ",",
                       100 * *useful / status.seconds, lost);
}

struct Column {
    std::string name;
    std::size_t width = 0;  ///< minimum; wider cells widen it
    Align align = Align::Right;
    int keep = kAlways;  ///< when room is short, the column with the smallest goes first
    std::vector<std::string> cells = {};
};

const HostStatus* host_of(const JobStatus& status, const WorkerStatus& worker) {
    const auto node = static_cast<std::size_t>(worker.node);
    return node < status.hosts.size() ? &status.hosts[node] : nullptr;
}

/// The worker's GPUs as "0,1", or "3?" when presumed.
std::string gpu_names(const WorkerStatus& worker) {
    std::string names;
    for (const unsigned index : worker.gpus.indices)
        names += (names.empty() ? "" : ",") + std::to_string(index);
    if (names.empty()) return "-";
    return worker.gpus.is_presumed ? names + '?' : names;
}

/// The load of the busiest of the worker's GPUs.
std::string gpu_busy(const HostStatus* host, const WorkerStatus& worker) {
    if (host == nullptr || worker.gpus.indices.empty()) return "-";
    unsigned busy = 0;
    for (const GpuUsage& gpu : host->gpus) {
        const auto& mine = worker.gpus.indices;
        if (std::find(mine.begin(), mine.end(), gpu.index) != mine.end())
            busy = std::max(busy, gpu.busy_percent);
    }
    return std::to_string(busy);
}

constexpr std::size_t kMostHostWidth = 20;
constexpr std::size_t kUsefulCollective = 12;

std::vector<Column> columns_of(const JobStatus* before, const JobStatus& now) {
    enum {
        Host,
        Rank,
        Pid,
        State,
        Cpu,
        Rss,
        Gpu,
        GpuBusy,
        GpuMemory,
        Step,
        StepRate,
        Comm,
        Silent,
        Collective
    };
    std::vector<Column> columns = {{"HOST", 4, Align::Left, 8},
                                   {"RANK", 5},
                                   {"PID", 8, Align::Right, 1},
                                   {"STATE", 8, Align::Left},
                                   {"CPU%", 5},
                                   {"RSS", 8, Align::Right, 4},
                                   {"GPU", 4, Align::Right, 9},
                                   {"GPU%", 4, Align::Right, 7},
                                   {"GPU MEM", 8, Align::Right, 3},
                                   {"STEP", 8, Align::Right, 6},
                                   {"STEPS/S", 7, Align::Right, 10},
                                   {"COMM%", 5, Align::Right, 5},
                                   {"SILENT FOR", 10, Align::Left, 2},
                                   {"COLLECTIVE", 0, Align::Left}};
    for (const WorkerStatus& worker : now.workers) {
        const WorkerRates rate = rates_between(before, worker);
        const HostStatus* const host = host_of(now, worker);
        const auto put = [&](int column, std::string text) {
            columns[static_cast<std::size_t>(column)].cells.push_back(printable(text));
        };
        put(Host, host == nullptr ? "?" : host->host.substr(0, kMostHostWidth));
        put(Rank, std::to_string(worker.rank));
        put(Pid, std::to_string(worker.pid));
        put(State, worker.state);
        put(Cpu, fmt::format("{:.0f}", rate.cpu_percent));
        put(Rss, format_bytes(worker.rss_bytes));
        put(Gpu, gpu_names(worker));
        put(GpuBusy, gpu_busy(host, worker));
        put(GpuMemory, worker.gpus.used_bytes == 0 ? "-" : format_bytes(worker.gpus.used_bytes));
        put(Step, worker.reports_steps ? std::to_string(worker.step) : "-");
        put(StepRate, worker.reports_steps ? fmt::format("{:.1f}", rate.steps_per_second) : "-");
        put(Comm, worker.uses_libddp ? fmt::format("{:.0f}", rate.comm_percent) : "-");
        put(Silent, span(worker.quiet_seconds));
        put(Collective, worker.collective);
    }
    const bool has_gpus = std::any_of(now.hosts.begin(), now.hosts.end(),
                                      [](const HostStatus& host) { return !host.gpus.empty(); });
    std::erase_if(columns, [&](const Column& column) {
        return (column.name == "HOST" && now.hosts.size() < 2) ||
               (column.name.starts_with("GPU") && !has_gpus);
    });
    return columns;
}

/// Leaves out columns for which there is no room, the least important first.
void fit(std::vector<Column>& columns, std::size_t width) {
    for (;;) {
        std::size_t needed = kUsefulCollective;
        for (const Column& column : columns) needed += column.width + 1;
        const auto least = std::min_element(columns.begin(), columns.end(),
                                            [](const Column& a, const Column& b) { return a.keep < b.keep; });
        if (needed <= width || least->keep == kAlways) return;
        columns.erase(least);
    }
}

std::string table(std::vector<Column> columns, std::size_t rows, int width) {
    for (Column& column : columns) {
        if (&column == &columns.back()) continue;
        column.width = std::max(column.width, column.name.size());
        for (const std::string& cell : column.cells) column.width = std::max(column.width, cell.size());
    }
    if (width > 0) fit(columns, static_cast<std::size_t>(width));
    std::string text;
    for (std::size_t row = 0; row <= rows; ++row) {
        std::string line;
        for (const Column& column : columns) {
            const std::string& cell = row == 0 ? column.name : column.cells[row - 1];
            if (!line.empty()) line += ' ';
            line += column.align == Align::Right ? fmt::format("{:>{}}", cell, column.width)
                                                 : fmt::format("{:<{}}", cell, column.width);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        if (width > 0 && line.size() > static_cast<std::size_t>(width))
            line.resize(static_cast<std::size_t>(width));
        text += line + '\n';
    }
    return text;
}

}  // namespace

WorkerRates rates_between(const JobStatus* before, const WorkerStatus& worker) {
    const WorkerStatus* last = same_process(before, worker);
    if (last == nullptr || last->seconds == worker.seconds || last->step > worker.step) {
        return rates(worker.cpu_seconds, static_cast<double>(worker.step), worker.comm_seconds,
                     worker.seconds);
    }
    // Clocks of nodes differ; a worker's age is by its node's clock.
    return rates(std::max(0.0, worker.cpu_seconds - last->cpu_seconds),
                 static_cast<double>(worker.step - last->step),
                 std::max(0.0, worker.comm_seconds - last->comm_seconds), worker.seconds - last->seconds);
}

JobStatus merge_status(JobStatus head, const std::vector<JobStatus>& nodes) {
    head.hosts.clear();
    head.workers.clear();
    head.lost_output_bytes = 0;
    for (const JobStatus& node : nodes) {
        for (WorkerStatus worker : node.workers) {
            worker.node = static_cast<int>(head.hosts.size());
            head.workers.push_back(std::move(worker));
        }
        head.hosts.push_back(node.hosts.empty()
                                 ? HostStatus{node.host, node.pid, "", "", {}, "its status names no host"}
                                 : node.hosts.front());
        head.lost_output_bytes += node.lost_output_bytes;
    }
    return head;
}

std::string render_metrics(const JobStatus& status) {
    Metrics metrics(status);
    metrics.job("up_seconds", "gauge", "Time since ddprun was started.", status.seconds);
    metrics.job("generation", "gauge", "Number of the generation that runs or ran last.",
                static_cast<double>(status.generation));
    metrics.job("world_size", "gauge", "Workers on all nodes.", status.world_size);
    if (status.is_head) {
        metrics.job("restarts_total", "counter", "Restarts of the gang so far.", status.restarts_used);
        metrics.job("recoveries_total", "counter", "Failures that were recovered in place.",
                    status.recoveries);
        metrics.job("restarts_allowed", "gauge", "Restarts that --max-restarts allows.", status.max_restarts);
    }
    metrics.job("running", "gauge", "1 while the generation's workers run.",
                status.phase == "running" ? 1 : 0);
    metrics.job("lost_output_bytes_total", "counter", "Output of workers that could not be kept.",
                static_cast<double>(status.lost_output_bytes));
    metrics.workers("worker_up", "gauge", "1 while the worker of this node runs.",
                    [](const WorkerStatus& w) { return w.pid != 0 && w.state != "ended" ? 1 : 0; });
    metrics.workers("worker_cpu_seconds_total", "counter", "CPU time of the worker's process.",
                    [](const WorkerStatus& w) { return w.cpu_seconds; });
    metrics.workers("worker_resident_bytes", "gauge", "Resident memory of the worker's process.",
                    [](const WorkerStatus& w) { return w.rss_bytes; });
    metrics.workers("worker_silent_seconds", "gauge", "Time since the worker last wrote a line.",
                    [](const WorkerStatus& w) { return w.quiet_seconds; });
    metrics.workers(
        "worker_steps_total", "counter", "Training steps done, of workers that report them.",
        [](const WorkerStatus& w) { return w.step; }, &WorkerStatus::reports_steps);
    metrics.workers(
        "worker_comm_seconds_total", "counter", "Time inside collectives (libddp).",
        [](const WorkerStatus& w) { return w.comm_seconds; }, &WorkerStatus::uses_libddp);
    if (const std::optional<double> useful = useful_seconds(status))
        metrics.job("useful_seconds_total", "counter",
                    "Time of the steps that are committed (ddp::Recovery).", *useful);
    if (status.is_head) metrics.lost();
    return metrics.take();
}

static void describe(Visitor& v, HostStatus& host) {
    v("host", host.host);
    v.usually("trouble", host.trouble);
    if (!host.trouble.empty()) return;
    v("pid", host.pid);
    v("phase", host.phase);
    v("log_directory", host.log_directory);
    v.usually("gpus", host.gpus);
}

static void describe(Visitor& v, WorkerStatus& worker) {
    v("node", worker.node);
    v("rank", worker.rank);
    v("local_rank", worker.local_rank);
    v("pid", worker.pid);
    v("state", worker.state);
    v("seconds", worker.seconds);
    v("cpu_seconds", worker.cpu_seconds);
    v("rss_bytes", worker.rss_bytes);
    v("quiet_seconds", worker.quiet_seconds);
    v.usually("gpus", worker.gpus.indices);
    if (!worker.gpus.indices.empty()) {
        v("gpus_presumed", worker.gpus.is_presumed);
        v("gpu_bytes", worker.gpus.used_bytes);
    }
    v.only_if(worker.reports_steps, "step", worker.step);
    v("useful_seconds", worker.useful_seconds);
    v.only_if(worker.uses_libddp, "comm_seconds", worker.comm_seconds);
    v.only_if(worker.uses_libddp, "collective", worker.collective);
}

static void describe(Visitor& v, JobStatus& status) {
    v("job", status.job);
    v("run_id", status.run_id);
    v("program", status.program);
    v("host", status.host);
    v("pid", status.pid);
    v("is_head", status.is_head);
    v("phase", status.phase);
    v("generation", status.generation);
    v("restarts_used", status.restarts_used);
    v("max_restarts", status.max_restarts);
    v("recoveries", status.recoveries);
    v("useful_before", status.useful_before);
    v("lost_to_failures", status.lost_to_failures);
    v("lost_to_restarts", status.lost_to_restarts);
    v("lost_to_rehearsals", status.lost_to_rehearsals);
    v("recovery", status.recovery);
    v("world_size", status.world_size);
    v("nodes", status.nodes);
    v("seconds", status.seconds);
    v("log_directory", status.log_directory);
    v("lost_output_bytes", status.lost_output_bytes);
    v("uid", status.uid);
    v("hosts", status.hosts);
    v("workers", status.workers);
}

std::string to_json(const JobStatus& status) { return answer_of(status); }

Result<JobStatus> job_status_from_json(std::string_view line) {
    Result<JobStatus> status = answer_from<JobStatus>(line, Strictness::Tolerant);
    if (!status) return status;
    // `node` is an index into the hosts and comes from a peer: check it.
    for (WorkerStatus& worker : status->workers) {
        if (worker.node < 0 || worker.node >= static_cast<int>(status->hosts.size())) worker.node = 0;
    }
    return status;
}

std::vector<std::size_t> one_answer_each(const std::vector<std::optional<JobStatus>>& answers) {
    std::vector<std::size_t> chosen;
    for (std::size_t i = 0; i < answers.size(); ++i) {
        if (!answers[i]) continue;
        const JobStatus& one = *answers[i];
        const bool is_known = std::any_of(chosen.begin(), chosen.end(),
                                          [&](std::size_t other) { return answers[other]->job == one.job; });
        const bool has_head =
            std::any_of(answers.begin(), answers.end(), [&](const std::optional<JobStatus>& other) {
                return other && other->is_head && other->run_id == one.run_id;
            });
        if (!is_known && (one.is_head || !has_head)) chosen.push_back(i);
    }
    return chosen;
}

std::string render_status(const JobStatus* before, const JobStatus& now, int width) {
    std::string text = line_of(title(now), width);
    if (!now.recovery.empty())
        text += line_of("after a failure: " + now.recovery + recovered_so_far(now), width);
    if (!now.log_directory.empty()) text += line_of("logs: " + now.log_directory, width);
    for (const HostStatus& host : now.hosts) {
        if (!host.trouble.empty())
            text += line_of(fmt::format("node {}: {}", host.host, host.trouble), width);
    }
    if (now.workers.empty()) return text;
    text += table(columns_of(before, now), now.workers.size(), width);
    // With several nodes the workers' rows are enough.
    if (now.hosts.size() == 1) text += render_gpu_usage(now.hosts.front().gpus);
    return text;
}

}  // namespace ddprun
