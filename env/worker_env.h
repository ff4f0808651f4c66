#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "result.h"  // beside it, also where it is installed

namespace ddprun {

/// Everything a worker learns from its environment: torchrun's contract plus ours (DDPRUN_*).
/// The launcher fills it in and writes it; libddp reads it back. One table (worker_env.cpp) does both.
struct WorkerEnv {
    int rank = 0;        ///< 0 .. world_size-1
    int local_rank = 0;  ///< 0 .. local_world_size-1 on this node
    int world_size = 1;
    int local_world_size = 1;
    int group_rank = 0;        ///< index of the node
    int group_world_size = 1;  ///< number of nodes
    std::string role_name = "default";
    int role_rank = 0;
    int role_world_size = 1;
    std::string master_addr = "127.0.0.1";
    int master_port = 29500;
    bool agent_store = false;  ///< the launcher serves PyTorch's store at the master's address
    int restart_count = 0;
    int max_restarts = 0;
    std::string run_id = "none";
    std::string error_file;              ///< path of the worker's error report; "" none
    std::optional<int> omp_num_threads;  ///< set only when the user's environment has none

    std::uint64_t generation = 0;
    std::string store;     ///< "unix:PATH" or "tcp:HOST:PORT" of the job's store; "" when there is none
    std::string token;     ///< the job's secret, for the store's handshake
    int segment_fd = -1;   ///< inherited memfd, laid out as env/segment.h; -1 none
    std::string segment;   ///< path of this agent's segment, also where the node's is another; "" none
    int lifeline_fd = -1;  ///< inherited socket to the agent; -1 none
    int kept_fd = -1;      ///< inherited memfd, laid out as env/kept.h; -1: no recovery in place

    bool operator==(const WorkerEnv&) const = default;
};

using EnvironmentList = std::vector<std::pair<std::string, std::string>>;
/// Looks a variable up; nullopt when unset. `process_environment` is getenv.
using EnvironmentLookup = std::function<std::optional<std::string>(std::string_view)>;
std::optional<std::string> process_environment(std::string_view name);

/// One row of the contract, for `--dry-run`, the documentation and the tests.
struct EnvironmentRow {
    std::string_view name;
    std::string_view meaning;
    bool is_secret = false;  ///< never printed
};
const std::vector<EnvironmentRow>& environment_contract();

/// The variables a worker gets, in the order of the table.
EnvironmentList to_environment(const WorkerEnv& env);

/// Reads the contract back. Without any variable the world has one worker.
/// Error: InvalidArgument naming the variable and its value; Mismatch when two variables contradict each
/// other (RANK=5 with WORLD_SIZE=4, RANK without WORLD_SIZE).
Result<WorkerEnv> worker_env_from(const EnvironmentLookup& lookup);

}  // namespace ddprun
