#include "launcher/job_status.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"

namespace ddprun {
namespace {

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
