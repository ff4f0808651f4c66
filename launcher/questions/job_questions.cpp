#include "launcher/questions/job_questions.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>

#include "env/os/process_tree.h"
#include "env/text.h"
#include "launcher/hang/stacks.h"
#include "launcher/questions/hang_watch.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// The most text of a node's stacks: JSON can double it, and a message has a limit.
constexpr std::size_t kMostStackBytes = 2 * 1024 * 1024;

std::optional<int> rank_of(const ControlRequest& request) {
    const Result<std::int64_t> rank = parse_int(request.argument("rank"));
    if (!rank || *rank < 0 || *rank > 0x7fffffff) return std::nullopt;
    return static_cast<int>(*rank);
}

/// Adds this node's GPUs and the workers that use them.
void add_gpus(JobStatus& status, const std::vector<GpuUsage>& gpus, const Agent& agent) {
    std::vector<WorkerProcesses> processes;
    for (const WorkerStatus& worker : status.workers) {
        WorkerProcesses one;
        one.local_rank = worker.local_rank;
        if (const std::optional<std::string> visible =
                agent.variable(worker.local_rank, "CUDA_VISIBLE_DEVICES")) {
            one.visible_devices = *visible;
            one.limits_devices = true;
        }
        const bool runs = worker.pid != 0 && worker.state != "ended";
        if (runs) one.pids = os::descendants_of(worker.pid);
        if (runs) one.pids.push_back(worker.pid);
        processes.push_back(std::move(one));
    }
    const std::vector<WorkerGpus> used = assign_gpu_usage(gpus, processes);
    for (std::size_t i = 0; i < used.size(); ++i) status.workers[i].gpus = used[i];
    status.hosts.front().gpus = gpus;
}

/// The status in a node's answer, or one with the reason why it has none.
JobStatus status_of(const NodeAnswer& answer) {
    if (answer.trouble.empty()) {
        Result<JobStatus> status = job_status_from_json(answer.line);
        if (status) return *std::move(status);
    }
    JobStatus unknown;
    unknown.hosts.push_back({describe_node(answer.node),
                             0,
                             "",
                             "",
                             {},
                             answer.trouble.empty() ? "malformed answer" : answer.trouble});
    return unknown;
}

}  // namespace

NodeQuestions::NodeQuestions(Parts parts) : parts_(std::move(parts)), gpus_(parts_.loop, parts_.system) {
    Inquiry& inquiry = parts_.inquiry;
    using Request = ControlRequest;
    using Answer = Inquiry::Answer;
    inquiry.on_node("status",
                    [this](const Request& request, const Answer& answer) { status(request, answer); });
    inquiry.on_node("signal",
                    [this](const Request& request, const Answer& answer) { signal(request, answer); });
    inquiry.on_node("stacks",
                    [this](const Request& request, const Answer& answer) { stacks(request, answer); });
    for (const char* request : {"status", "signal", "drain"}) inquiry.takes(request, kNodeTimeout);
    inquiry.takes("stacks", kNodeStackTimeout);
    // Without the head, a node shows its own workers.
    inquiry.on_no_head("status", [this](const Request&, const std::string& why, const Answer& answer) {
        JobStatus status = parts_.observation.status();
        status.hosts.push_back({"head", 0, "", "", {}, why});
        answer(to_json(status));
    });
}

int NodeQuestions::local_rank_of(const std::string& rank) const {
    const Result<std::int64_t> number = parse_int(rank);
    const std::int64_t local_rank = number ? *number - parts_.agent.first_rank() : -1;
    return local_rank < 0 || local_rank >= static_cast<std::int64_t>(parts_.agent.state().workers.size())
               ? -1
               : static_cast<int>(local_rank);
}

std::string NodeQuestions::workers_text() const {
    const int first = parts_.agent.first_rank();
    return fmt::format("{} runs ranks {} to {}", parts_.host, first,
                       first + static_cast<int>(parts_.agent.state().workers.size()) - 1);
}

void NodeQuestions::status(const ControlRequest& request, const Inquiry::Answer& answer) {
    if (request.argument("gpus") != "shown") return answer(to_json(parts_.observation.status()));
    gpus_.measure([this, answer](const std::vector<GpuUsage>& gpus) {
        JobStatus status = parts_.observation.status();
        if (!gpus.empty()) add_gpus(status, gpus, parts_.agent);
        answer(to_json(status));
    });
}

void NodeQuestions::signal(const ControlRequest& request, const Inquiry::Answer& answer) {
    const std::optional<int> signal = signal_from_name(request.argument("signal"));
    const std::string rank = request.argument("rank");
    const int local_rank = local_rank_of(rank);
    if (!signal)
        return answer(control_error(fmt::format("'{}' is not a signal", request.argument("signal"))));
    if (local_rank < 0) return answer(control_error(fmt::format("no rank {}; {}", rank, workers_text())));
    if (!parts_.agent.signal_worker(local_rank, *signal))
        return answer(control_error(fmt::format("rank {} is not running", rank)));
    parts_.observation.signal_asked(*signal, parts_.agent.first_rank() + local_rank);
    answer(control_text(fmt::format("{} sent to rank {}", signal_name(*signal), rank)));
}

void NodeQuestions::stacks(const ControlRequest& request, const Inquiry::Answer& answer) {
    std::vector<StackTarget> targets = stack_targets(parts_.agent);
    if (const std::optional<int> rank = rank_of(request)) {
        std::erase_if(targets, [&](const StackTarget& target) { return target.rank != *rank; });
    }
    if (targets.empty()) return answer(control_error("none of the workers asked for runs"));
    collect_stacks(parts_.loop, parts_.system, std::move(targets), kStackTimeout,
                   [answer, host = parts_.host](std::vector<RankStack> stacks) {
                       const std::size_t share = std::max<std::size_t>(kMostStackBytes / stacks.size(), 1024);
                       for (RankStack& stack : stacks) {
                           stack.host = host;
                           if (stack.text.size() > share)
                               stack.text = stack.text.substr(0, share) + "\n(the rest is left out)\n";
                       }
                       answer(answer_of("stacks", stacks));
                   });
}

// ---- the job

JobQuestions::JobQuestions(Parts parts) : parts_(parts) {
    Inquiry& inquiry = parts_.inquiry;
    using Request = ControlRequest;
    using Answer = Inquiry::Answer;
    inquiry.on_job("status",
                   [this](const Request& request, const Answer& answer) { status(request, answer); });
    inquiry.on_job("signal",
                   [this](const Request& request, const Answer& answer) { signal(request, answer); });
    inquiry.on_job("stacks",
                   [this](const Request& request, const Answer& answer) { stacks(request, answer); });
    inquiry.on_job("drain", [this](const Request&, const Answer& answer) {
        parts_.controller.preempt(SIGTERM, "ddprun drain");
        answer(control_text(
            fmt::format("told to save and stop; grace {}", format_duration(parts_.spec.preempt_grace))));
    });
}

void JobQuestions::status(const ControlRequest& request, const Inquiry::Answer& answer) {
    parts_.survey.ask_nodes(request, std::nullopt, kNodeTimeout,
                            [this, answer](const std::vector<NodeAnswer>& answers) {
                                const JobStatus head = parts_.observation.status();
                                if (answers.empty()) return answer(to_json(head));
                                std::vector<JobStatus> nodes;
                                for (const NodeAnswer& node : answers) nodes.push_back(status_of(node));
                                answer(to_json(merge_status(head, nodes)));
                            });
}

void JobQuestions::signal(const ControlRequest& request, const Inquiry::Answer& answer) {
    const std::optional<int> signal = signal_from_name(request.argument("signal"));
    if (!signal)
        return answer(control_error(fmt::format("'{}' is not a signal", request.argument("signal"))));
    const std::string who = request.argument("rank");
    if (who.empty()) {
        parts_.observation.signal_asked(*signal, std::nullopt);
        parts_.controller.forward(*signal);
        return answer(control_text(fmt::format("{} sent to all workers", signal_name(*signal))));
    }
    parts_.survey.ask_nodes(
        request, rank_of(request).value_or(-1), kNodeTimeout,
        [this, who, answer](const std::vector<NodeAnswer>& answers) {
            if (answers.empty())
                return answer(control_error(fmt::format("no rank {}; the job has {} workers", who,
                                                        parts_.observation.status().world_size)));
            const NodeAnswer& node = answers.front();
            answer(node.trouble.empty()
                       ? node.line
                       : control_error(fmt::format("{}: {}", describe_node(node.node), node.trouble)));
        });
}

void JobQuestions::stacks(const ControlRequest& request, const Inquiry::Answer& answer) {
    const std::string who = request.argument("rank");
    const std::optional<int> rank = who.empty() ? std::nullopt : std::optional(rank_of(request).value_or(-1));
    parts_.survey.ask_nodes(
        request, rank, kNodeStackTimeout, [this, who, answer](const std::vector<NodeAnswer>& answers) {
            if (!answers.empty())
                return answer(
                    control_text(render_node_stacks(answers, parts_.observation.status().nodes > 1)));
            const int workers = parts_.observation.status().world_size;
            answer(
                control_error(who.empty() || workers == 0
                                  ? "no worker runs"
                                  : fmt::format("no such rank: {}; the job has {} workers", who, workers)));
        });
}

}  // namespace ddprun
