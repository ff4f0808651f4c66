#include "launcher/talk/job_status.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "env/json.h"
#include "env/text.h"

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

/// Appends what `read` makes of each object of a list.
template <class T>
void take_list(const Json& json, const char* name, std::vector<T>& into, T (*read)(const Json&)) {
    for (const Json& entry : elements(member(json, name))) {
        if (entry.is_object()) into.push_back(read(entry));
    }
}

/// Visits the members of a worker.
template <class Worker, class Field>
void each_worker_member(Worker& worker, const Field& field) {
    field("node", worker.node);
    field("rank", worker.rank);
    field("local_rank", worker.local_rank);
    field("pid", worker.pid);
    field("state", worker.state);
    field("seconds", worker.seconds);
    field("cpu_seconds", worker.cpu_seconds);
    field("rss_bytes", worker.rss_bytes);
    field("quiet_seconds", worker.quiet_seconds);
}

/// Visits the members of a job.
template <class Status, class Field>
void each_job_member(Status& status, const Field& field) {
    field("job", status.job);
    field("run_id", status.run_id);
    field("program", status.program);
    field("host", status.host);
    field("pid", status.pid);
    field("is_head", status.is_head);
    field("phase", status.phase);
    field("generation", status.generation);
    field("restarts_used", status.restarts_used);
    field("max_restarts", status.max_restarts);
    field("recoveries", status.recoveries);
    field("useful_before", status.useful_before);
    field("lost_to_failures", status.lost_to_failures);
    field("lost_to_restarts", status.lost_to_restarts);
    field("lost_to_rehearsals", status.lost_to_rehearsals);
    field("recovery", status.recovery);
    field("world_size", status.world_size);
    field("nodes", status.nodes);
    field("seconds", status.seconds);
    field("log_directory", status.log_directory);
    field("lost_output_bytes", status.lost_output_bytes);
}

Json json_of(const WorkerStatus& worker) {
    Json json;
    each_worker_member(worker, member_writer(json));
    if (!worker.gpus.indices.empty()) {
        json["gpus"] = worker.gpus.indices;
        json["gpus_presumed"] = worker.gpus.is_presumed;
        json["gpu_bytes"] = worker.gpus.used_bytes;
    }
    if (worker.reports_steps) json["step"] = worker.step;
    if (worker.useful_seconds) json["useful_seconds"] = *worker.useful_seconds;
    if (!worker.uses_libddp) return json;
    json["comm_seconds"] = worker.comm_seconds;
    json["collective"] = worker.collective;
    return json;
}

Json json_of(const HostStatus& host) {
    Json json = {{"host", host.host}};
    if (!host.trouble.empty()) {
        json["trouble"] = host.trouble;
        return json;
    }
    json["pid"] = host.pid;
    json["phase"] = host.phase;
    json["log_directory"] = host.log_directory;
    if (!host.gpus.empty()) json["gpus"] = json_of(host.gpus);
    return json;
}

HostStatus host_from(const Json& json) {
    HostStatus host;
    take(json, "host", host.host);
    take(json, "pid", host.pid);
    take(json, "phase", host.phase);
    take(json, "log_directory", host.log_directory);
    take(json, "trouble", host.trouble);
    host.gpus = gpu_usage_from(member(json, "gpus"));
    return host;
}

WorkerStatus worker_from(const Json& json) {
    WorkerStatus worker;
    each_worker_member(worker, member_reader(json));
    for (const Json& index : elements(member(json, "gpus"))) {
        const Result<int> number = as<int>(index);
        if (number && *number >= 0) worker.gpus.indices.push_back(static_cast<unsigned>(*number));
    }
    take(json, "gpus_presumed", worker.gpus.is_presumed);
    take(json, "gpu_bytes", worker.gpus.used_bytes);
    worker.reports_steps = json.contains("step");
    take(json, "step", worker.step);
    if (json.contains("useful_seconds")) take(json, "useful_seconds", worker.useful_seconds.emplace());
    worker.uses_libddp = json.contains("comm_seconds");
    take(json, "comm_seconds", worker.comm_seconds);
    take(json, "collective", worker.collective);
    return worker;
}

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

std::string to_json(const JobStatus& status) {
    Json json = {{"ok", true}};
    each_job_member(status, member_writer(json));
    if (status.uid) json["uid"] = *status.uid;
    json["hosts"] = json_list(status.hosts, [](const HostStatus& host) { return json_of(host); });
    json["workers"] = json_list(status.workers, [](const WorkerStatus& worker) { return json_of(worker); });
    return to_text(json) + '\n';
}

Result<JobStatus> job_status_from_json(std::string_view line) {
    const Result<Json> object = parse_json_object(line);
    if (!object) return Error{Errc::Protocol, "the answer is not a JSON object", 0};
    const Json& json = *object;
    bool ok = false;
    take(json, "ok", ok);
    if (!ok) {
        std::string why = "the job gave no reason";
        take(json, "error", why);
        return Error{Errc::Refused, why, 0};
    }
    JobStatus status;
    each_job_member(status, member_reader(json));
    take_list(json, "hosts", status.hosts, host_from);
    take_list(json, "workers", status.workers, worker_from);
    // `node` is an index into the hosts and comes from a peer: check it.
    for (WorkerStatus& worker : status.workers) {
        if (worker.node < 0 || worker.node >= static_cast<int>(status.hosts.size())) worker.node = 0;
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
