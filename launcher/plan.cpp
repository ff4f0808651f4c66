#include "launcher/plan.h"

#include <algorithm>

#include <fmt/core.h>

#include "launcher/binding.h"

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

WorkerEnv environment_of(const JobSpec& spec, const NodeNumbers& numbers, int local_rank) {
    WorkerEnv env;
    env.rank = numbers.first_rank + local_rank;
    env.local_rank = spec.virtual_local_rank ? 0 : local_rank;
    env.world_size = numbers.world_size;
    env.local_world_size = numbers.local_world_size;
    env.group_rank = numbers.group_rank;
    env.group_world_size = numbers.group_world_size;
    env.role_name = spec.role;
    env.role_rank = numbers.role_first_rank + local_rank;
    env.role_world_size = numbers.role_world_size;
    env.master_addr = numbers.master_addr;
    env.master_port = numbers.master_port;
    env.restart_count = numbers.restart_count;
    env.max_restarts = spec.restart.max_restarts;
    env.run_id = spec.rendezvous.run_id;
    env.generation = numbers.generation;
    return env;
}

/// A debugger that is named alone gets the word that makes it take the program's arguments too.
std::string debugger_command(const std::string& command) {
    const std::string name = command.substr(command.rfind('/') + 1);
    if (name == "gdb" || name == "cuda-gdb") return command + " --args";
    return name == "lldb" ? command + " --" : command;
}

void attach(WorkerPlan& plan, const std::string& command) {
    std::vector<std::string> under = {"/bin/sh", "-c", fmt::format("exec {} \"$@\"", debugger_command(command)), "sh"};
    // The debugger starts the program itself: it needs the path, not the name.
    under.push_back(plan.program);
    under.insert(under.end(), plan.arguments.begin() + 1, plan.arguments.end());
    plan.program = "/bin/sh";
    plan.arguments = std::move(under);
    plan.attached = true;
}

/// One GPU for each worker. On a machine without GPUs there is nothing to narrow.
Status assign_gpus(const JobSpec& spec, const Machine& machine, std::vector<WorkerPlan>& workers) {
    if ((!spec.virtual_local_rank && !spec.narrow_gpus) || machine.gpus == 0) return {};
    if (machine.gpu_places.size() < workers.size()) {
        const char* option = spec.virtual_local_rank ? "--virtual-local-rank" : "--narrow-gpus";
        return Error{Errc::InvalidArgument, fmt::format("{}: {} workers but only {} visible GPUs", option, workers.size(),
                                                        machine.gpu_places.size())};
    }
    for (std::size_t i = 0; i < workers.size(); ++i) {
        workers[i].gpu = machine.gpu_places[i].id;
        workers[i].environment.emplace_back("CUDA_VISIBLE_DEVICES", workers[i].gpu);
    }
    return {};
}

/// Variables of ours and of torchrun that describe another job or an outer worker must not reach the workers. What
/// is set anew replaces the inherited value anyway; these may stay unset.
std::vector<std::string> stale_variables() {
    return {"DDPRUN_STORE", "DDPRUN_TOKEN", "DDPRUN_SEGMENT_FD", "DDPRUN_LIFELINE_FD", "TORCHELASTIC_ERROR_FILE"};
}

}  // namespace

Result<std::vector<WorkerPlan>> plan_workers(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                                             const NodeNumbers& numbers, const EnvironmentLookup& inherited) {
    const Result<Bindings> bindings = bind_workers(spec.binding, machine, numbers.local_world_size);
    if (!bindings) return bindings.error();
    const bool sets_threads = !inherited("OMP_NUM_THREADS") && numbers.local_world_size > 1;
    const bool sets_nccl = !inherited("TORCH_NCCL_ASYNC_ERROR_HANDLING");

    std::vector<WorkerPlan> workers(static_cast<std::size_t>(numbers.local_world_size));
    for (std::size_t i = 0; i < workers.size(); ++i) {
        WorkerPlan& plan = workers[i];
        const Binding& binding = bindings->workers[i];
        plan.local_index = static_cast<int>(i);
        plan.env = environment_of(spec, numbers, plan.local_index);
        if (sets_threads) plan.env.omp_num_threads = binding.cores;
        plan.environment.emplace_back("TORCHELASTIC_SIGNALS_TO_HANDLE", spec.signals_to_handle);
        if (sets_nccl) plan.environment.emplace_back("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
        plan.removed = stale_variables();
        plan.program = program.path;
        plan.arguments = substituted(program.arguments, plan.env);
        plan.cpus = binding.cpus;
        plan.memory_nodes = binding.memory_nodes;
        plan.binding_why = bindings->why;
        plan.reads_stdin = spec.stdin_rank == plan.env.rank;
        if (spec.attach && spec.attach->first == plan.env.rank) {
            attach(plan, spec.attach->second);
            plan.reads_stdin = true;
        }
    }
    if (const Status assigned = assign_gpus(spec, machine, workers); !assigned) return assigned.error();
    return workers;
}

}  // namespace ddprun
