#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/machine/machine.h"
#include "launcher/plan/program.h"
#include "launcher/spec/job_spec.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// Everything about one worker that is decided before it is started.
struct WorkerPlan {
    WorkerEnv env;  ///< without descriptors, store, token and error file, which the agent adds at the start
    int local_index = 0;                  ///< 0 .. local_world_size-1, also with --virtual-local-rank
    std::string program;                  ///< path for execve
    std::vector<std::string> arguments;   ///< argv, macros substituted
    EnvironmentList environment;          ///< set besides `env`
    std::vector<std::string> removed;     ///< inherited variables it must not see
    std::vector<int> cpus, memory_nodes;  ///< empty: not bound
    std::string gpu;                      ///< the only GPU it sees; "" all
    std::string seat_gpu;       ///< the GPU of its local rank; "" when there are fewer GPUs than workers
    bool asks_network = false;  ///< its NCCL's log tells us which network it takes
    bool reads_stdin = false;   ///< inherits ddprun's standard input
    bool attached = false;      ///< runs under a debugger, with the terminal
    std::string binding_why;    ///< "none: one NUMA node"
};

/// Plans the workers of one node for the generation in `order`. `inherited` is the environment that workers
/// start from. Pure but for its default. Error: InvalidArgument (fewer GPUs than workers when each needs one;
/// too few cores).
Result<std::vector<WorkerPlan>> plan_workers(const JobSpec& spec, const ResolvedProgram& program,
                                             const Machine& machine, const rdzv::StartGeneration& order,
                                             const EnvironmentLookup& inherited = process_environment);

/// Refuses ranks in --stdin, --attach and --local-ranks-filter that a job of one node does not have. Jobs of
/// several nodes are not checked: nodes may differ in their number of workers. Pure. Error: InvalidArgument
/// naming option, value and remedy.
Status check_ranks_exist(const JobSpec& spec, int workers);

/// The lines of --dry-run besides the plan of this node's workers; "" and {} are left out.
struct PlanSurroundings {
    std::string node;                ///< why this node's rank is not known yet
    std::string controller;          ///< "on this node, port 29400 (node rank 0)"
    std::string mpi;                 ///< whether workers get a PMIx server, and why
    std::vector<std::string> hosts;  ///< hosts with their ranks and starter, if ddprun starts other hosts
    bool has_pmix = false;           ///< workers get a PMIx server
};
/// The complete plan as --dry-run prints it, with a final newline and without values of secrets. A
/// MASTER_ADDR of "" is not known yet.
std::string render_plan(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                        const rdzv::StartGeneration& order, const std::vector<WorkerPlan>& workers,
                        const PlanSurroundings& around = {},
                        const EnvironmentLookup& inherited = process_environment);

}  // namespace ddprun
