#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// The source of a job's list of hosts.
enum class AllocationSource : std::uint8_t { Hosts, Hostfile, Slurm, Torque, Pbs, Lsf };
/// The name in our messages: "PBS".
std::string_view name_of(AllocationSource source);

/// One host of an allocation. Facts that the source does not tell are empty, never guessed.
struct AllocatedHost {
    std::string name;          ///< as in the source; not necessarily a name that resolves to the fast network
    std::optional<int> slots;  ///< the scheduler's, or the user's file's, number of tasks here
    std::optional<int> gpus;
    int line = 0;  ///< index of its first line in a node file, by which TM knows it
    bool operator==(const AllocatedHost&) const = default;
};

/// The hosts that a job may use, in the scheduler's order.
struct Allocation {
    AllocationSource source = AllocationSource::Hosts;
    std::vector<AllocatedHost> hosts;  ///< no name twice
    std::string job_id;                ///< "12.server", "5[0].server"; "" not a scheduler's
    std::string from;                  ///< the source: "PBS_NODEFILE=/var/spool/pbs/aux/12.server"
    std::optional<int> own_index;      ///< index of this process's host; nullopt: the source does not tell
    int other_components = 0;          ///< of a heterogeneous Slurm job: their hosts are left out
    bool operator==(const Allocation&) const = default;
};

struct AllocationQuery {
    EnvironmentLookup variable;
    std::function<Result<std::string>(const std::string& path)> read_file;
    std::string hosts;     ///< --hosts; "" not given
    std::string hostfile;  ///< --hostfile; "" not given
};
/// The hosts of this job: the user's, else the scheduler's; nullopt: no source names any. Pure but for
/// `read_file`. Error: Mismatch showing both sides, when two sources contradict each other (two schedulers,
/// --hosts and --hostfile, a host that is not the scheduler's, a list and its count); InvalidArgument naming
/// a malformed source; System: a file that cannot be read.
Result<std::optional<Allocation>> find_allocation(const AllocationQuery& query);

/// "a,b:4,c[01-03]": names, ranges, slots.
Result<std::vector<AllocatedHost>> parse_hosts(std::string_view text);
/// A host file in the format of MPI launchers and parallel ssh programs: one host per line, or several with
/// blanks; "host slots=4" (or cpu=, count=), "host:4", "user@host" (the user stays in the name, for ssh),
/// ranges, comments (#, ;). A host named again has the sum of the slots, with one for a mention without a
/// count. Error: InvalidArgument with the number of the line.
Result<std::vector<AllocatedHost>> parse_hostfile(std::string_view text);
/// PBS_NODEFILE has one line for each MPI slot; the hosts are the different names in their order.
Result<std::vector<AllocatedHost>> parse_node_file(std::string_view text);

/// True when both name one host: equal, or equal up to the first dot when one of them has none.
bool is_same_host(std::string_view one, std::string_view other);

}  // namespace ddprun
