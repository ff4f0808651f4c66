#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/plan.h"
#include "launcher/report.h"

namespace ddprun {
namespace {

bool is_secret(std::string_view name) {
    for (const EnvironmentRow& row : environment_contract()) {
        if (row.name == name) return row.is_secret;
    }
    const std::string word = lower(name);
    const std::vector<std::string> marks = {"token", "secret", "password", "api_key"};
    return std::any_of(marks.begin(), marks.end(), [&](const std::string& mark) { return word.find(mark) != std::string::npos; });
}

EnvironmentList variables_of(const WorkerPlan& worker) {
    EnvironmentList list = to_environment(worker.env);
    list.insert(list.end(), worker.environment.begin(), worker.environment.end());
    return list;
}

std::string assignment(const std::string& name, const std::string& value) {
    if (name == "MASTER_PORT" && value == "0") return "MASTER_PORT=<a free port>";
    return fmt::format("{}={}", name, is_secret(name) ? "<secret>" : shell_quoted(value));
}

/// Variables that have the same value for all workers: shown once.
EnvironmentList common_variables(const std::vector<WorkerPlan>& workers) {
    EnvironmentList common = variables_of(workers.front());
    for (const WorkerPlan& worker : workers) {
        const EnvironmentList own = variables_of(worker);
        std::erase_if(common, [&](const auto& pair) { return std::find(own.begin(), own.end(), pair) == own.end(); });
    }
    return common;
}

std::string describe_machine(const Machine& machine) {
    std::map<int, std::vector<int>> nodes;
    for (const Cpu& cpu : machine.cpu_places) nodes[cpu.numa_node].push_back(cpu.id);
    std::string text = fmt::format("{} usable CPU{}", machine.cpus, machine.cpus == 1 ? "" : "s");
    if (nodes.size() > 1) text += fmt::format(" on {} NUMA nodes", nodes.size());
    if (machine.gpus == 0) return text + ", no NVIDIA GPU";
    text += fmt::format(", {} NVIDIA GPU{} (from {}):", machine.gpus, machine.gpus == 1 ? "" : "s", machine.gpus_from);
    for (const Gpu& gpu : machine.gpu_places) text += ' ' + gpu.id;
    return text;
}

std::string describe_rendezvous(const JobSpec& spec) {
    const RendezvousSpec& rdzv = spec.rendezvous;
    const std::string where = rdzv.endpoint ? to_string(*rdzv.endpoint) : "this node, any free port";
    const std::string nodes = spec.nodes.min == spec.nodes.max ? fmt::format("{}", spec.nodes.max)
                                                               : fmt::format("{} to {}", spec.nodes.min, spec.nodes.max);
    return fmt::format("{} at {}, id {}, nodes {}, waits {} for them", rdzv.backend, where, rdzv.run_id, nodes,
                       format_duration(rdzv.join_timeout));
}

std::string describe_restarts(const RestartSpec& restart) {
    if (restart.max_restarts == 0) return "none";
    std::string text = fmt::format("{}", restart.max_restarts);
    if (restart.window) text += fmt::format(" within any {}", format_duration(*restart.window));
    if (restart.backoff > Duration::zero()) {
        text += fmt::format(", waiting {} up to {}", format_duration(restart.backoff), format_duration(restart.backoff_max));
    }
    return text;
}

std::string describe_streams(const StreamsMap& map) {
    constexpr const char* kNames[] = {"none", "stdout", "stderr", "both"};
    std::string text = kNames[static_cast<unsigned>(map.everyone)];
    for (const auto& [rank, streams] : map.by_local_rank) {
        text += fmt::format(", {}: {}", rank, kNames[static_cast<unsigned>(streams)]);
    }
    return text;
}

std::string describe_output(const OutputSpec& output) {
    std::string text = fmt::format("prefix '{}'", output.prefix);
    if (output.log_dir.empty() && output.redirects == StreamsMap{} && output.tee == StreamsMap{}) return text + ", console only";
    return text + fmt::format(", files below {} (to files only: {}; to both: {})",
                              output.log_dir.empty() ? "a temporary directory" : output.log_dir,
                              describe_streams(output.redirects), describe_streams(output.tee));
}

std::string describe_signals(const std::map<int, SignalAction>& signals) {
    std::map<SignalAction, std::vector<std::string>> by_action;
    for (const auto& [signal, action] : signals) by_action[action].push_back(signal_name(signal));
    constexpr const char* kNames[] = {"forward", "stop", "preempt", "ignore"};
    std::vector<std::string> parts;
    for (const auto& [action, names] : by_action) {
        parts.push_back(fmt::format("{}: {}", kNames[static_cast<unsigned>(action)], join(names, " ")));
    }
    return join(parts, "; ");
}

std::string describe_worker(const WorkerPlan& worker, const EnvironmentList& common) {
    std::vector<std::string> words;
    for (const std::string& argument : worker.arguments) words.push_back(shell_quoted(argument));
    std::string text = fmt::format("\nrank {} (local rank {}): {}\n", worker.env.rank, worker.local_index, join(words, " "));
    if (!worker.cpus.empty()) text += fmt::format("  CPUs {}\n", format_ranges(worker.cpus));
    if (!worker.memory_nodes.empty()) text += fmt::format("  memory of NUMA node {}\n", format_ranges(worker.memory_nodes));
    if (worker.reads_stdin) text += "  reads ddprun's standard input\n";
    for (const auto& variable : variables_of(worker)) {
        if (std::find(common.begin(), common.end(), variable) != common.end()) continue;
        text += fmt::format("  {}\n", assignment(variable.first, variable.second));
    }
    return text;
}

}  // namespace

std::string shell_quoted(const std::string& word) {
    constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
}

std::string render_plan(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                        const NodeNumbers& numbers, const std::vector<WorkerPlan>& workers) {
    std::string text =
        fmt::format("plan:       {} worker{} on this node (node {} of {}), ranks {}-{} of {}\n", workers.size(),
                    workers.size() == 1 ? "" : "s", numbers.group_rank, numbers.group_world_size, numbers.first_rank,
                    numbers.first_rank + numbers.local_world_size - 1, numbers.world_size);
    text += fmt::format("program:    {} ({})\n", program.path, program.how);
    text += fmt::format("machine:    {}\n", describe_machine(machine));
    text += fmt::format("rendezvous: {}\n", describe_rendezvous(spec));
    text += fmt::format("restarts:   {}\n", describe_restarts(spec.restart));
    text += fmt::format("signals:    {}\n", describe_signals(spec.signals));
    text += fmt::format("stopping:   {} from the stop signal to SIGKILL, {} after a preemption notice\n",
                        format_duration(spec.shutdown_timeout), format_duration(spec.preempt_grace));
    text += fmt::format("output:     {}\n", describe_output(spec.output));
    if (workers.empty()) return text;
    text += fmt::format("binding:    {}\n", workers.front().binding_why);
    const EnvironmentList common = common_variables(workers);
    text += "\nevery worker, besides what it inherits and what is known only when it starts (DDPRUN_STORE, DDPRUN_TOKEN,\n"
            "DDPRUN_SEGMENT_FD, DDPRUN_LIFELINE_FD, TORCHELASTIC_ERROR_FILE):\n";
    for (const auto& [name, value] : common) text += fmt::format("  {}\n", assignment(name, value));
    for (const WorkerPlan& worker : workers) text += describe_worker(worker, common);
    return text;
}

}  // namespace ddprun
