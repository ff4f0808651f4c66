#include "launcher/job_status.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"

namespace ddprun {
namespace {

std::string span(double seconds) {
    return format_duration(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

const WorkerStatus* same_process(const JobStatus* before, const WorkerStatus& worker) {
    if (before == nullptr) return nullptr;
    const auto found = std::find_if(before->workers.begin(), before->workers.end(), [&](const WorkerStatus& other) {
        return other.rank == worker.rank && other.pid == worker.pid && other.seconds <= worker.seconds;
    });
    return found == before->workers.end() ? nullptr : &*found;
}

WorkerRates rates(double cpu, double steps, double comm, double seconds) {
    if (seconds <= 0) return {};
    return {100 * cpu / seconds, steps / seconds, 100 * comm / seconds};
}

/// Other people's words on a terminal: no control characters.
std::string printable(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
    return text;
}

std::string cut(std::string text, int width) {
    if (width > 0 && text.size() > static_cast<std::size_t>(width)) text.resize(static_cast<std::size_t>(width));
    return text;
}

std::string title(const JobStatus& status) {
    std::string text = fmt::format("job {} (run id {}, pid {} on {}): {}", status.job, status.run_id, status.pid,
                                   status.host, status.phase);
    text += fmt::format(", generation {}", status.generation);
    if (status.is_head) text += fmt::format(", {} of {} restarts", status.restarts_used, status.max_restarts);
    text += fmt::format(", {} worker{}", status.world_size, status.world_size == 1 ? "" : "s");
    if (status.nodes > 1) text += fmt::format(" on {} nodes", status.nodes);
    return text + fmt::format(", {}, {}", span(status.seconds), status.program);
}

bool shows_gpus(const JobStatus& status) {
    return std::any_of(status.hosts.begin(), status.hosts.end(), [](const HostStatus& host) { return !host.gpus.empty(); });
}

/// "   0,1    87   12 GiB": its GPUs, how busy the busiest of them is, its own memory there. "0?" is presumed.
std::string gpu_columns(const JobStatus& status, const WorkerStatus& worker) {
    std::string names;
    unsigned busy = 0;
    const auto node = static_cast<std::size_t>(worker.node);
    for (const unsigned index : worker.gpus.indices) {
        names += (names.empty() ? "" : ",") + std::to_string(index);
        for (const GpuUsage& gpu : node < status.hosts.size() ? status.hosts[node].gpus : std::vector<GpuUsage>{}) {
            if (gpu.index == index) busy = std::max(busy, gpu.busy_percent);
        }
    }
    if (names.empty()) return fmt::format(" {:>6} {:>5} {:>9}", "-", "-", "-");
    if (worker.gpus.is_presumed) names += '?';
    return fmt::format(" {:>6} {:>5} {:>9}", names, busy, worker.gpus.used_bytes == 0 ? "-" : format_bytes(worker.gpus.used_bytes));
}

std::string row(const JobStatus& status, const WorkerStatus& worker, const WorkerRates& rate) {
    std::string text = fmt::format("{:>6} {:>8} {:<9}{:>7.0f} {:>9}", worker.rank, worker.pid, worker.state,
                                   rate.cpu_percent, format_bytes(worker.rss_bytes));
    if (shows_gpus(status)) text += gpu_columns(status, worker);
    if (worker.uses_libddp) {
        text += fmt::format(" {:>9} {:>8.1f} {:>6.0f}", worker.step, rate.steps_per_second, rate.comm_percent);
    } else {
        text += fmt::format(" {:>9} {:>8} {:>6}", "-", "-", "-");
    }
    text += fmt::format("  {:<12}", span(worker.quiet_seconds));
    return worker.collective.empty() ? text : text + ' ' + worker.collective;
}

constexpr std::size_t kMostHostWidth = 20;

std::size_t longest_host(const JobStatus& status) {
    std::size_t longest = 4;
    for (const HostStatus& host : status.hosts) {
        if (host.trouble.empty()) longest = std::max(longest, host.host.size());
    }
    return std::min(longest, kMostHostWidth);
}

/// A label's value, as the text format wants it.
std::string label(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '\\' || c == '"') out += '\\';
        if (c == '\n') out += "\\n";
        else out += c;
    }
    return out;
}

class Metrics {
  public:
    explicit Metrics(const JobStatus& status) : status_(status), job_(fmt::format("run_id=\"{}\",host=\"{}\"", label(status.run_id), label(status.host))) {}

    void job(const char* name, const char* type, const char* help, double value) {
        head(name, type, help);
        text_ += fmt::format("ddprun_{}{{{}}} {}\n", name, job_, value);
    }
    template <class Value>
    void workers(const char* name, const char* type, const char* help, bool of_libddp, const Value& value) {
        head(name, type, help);
        for (const WorkerStatus& worker : status_.workers) {
            if (of_libddp && !worker.uses_libddp) continue;
            text_ += fmt::format("ddprun_{}{{{},rank=\"{}\"}} {}\n", name, job_, worker.rank, value(worker));
        }
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

}  // namespace

WorkerRates rates_between(const JobStatus* before, const WorkerStatus& worker) {
    const WorkerStatus* last = same_process(before, worker);
    if (last == nullptr || last->seconds == worker.seconds || last->step > worker.step) {
        return rates(worker.cpu_seconds, static_cast<double>(worker.step), worker.comm_seconds, worker.seconds);
    }
    // Each node has a clock of its own; a worker's age is of its node's.
    return rates(std::max(0.0, worker.cpu_seconds - last->cpu_seconds), static_cast<double>(worker.step - last->step),
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
        head.hosts.push_back(node.hosts.empty() ? HostStatus{node.host, node.pid, "", "", {}, "it said nothing of itself"} : node.hosts.front());
        head.lost_output_bytes += node.lost_output_bytes;
    }
    return head;
}

std::string render_status(const JobStatus* before, const JobStatus& now, int width) {
    std::string text = printable(title(now)) + '\n';
    if (!now.log_directory.empty()) text += printable("logs: " + now.log_directory) + '\n';
    for (const HostStatus& host : now.hosts) {
        if (!host.trouble.empty()) text += printable(fmt::format("node {}: {}", host.host, host.trouble)) + '\n';
    }
    if (now.workers.empty()) return text;
    const std::size_t host_width = now.hosts.size() > 1 ? longest_host(now) : 0;
    std::string head = fmt::format("{:>6} {:>8} {:<9}{:>7} {:>9}", "RANK", "PID", "STATE", "CPU%", "RSS");
    if (shows_gpus(now)) head += fmt::format(" {:>6} {:>5} {:>9}", "GPU", "GPU%", "GPU MEM");
    head += fmt::format(" {:>9} {:>8} {:>6}  {:<12} {}", "STEP", "STEPS/S", "COMM%", "SILENT FOR", "COLLECTIVE");
    if (host_width > 0) head = fmt::format("{:<{}} ", "HOST", host_width) + head;
    text += cut(std::move(head), width) + '\n';
    for (const WorkerStatus& worker : now.workers) {
        std::string line = row(now, worker, rates_between(before, worker));
        if (host_width > 0) line = fmt::format("{:<{}} ", now.hosts[static_cast<std::size_t>(worker.node)].host.substr(0, host_width), host_width) + line;
        text += cut(printable(std::move(line)), width) + '\n';
    }
    // Of several nodes the workers' rows tell enough.
    if (now.hosts.size() == 1) text += render_gpu_usage(now.hosts.front().gpus);
    return text;
}

std::string render_metrics(const JobStatus& status) {
    Metrics metrics(status);
    metrics.job("up_seconds", "gauge", "Time since ddprun was started.", status.seconds);
    metrics.job("generation", "gauge", "Number of the generation that runs or ran last.", static_cast<double>(status.generation));
    metrics.job("world_size", "gauge", "Workers on all nodes.", status.world_size);
    if (status.is_head) {
        metrics.job("restarts_total", "counter", "Restarts of the gang so far.", status.restarts_used);
        metrics.job("restarts_allowed", "gauge", "Restarts that --max-restarts allows.", status.max_restarts);
    }
    metrics.job("running", "gauge", "1 while the generation's workers run.", status.phase == "running" ? 1 : 0);
    metrics.job("lost_output_bytes_total", "counter", "Output of workers that could not be kept.",
                static_cast<double>(status.lost_output_bytes));
    metrics.workers("worker_up", "gauge", "1 while the worker of this node runs.", false,
                    [](const WorkerStatus& w) { return w.pid != 0 && w.state != "ended" ? 1 : 0; });
    metrics.workers("worker_cpu_seconds_total", "counter", "CPU time of the worker's process.", false,
                    [](const WorkerStatus& w) { return w.cpu_seconds; });
    metrics.workers("worker_resident_bytes", "gauge", "Resident memory of the worker's process.", false,
                    [](const WorkerStatus& w) { return w.rss_bytes; });
    metrics.workers("worker_silent_seconds", "gauge", "Time since the worker last wrote a line.", false,
                    [](const WorkerStatus& w) { return w.quiet_seconds; });
    metrics.workers("worker_steps_total", "counter", "Training steps done (libddp).", true,
                    [](const WorkerStatus& w) { return w.step; });
    metrics.workers("worker_comm_seconds_total", "counter", "Time inside collectives (libddp).", true,
                    [](const WorkerStatus& w) { return w.comm_seconds; });
    return metrics.take();
}

}  // namespace ddprun
