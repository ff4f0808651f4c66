#include "launcher/plan/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/plan/binding.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
        text.replace(at, from.size(), to);
    }
}

std::vector<std::string> substituted(std::vector<std::string> arguments, const WorkerEnv& env) {
    for (std::size_t i = 1; i < arguments.size(); ++i) {
        replace_all(arguments[i], "${local_rank}", fmt::format("{}", env.local_rank));
        replace_all(arguments[i], "${rank}", fmt::format("{}", env.rank));
    }
    return arguments;
}

WorkerEnv environment_of(const JobSpec& spec, const rdzv::StartGeneration& order, int local_rank) {
    WorkerEnv env;
    env.rank = order.first_rank + local_rank;
    env.local_rank = spec.virtual_local_rank ? 0 : local_rank;
    env.world_size = order.world_size;
    env.local_world_size = order.local_world_size;
    env.group_rank = order.group_rank;
    env.group_world_size = order.group_world_size;
    env.role_name = spec.role;
    env.role_rank = order.role_first_rank + local_rank;
    env.role_world_size = order.role_world_size;
    env.master_addr = order.master_addr;
    env.master_port = order.master_port;
    env.agent_store = order.agent_store;
    env.restart_count = order.restart_count;
    env.max_restarts = spec.restart.max_restarts;
    env.run_id = spec.rendezvous.run_id;
    env.generation = order.generation;
    if (const std::optional<OuterRank>& outer = spec.outer_rank) {
        env.local_rank = outer->local_rank;
        env.local_world_size = outer->local_size;
        env.group_rank = outer->node_rank;
        env.group_world_size = outer->nodes;
    }
    return env;
}

/// The node's workers that this agent starts: all, or the one of its outer launcher's rank.
struct Share {
    int first = 0;
    int of = 1;
    NumaBinding binding;
};

/// Ranks of an outer launcher keep its binding, unless the user says otherwise.
Share share_of(const JobSpec& spec, int workers) {
    if (!spec.outer_rank) return {0, workers, spec.binding};
    return {spec.outer_rank->local_rank, spec.outer_rank->local_size,
            spec.binding == NumaBinding::Auto ? NumaBinding::None : spec.binding};
}

/// Adds the option that makes a debugger named alone pass arguments to the program.
std::string debugger_command(const std::string& command) {
    const std::string name = command.substr(command.rfind('/') + 1);
    if (name == "gdb" || name == "cuda-gdb") return command + " --args";
    return name == "lldb" ? command + " --" : command;
}

void attach(WorkerPlan& plan, const std::string& command) {
    std::vector<std::string> under = {"/bin/sh", "-c",
                                      fmt::format("exec {} \"$@\"", debugger_command(command)), "sh"};
    // The debugger starts the program itself, so it needs the path, not the name.
    under.push_back(plan.program);
    under.insert(under.end(), plan.arguments.begin() + 1, plan.arguments.end());
    plan.program = "/bin/sh";
    plan.arguments = std::move(under);
    plan.attached = true;
}

/// A variable that lists GPUs, and its entries; none hides all GPUs.
struct GpuList {
    std::string_view variable;
    std::vector<std::string> entries;
};

/// The lists that count on a machine whose GPUs NVML does not show, such as AMD's. HIP_ and
/// CUDA_VISIBLE_DEVICES mean the same to HIP, and choose from what ROCR_VISIBLE_DEVICES leaves.
std::vector<GpuList> gpu_lists(const EnvironmentLookup& inherited) {
    std::vector<GpuList> lists;
    for (const std::string_view variable :
         {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}) {
        const std::optional<std::string> value = inherited(variable);
        if (!value || (variable.starts_with("ROCR") && !lists.empty())) continue;
        GpuList list{variable, {}};
        const bool hides_all = trim(*value).empty() || value->starts_with('-') || *value == "NoDevFiles";
        for (const std::string_view entry : split(*value, ',')) {
            if (!hides_all) list.entries.emplace_back(trim(entry));
        }
        lists.push_back(std::move(list));
    }
    return lists;
}

const char* narrowing_option(const JobSpec& spec) {
    return spec.virtual_local_rank ? "--virtual-local-rank" : "--narrow-gpus";
}

/// Narrows each list to the worker's entry; without a list a worker gets its local rank, as with torchrun.
Status assign_unseen_gpus(const JobSpec& spec, const Share& share, const std::vector<GpuList>& lists,
                          std::vector<WorkerPlan>& workers) {
    const auto narrow = [&](std::string_view variable, const auto& entry_of) {
        for (std::size_t i = 0; i < workers.size(); ++i) {
            workers[i].gpu = entry_of(static_cast<std::size_t>(share.first) + i);
            workers[i].environment.emplace_back(variable, workers[i].gpu);
        }
    };
    for (const GpuList& list : lists) {
        if (list.entries.empty()) continue;
        if (static_cast<int>(list.entries.size()) < share.of)
            return Error{
                Errc::InvalidArgument,
                fmt::format("{}: {} workers but only {} GPUs in {}={}", narrowing_option(spec), share.of,
                            list.entries.size(), list.variable, excerpt(join(list.entries, ",")))};
        narrow(list.variable, [&](std::size_t seat) { return list.entries[seat]; });
    }
    if (lists.empty())
        narrow("CUDA_VISIBLE_DEVICES", [](std::size_t seat) { return fmt::format("{}", seat); });
    return {};
}

/// Gives each worker one GPU. Does nothing where CUDA_VISIBLE_DEVICES hides all NVIDIA GPUs.
Status assign_gpus(const JobSpec& spec, const Machine& machine, const EnvironmentLookup& inherited,
                   std::vector<WorkerPlan>& workers) {
    if (!spec.virtual_local_rank && !spec.narrow_gpus) return {};
    const Share share = share_of(spec, static_cast<int>(workers.size()));
    if (machine.gpus == 0 && machine.hidden_gpus > 0) return {};
    if (machine.gpus == 0) return assign_unseen_gpus(spec, share, gpu_lists(inherited), workers);
    if (static_cast<int>(machine.gpu_places.size()) < share.of)
        return Error{Errc::InvalidArgument,
                     fmt::format("{}: {} workers but only {} visible GPUs", narrowing_option(spec), share.of,
                                 machine.gpu_places.size())};
    for (std::size_t i = 0; i < workers.size(); ++i) {
        workers[i].gpu = machine.gpu_places[static_cast<std::size_t>(share.first) + i].id;
        workers[i].environment.emplace_back("CUDA_VISIBLE_DEVICES", workers[i].gpu);
    }
    return {};
}

/// Variables of ours and torchrun's about an outer job or worker, which must not reach our workers. Variables
/// that we set anew replace the inherited value anyway; these may stay unset.
std::vector<std::string> stale_variables() {
    return {"DDPRUN_STORE",       "DDPRUN_TOKEN",   "DDPRUN_SEGMENT_FD",      "DDPRUN_SEGMENT",
            "DDPRUN_LIFELINE_FD", "DDPRUN_KEPT_FD", "TORCHELASTIC_ERROR_FILE"};
}

bool is_secret(std::string_view name) {
    for (const EnvironmentRow& row : environment_contract()) {
        if (row.name == name) return row.is_secret;
    }
    const std::string word = lower(name);
    const std::vector<std::string> marks = {"token", "secret", "password", "api_key"};
    return std::any_of(marks.begin(), marks.end(),
                       [&](const std::string& mark) { return word.find(mark) != std::string::npos; });
}

/// True when OMP_NUM_THREADS was set for a worker. PBS presets it to the chunk's CPUs, all of which each of
/// several workers would take.
bool threads_are_set(const Machine& machine, int workers, const EnvironmentLookup& inherited) {
    if (!inherited("OMP_NUM_THREADS")) return false;
    return !machine.grant.preset_threads || preset_is_per_worker(machine.grant, workers, core_count(machine));
}

EnvironmentList variables_of(const WorkerPlan& worker) {
    EnvironmentList list = to_environment(worker.env);
    list.insert(list.end(), worker.environment.begin(), worker.environment.end());
    return list;
}

std::string assignment(const std::string& name, const std::string& value) {
    if (name == "MASTER_PORT" && value == "0") return "MASTER_PORT=<a free port>";
    if (name == "MASTER_ADDR" && value.empty()) return "MASTER_ADDR=<an address of the first node>";
    return fmt::format("{}={}", name, is_secret(name) ? "<secret>" : shell_quoted(value));
}

/// Variables that have the same value for all workers, which are shown once.
EnvironmentList common_variables(const std::vector<WorkerPlan>& workers) {
    EnvironmentList common = variables_of(workers.front());
    for (const WorkerPlan& worker : workers) {
        const EnvironmentList own = variables_of(worker);
        std::erase_if(common,
                      [&](const auto& pair) { return std::find(own.begin(), own.end(), pair) == own.end(); });
    }
    return common;
}

std::string describe_machine(const Machine& machine) {
    std::map<int, std::vector<int>> nodes;
    for (const Cpu& cpu : machine.cpu_places) nodes[cpu.numa_node].push_back(cpu.id);
    std::string text = fmt::format("{} usable CPU{}", machine.cpus, machine.cpus == 1 ? "" : "s");
    if (nodes.size() > 1) text += fmt::format(" on {} NUMA nodes", nodes.size());
    if (machine.host_cpus > machine.cpus) text += fmt::format(" of {}", machine.host_cpus);
    if (cpus_in_quota(machine) < machine.cpus)
        text += fmt::format(", a quota of {:.1f} CPUs", *machine.quota);
    if (machine.grant.cpus) text += fmt::format(" ({} gave {})", machine.grant.by, *machine.grant.cpus);
    if (machine.gpus == 0 && machine.hidden_gpus > 0)
        return text + fmt::format(", {} NVIDIA GPUs that CUDA_VISIBLE_DEVICES hides", machine.hidden_gpus);
    if (machine.gpus == 0) return text + ", no NVIDIA GPU";
    text += fmt::format(", {} NVIDIA GPU{} (from {}):", machine.gpus, machine.gpus == 1 ? "" : "s",
                        machine.gpus_from);
    for (const Gpu& gpu : machine.gpu_places) text += ' ' + gpu.id;
    return text;
}

std::string describe_rendezvous(const JobSpec& spec) {
    const RendezvousSpec& rdzv = spec.rendezvous;
    const bool has_port = rdzv.endpoint && rdzv.endpoint->port != 0;
    const std::string where = has_port ? to_string(*rdzv.endpoint) : "this node, any free port";
    const std::string nodes = spec.nodes.min == spec.nodes.max
                                  ? fmt::format("{}", spec.nodes.max)
                                  : fmt::format("{} to {}", spec.nodes.min, spec.nodes.max);
    return fmt::format("{} at {}, id {}, nodes {}, waits {} for them", rdzv.backend, where, rdzv.run_id,
                       nodes, format_duration(rdzv.join_timeout));
}

std::string describe_restarts(const RestartSpec& restart) {
    if (restart.max_restarts == 0) return "none";
    std::string text = fmt::format("{}", restart.max_restarts);
    if (restart.window) text += fmt::format(" within any {}", format_duration(*restart.window));
    if (restart.backoff > Duration::zero()) {
        text += fmt::format(", waiting {} up to {}", format_duration(restart.backoff),
                            format_duration(restart.backoff_max));
    }
    return text;
}

/// Whether workers may recover in place; Agent::make_kept_memory decides alike.
std::string describe_recovery(const JobSpec& spec, bool has_pmix) {
    if (spec.recover.mode != RecoverSpec::Mode::Auto) return std::string(without_recovery(spec.recover.mode));
    if (has_pmix) return "all ranks restart (MPI does not outlive its peers)";
    if (spec.outer_rank) return "all ranks restart (one ddprun for each rank)";
    return fmt::format(
        "in place where the program announces it (ddp::Recovery), within {}; else all ranks restart",
        format_duration(spec.recover.within));
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
    std::string text =
        output.prefix ? fmt::format("prefix '{}'", *output.prefix) : "prefix when several ranks are shown";
    if (output.log_dir.empty() && output.redirects == StreamsMap{} && output.tee == StreamsMap{})
        return text + ", console only";
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

/// One row per line; the first has the name.
std::string rows(std::string_view name, const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) text += fmt::format("{:<12}{}\n", text.empty() ? name : "", line);
    return text;
}

std::string describe_worker(const WorkerPlan& worker, const EnvironmentList& common) {
    std::string text = fmt::format("\nrank {} (local rank {}): {}\n", worker.env.rank, worker.local_index,
                                   join(worker.arguments, " ", shell_quoted));
    if (!worker.cpus.empty()) text += fmt::format("  CPUs {}\n", format_ranges(worker.cpus));
    if (!worker.memory_nodes.empty())
        text += fmt::format("  memory of NUMA node {}\n", format_ranges(worker.memory_nodes));
    if (!worker.seat_gpu.empty()) text += fmt::format("  GPU {}\n", worker.seat_gpu);
    if (worker.asks_network)
        text +=
            "  NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT NCCL_DEBUG_FILE=<read by ddprun: which network NCCL "
            "takes>\n";
    if (worker.reads_stdin) text += "  reads ddprun's standard input\n";
    for (const auto& variable : variables_of(worker)) {
        if (std::find(common.begin(), common.end(), variable) != common.end()) continue;
        text += fmt::format("  {}\n", assignment(variable.first, variable.second));
    }
    return text;
}

}  // namespace

Result<std::vector<WorkerPlan>> plan_workers(const JobSpec& spec, const ResolvedProgram& program,
                                             const Machine& machine, const rdzv::StartGeneration& order,
                                             const EnvironmentLookup& inherited) {
    const Share share = share_of(spec, order.local_world_size);
    const Result<Bindings> bindings = bind_workers(share.binding, machine, share.of);
    if (!bindings) return bindings.error();
    const bool is_limited = share.of > 1 || cpus_in_quota(machine) < core_count(machine);
    const bool sets_threads = is_limited && !threads_are_set(machine, share.of, inherited);
    const std::vector<FabricSetting> fabric = unset_settings(machine.fabric, inherited);
    const bool sets_nccl = !inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING");

    std::vector<WorkerPlan> workers(static_cast<std::size_t>(order.local_world_size));
    for (std::size_t i = 0; i < workers.size(); ++i) {
        WorkerPlan& plan = workers[i];
        const Binding& binding = bindings->workers[static_cast<std::size_t>(share.first) + i];
        plan.local_index = static_cast<int>(i);
        plan.env = environment_of(spec, order, plan.local_index);
        if (sets_threads) plan.env.omp_num_threads = binding.cores;
        plan.environment.emplace_back("TORCHELASTIC_SIGNALS_TO_HANDLE", spec.signals_to_handle);
        if (sets_nccl) plan.environment.emplace_back("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
        if (!spec.trace.empty()) plan.environment.emplace_back("DDP_TRACE", spec.trace);
        for (const FabricSetting& one : fabric) plan.environment.emplace_back(one.name, one.value);
        plan.asks_network =
            share.first + plan.local_index == 0 && asks_for_network(machine.fabric, inherited);
        plan.removed = stale_variables();
        plan.program = program.path;
        plan.arguments = substituted(program.arguments, plan.env);
        plan.cpus = binding.cpus;
        plan.memory_nodes = binding.memory_nodes;
        plan.binding_why = bindings->why;
        const std::size_t seat = static_cast<std::size_t>(share.first) + i;
        if (static_cast<int>(machine.gpu_places.size()) >= share.of)
            plan.seat_gpu = machine.gpu_places[seat].id;
        plan.reads_stdin = spec.stdin_rank == plan.env.rank;
        if (spec.attach && spec.attach->first == plan.env.rank) {
            attach(plan, spec.attach->second);
            plan.reads_stdin = true;
        }
    }
    if (const Status assigned = assign_gpus(spec, machine, inherited, workers); !assigned)
        return assigned.error();
    return workers;
}

Status check_ranks_exist(const JobSpec& spec, int workers) {
    if (spec.nodes.max > 1 || spec.outer_rank || spec.rendezvous.head_is_apart) return {};
    const auto check = [&](std::string_view option, int rank) -> Status {
        if (rank < workers) return {};
        const std::string ranks = workers == 1 ? "rank 0" : fmt::format("ranks 0-{}", workers - 1);
        return Error{
            Errc::InvalidArgument,
            fmt::format(
                "{}={}: this job has {} only; name one of these, or give more workers (--nproc-per-node)",
                option, rank, ranks),
            0};
    };
    if (spec.stdin_rank) {
        if (const Status exists = check("--stdin", *spec.stdin_rank); !exists) return exists;
    }
    if (spec.attach) {
        if (const Status exists = check("--attach", spec.attach->first); !exists) return exists;
    }
    const std::vector<int>& shown = spec.output.local_ranks;
    return shown.empty() ? Status()
                         : check("--local-ranks-filter", *std::min_element(shown.begin(), shown.end()));
}

std::string render_plan(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                        const rdzv::StartGeneration& order, const std::vector<WorkerPlan>& workers,
                        const PlanSurroundings& around, const EnvironmentLookup& inherited) {
    std::string text =
        fmt::format("plan:       {} worker{} on this node (node {} of {}), ranks {}-{} of {}\n",
                    workers.size(), workers.size() == 1 ? "" : "s", order.group_rank, order.group_world_size,
                    order.first_rank, order.first_rank + order.local_world_size - 1, order.world_size);
    if (!around.node.empty()) text += fmt::format("node:       {}\n", around.node);
    text += fmt::format("program:    {} ({})\n", program.name, program.how);
    text += fmt::format("machine:    {}\n", describe_machine(machine));
    text += fmt::format("rendezvous: {}\n", describe_rendezvous(spec));
    if (!around.controller.empty()) text += fmt::format("controller: {}\n", around.controller);
    text += rows("hosts:", around.hosts);
    if (!around.mpi.empty()) text += fmt::format("mpi:        {}\n", around.mpi);
    text += fmt::format("restarts:   {}\n", describe_restarts(spec.restart));
    text += fmt::format("recovery:   {}\n", describe_recovery(spec, around.has_pmix));
    text += fmt::format("signals:    {}\n", describe_signals(spec.signals));
    text += fmt::format("stopping:   {} from the stop signal to SIGKILL, {} after a preemption notice\n",
                        format_duration(spec.shutdown_timeout), format_duration(spec.preempt_grace));
    text += fmt::format("output:     {}\n", describe_output(spec.output));
    if (machine.fabric.fabric != Fabric::None)
        text += fmt::format("fabric:     {}", render_fabric(machine.fabric, inherited));
    if (workers.empty()) return text;
    text += fmt::format("binding:    {}\n", workers.front().binding_why);
    const EnvironmentList common = common_variables(workers);
    text +=
        "\nevery worker, besides what it inherits and what is known only when it starts (DDPRUN_STORE, "
        "DDPRUN_TOKEN,\n"
        "DDPRUN_SEGMENT_FD, DDPRUN_SEGMENT, DDPRUN_LIFELINE_FD, DDPRUN_KEPT_FD, TORCHELASTIC_ERROR_FILE):\n";
    for (const auto& [name, value] : common) text += fmt::format("  {}\n", assignment(name, value));
    for (const WorkerPlan& worker : workers) text += describe_worker(worker, common);
    return text;
}

}  // namespace ddprun
