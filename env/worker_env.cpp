#include "env/worker_env.h"

#include <fmt/core.h>

#include <cstdlib>
#include <limits>
#include <set>

#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();

using Written = std::optional<std::string>;  ///< nullopt: the variable is not set
using Writer = Written (*)(const WorkerEnv&);
using Reader = Status (*)(std::string_view, WorkerEnv&);

template <int WorkerEnv::*Member>
Written write_int(const WorkerEnv& env) {
    return fmt::format("{}", env.*Member);
}

template <int WorkerEnv::*Member, std::int64_t Min, std::int64_t Max = kMaxInt>
Status read_int(std::string_view value, WorkerEnv& env) {
    const Result<std::int64_t> number = parse_int_between(value, Min, Max);
    if (!number) return number.error();
    env.*Member = static_cast<int>(*number);
    return {};
}

template <std::string WorkerEnv::*Member>
Written write_text(const WorkerEnv& env) {
    return env.*Member;
}

template <std::string WorkerEnv::*Member>
Written write_text_if_any(const WorkerEnv& env) {
    return (env.*Member).empty() ? std::nullopt : Written(env.*Member);
}

template <std::string WorkerEnv::*Member>
Status read_text(std::string_view value, WorkerEnv& env) {
    env.*Member = value;
    return {};
}

template <int WorkerEnv::*Member>
Written write_descriptor(const WorkerEnv& env) {
    return env.*Member < 0 ? std::nullopt : write_int<Member>(env);
}

Written write_generation(const WorkerEnv& env) { return fmt::format("{}", env.generation); }

Status read_generation(std::string_view value, WorkerEnv& env) {
    const Result<std::uint64_t> number = parse_uint(value);
    if (!number) return number.error();
    env.generation = *number;
    return {};
}

Written write_agent_store(const WorkerEnv& env) { return env.agent_store ? "True" : "False"; }
/// Reads Python's True; any other text is False, as in PyTorch.
Status read_agent_store(std::string_view value, WorkerEnv& env) {
    env.agent_store = value == "True";
    return {};
}

Written write_omp_threads(const WorkerEnv& env) {
    if (!env.omp_num_threads) return std::nullopt;
    return fmt::format("{}", *env.omp_num_threads);
}

/// Reads OpenMP's variable, which may hold a list ("8,2"). OpenMP itself reports malformed values.
Status read_omp_threads(std::string_view value, WorkerEnv& env) {
    const Result<std::int64_t> outer = parse_int_between(trim(split(value, ',').front()), 1, kMaxInt);
    if (outer) env.omp_num_threads = static_cast<int>(*outer);
    return {};
}

struct Row {
    EnvironmentRow shown;
    Writer write;
    Reader read;
};

using W = WorkerEnv;
constexpr std::int64_t kMaxPort = 65535;

/// The contract. Its order is the order in which variables are written, shown and read.
const Row kRows[] = {
    {{"RANK", "number of this worker in the job, from 0"}, write_int<&W::rank>, read_int<&W::rank, 0>},
    {{"LOCAL_RANK", "number of this worker on its node, from 0"},
     write_int<&W::local_rank>,
     read_int<&W::local_rank, 0>},
    {{"WORLD_SIZE", "workers in the job"}, write_int<&W::world_size>, read_int<&W::world_size, 1>},
    {{"LOCAL_WORLD_SIZE", "workers on this node"},
     write_int<&W::local_world_size>,
     read_int<&W::local_world_size, 1>},
    {{"GROUP_RANK", "number of this node, from 0"}, write_int<&W::group_rank>, read_int<&W::group_rank, 0>},
    {{"GROUP_WORLD_SIZE", "nodes in the job"},
     write_int<&W::group_world_size>,
     read_int<&W::group_world_size, 1>},
    {{"ROLE_NAME", "role of this worker"}, write_text<&W::role_name>, read_text<&W::role_name>},
    {{"ROLE_RANK", "number of this worker within its role"},
     write_int<&W::role_rank>,
     read_int<&W::role_rank, 0>},
    {{"ROLE_WORLD_SIZE", "workers of this role"},
     write_int<&W::role_world_size>,
     read_int<&W::role_world_size, 1>},
    {{"MASTER_ADDR", "host of rank 0"}, write_text<&W::master_addr>, read_text<&W::master_addr>},
    {{"MASTER_PORT", "port on that host: free for the workers to use, or that of PyTorch's store"},
     write_int<&W::master_port>,
     read_int<&W::master_port, 1, kMaxPort>},
    {{"TORCHELASTIC_RESTART_COUNT", "how often the workers have been started again"},
     write_int<&W::restart_count>,
     read_int<&W::restart_count, 0>},
    {{"TORCHELASTIC_MAX_RESTARTS", "how often they may be"},
     write_int<&W::max_restarts>,
     read_int<&W::max_restarts, 0>},
    {{"TORCHELASTIC_RUN_ID", "id of the job"}, write_text<&W::run_id>, read_text<&W::run_id>},
    {{"TORCHELASTIC_USE_AGENT_STORE",
      "True: PyTorch's store is the launcher's, at MASTER_ADDR:MASTER_PORT; False: rank 0 hosts it there"},
     write_agent_store,
     read_agent_store},
    {{"TORCHELASTIC_ERROR_FILE", "where the worker writes its error report"},
     write_text_if_any<&W::error_file>,
     read_text<&W::error_file>},
    {{"OMP_NUM_THREADS", "OpenMP threads, set only where the user has not set it"},
     write_omp_threads,
     read_omp_threads},
    {{"DDPRUN_GENERATION", "number of this formation of the world; it only grows"},
     write_generation,
     read_generation},
    {{"DDPRUN_STORE",
      "where the job's key-value store is: unix:PATH; tcp:HOST:PORT where no ddprun has started the workers"},
     write_text_if_any<&W::store>,
     read_text<&W::store>},
    {{"DDPRUN_TOKEN", "the job's secret, for the store's handshake", true},
     write_text_if_any<&W::token>,
     read_text<&W::token>},
    {{"DDPRUN_SEGMENT_FD", "inherited descriptor of the node's shared memory"},
     write_descriptor<&W::segment_fd>,
     read_int<&W::segment_fd, 0>},
    {{"DDPRUN_SEGMENT", "path of the shared memory in which the worker tells its steps"},
     write_text_if_any<&W::segment>,
     read_text<&W::segment>},
    {{"DDPRUN_LIFELINE_FD", "inherited descriptor of the socket to the agent"},
     write_descriptor<&W::lifeline_fd>,
     read_int<&W::lifeline_fd, 0>},
    {{"DDPRUN_KEPT_FD", "inherited descriptor of the memory that outlives a worker (recovery in place)"},
     write_descriptor<&W::kept_fd>,
     read_int<&W::kept_fd, 0>},
};

using Seen = std::set<std::string_view>;

Error mismatch(std::string what) { return {Errc::Mismatch, std::move(what), 0}; }

/// Refuses a world of more than one with only some of its variables.
Status require_complete(const WorkerEnv& env, const Seen& seen) {
    const auto has = [&](std::string_view name) { return seen.count(name) != 0; };
    for (const auto& [one, other] : {std::pair{"RANK", "WORLD_SIZE"}, std::pair{"WORLD_SIZE", "RANK"}}) {
        if (has(one) && !has(other)) {
            return mismatch(
                fmt::format("{} is set but {} is not: start it with ddprun, or set both", one, other));
        }
    }
    for (const std::string_view local : {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
        if (has(local) && !has("RANK")) {
            return mismatch(
                fmt::format("{} is set but RANK and WORLD_SIZE are not: start it with ddprun, "
                            "or set all of them",
                            local));
        }
        if (!has(local) && env.world_size > 1) {
            return mismatch(fmt::format("WORLD_SIZE={} but {} is not set: start it with ddprun, or set {}",
                                        env.world_size, local, local));
        }
    }
    const bool several_nodes = env.world_size > env.local_world_size;
    if (several_nodes && !has("MASTER_ADDR") && !has("DDPRUN_STORE")) {
        return mismatch(
            fmt::format("WORLD_SIZE={} and LOCAL_WORLD_SIZE={} mean several nodes but MASTER_ADDR is not "
                        "set: start it with ddprun, or set MASTER_ADDR to the host of rank 0",
                        env.world_size, env.local_world_size));
    }
    return {};
}

/// Fills in variables that torchrun sets and a hand-made environment often lacks. Nodes are taken to be of
/// equal size, ranks to count through node after node, and all workers to have one role.
void fill_absent(WorkerEnv& env, const Seen& seen) {
    const auto absent = [&](std::string_view name) { return seen.count(name) == 0; };
    const int nodes = (env.world_size - 1) / env.local_world_size + 1;
    if (absent("GROUP_WORLD_SIZE")) env.group_world_size = nodes;
    if (absent("GROUP_RANK")) env.group_rank = env.rank / env.local_world_size;
    if (absent("ROLE_RANK")) env.role_rank = env.rank;
    if (absent("ROLE_WORLD_SIZE")) env.role_world_size = env.world_size;
}

Status require_below(std::string_view name, int value, std::string_view size_name, int size) {
    if (value < size) return {};
    return mismatch(fmt::format("{}={} must be below {}={}", name, value, size_name, size));
}

Status require_consistent(const WorkerEnv& env) {
    const Status checks[] = {
        require_below("RANK", env.rank, "WORLD_SIZE", env.world_size),
        require_below("LOCAL_RANK", env.local_rank, "LOCAL_WORLD_SIZE", env.local_world_size),
        require_below("GROUP_RANK", env.group_rank, "GROUP_WORLD_SIZE", env.group_world_size),
        require_below("ROLE_RANK", env.role_rank, "ROLE_WORLD_SIZE", env.role_world_size),
    };
    for (const Status& check : checks) {
        if (!check) return check;
    }
    if (env.local_world_size > env.world_size) {
        return mismatch(fmt::format("LOCAL_WORLD_SIZE={} is more than WORLD_SIZE={}", env.local_world_size,
                                    env.world_size));
    }
    return {};
}

Status read_row(const Row& row, const EnvironmentLookup& lookup, WorkerEnv& env, Seen& seen) {
    const std::optional<std::string> value = lookup(row.shown.name);
    if (!value) return {};
    seen.insert(row.shown.name);
    const Status read = row.read(*value, env);
    if (!read) return Error{read.error().code, fmt::format("{}={}", row.shown.name, read.error().what), 0};
    return {};
}

}  // namespace

std::optional<std::string> process_environment(std::string_view name) {
    const char* const value = std::getenv(std::string(name).c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

const std::vector<EnvironmentRow>& environment_contract() {
    static const std::vector<EnvironmentRow> rows = [] {
        std::vector<EnvironmentRow> shown;
        for (const Row& row : kRows) shown.push_back(row.shown);
        return shown;
    }();
    return rows;
}

EnvironmentList to_environment(const WorkerEnv& env) {
    EnvironmentList list;
    for (const Row& row : kRows) {
        if (Written value = row.write(env)) list.emplace_back(row.shown.name, *std::move(value));
    }
    return list;
}

Result<WorkerEnv> worker_env_from(const EnvironmentLookup& lookup) {
    WorkerEnv env;
    Seen seen;
    for (const Row& row : kRows) {
        if (const Status read = read_row(row, lookup, env, seen); !read) return read.error();
    }
    if (const Status complete = require_complete(env, seen); !complete) return complete.error();
    if (seen.count("LOCAL_RANK") == 0) env.local_rank = env.rank;
    if (seen.count("LOCAL_WORLD_SIZE") == 0) env.local_world_size = env.world_size;
    fill_absent(env, seen);
    if (const Status consistent = require_consistent(env); !consistent) return consistent.error();
    return env;
}

}  // namespace ddprun
