#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/discover.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What the rank table gives one node for one generation.
struct NodeNumbers {
    int first_rank = 0;        ///< global rank of local rank 0
    int local_world_size = 1;
    int world_size = 1;
    int group_rank = 0;        ///< index of the node
    int role_first_rank = 0;   ///< rank of local rank 0 among the workers of this node's role
    int role_world_size = 1;
    int group_world_size = 1;
    int restart_count = 0;
    std::uint64_t generation = 0;
    std::string master_addr = "127.0.0.1";
    int master_port = 29500;
};

/// Everything about one worker that is decided before it is started.
struct WorkerPlan {
    WorkerEnv env;  ///< without descriptors, store, token and error file: the agent adds them when it starts it
    int local_index = 0;                 ///< 0 .. local_world_size-1, also with --virtual-local-rank
    std::string program;                 ///< what execve gets
    std::vector<std::string> arguments;  ///< argv, macros substituted
    EnvironmentList environment;         ///< set besides `env`
    std::vector<std::string> removed;    ///< inherited variables it must not see
    std::vector<int> cpus, memory_nodes; ///< empty: not bound
    std::string gpu;                     ///< its GPU when it is narrowed to one; "" all
    bool reads_stdin = false;            ///< inherits ddprun's standard input
    bool attached = false;               ///< runs under a debugger, with the terminal
    std::string binding_why;             ///< "none: one NUMA node"
};

/// Plans the workers of one node. Pure but for the default of `inherited`, the environment that workers start from.
/// Error: InvalidArgument (a GPU for each worker is wanted and there are fewer; cores do not suffice).
Result<std::vector<WorkerPlan>> plan_workers(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                                             const NodeNumbers& numbers,
                                             const EnvironmentLookup& inherited = process_environment);

/// The complete plan as --dry-run prints it; ends with a newline. Values of secrets are masked.
std::string render_plan(const JobSpec& spec, const ResolvedProgram& program, const Machine& machine,
                        const NodeNumbers& numbers, const std::vector<WorkerPlan>& workers);

/// A word as a shell would have to be given it: 'a b'.
std::string shell_quoted(const std::string& word);

}  // namespace ddprun
