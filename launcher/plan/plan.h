#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/job_spec.h"
#include "launcher/plan/machine.h"
#include "launcher/plan/program.h"
#include "rendezvous/agent_message.h"

namespace ddprun {

/// Everything about one worker that is decided before it is started.
struct WorkerPlan {
    WorkerEnv
        env;  ///< without descriptors, store, token and error file: the agent adds them when it starts it
    int local_index = 0;                  ///< 0 .. local_world_size-1, also with --virtual-local-rank
    std::string program;                  ///< what execve gets
    std::vector<std::string> arguments;   ///< argv, macros substituted
    EnvironmentList environment;          ///< set besides `env`
    std::vector<std::string> removed;     ///< inherited variables it must not see
    std::vector<int> cpus, memory_nodes;  ///< empty: not bound
    std::string gpu;                      ///< its GPU when it is narrowed to one; "" all
    std::string seat_gpu;  ///< the one that is its own by its local rank; "" there are fewer than workers
    bool asks_network = false;  ///< its NCCL tells us which network it takes
    bool reads_stdin = false;   ///< inherits ddprun's standard input
    bool attached = false;      ///< runs under a debugger, with the terminal
    std::string binding_why;    ///< "none: one NUMA node"
};

/// Plans the workers of one node for the generation that it is to start. Pure but for the default of
/// `inherited`, the environment that workers start from. Error: InvalidArgument (a GPU for each worker is
/// wanted and there are fewer; cores do not suffice).
Result<std::vector<WorkerPlan>> plan_workers(const JobSpec& spec, const ResolvedProgram& program,
                                             const Machine& machine, const rdzv::StartGeneration& order,
                                             const EnvironmentLookup& inherited = process_environment);

/// Ranks that a job of one node does not have, as --stdin, --attach and --local-ranks-filter name them:
/// nobody would read the input, nothing would be shown. Of several nodes each may have another number of
/// workers. Pure. Error: InvalidArgument naming option, value and remedy.
Status check_ranks_exist(const JobSpec& spec, int workers);

/// What --dry-run says besides the plan of this node's workers; "" and {}: nothing.
struct PlanSurroundings {
    std::string node;        ///< why this node's rank is not known before the nodes have met
    std::string controller;  ///< "on this node, port 29400 (node rank 0)"
    std::string mpi;         ///< whether workers get a PMIx server, and why
    std::vector<std::string>
        hosts;  ///< who runs which ranks, and what starts them, where ddprun starts the other hosts
};
/// The complete plan as --dry-run prints it; ends with a newline. Values of secrets are masked. A MASTER_ADDR
/// of "" is not known yet.
std::string render_plan(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                        const rdzv::StartGeneration& order, const std::vector<WorkerPlan>& workers,
                        const PlanSurroundings& around = {},
                        const EnvironmentLookup& inherited = process_environment);

}  // namespace ddprun
