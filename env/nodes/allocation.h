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

/// Who says which hosts a job has.
enum class AllocationSource : std::uint8_t { Hosts, Hostfile, Slurm, Torque, Pbs, Lsf };
/// As our lines spell it: "PBS".
std::string_view name_of(AllocationSource source);

/// One host of an allocation. What nobody told is empty, never guessed.
struct AllocatedHost {
    std::string name;  ///< as the source spells it; not necessarily a name that resolves to the fast network
    std::optional<int> slots;  ///< tasks that the scheduler, or the user's file, has room for here
    std::optional<int> gpus;
    int line = 0;  ///< index of its first line in a node file, by which TM knows it
    bool operator==(const AllocatedHost&) const = default;
};

/// The hosts that a job may use, in the scheduler's order.
struct Allocation {
    AllocationSource source = AllocationSource::Hosts;
    std::vector<AllocatedHost> hosts;  ///< no name twice
    std::string job_id;                ///< "12.server", "5[0].server"; "" not a scheduler's
    std::string from;                  ///< where it stands: "PBS_NODEFILE=/var/spool/pbs/aux/12.server"
    /// Which of the hosts this process is on, where the source tells.
    std::optional<int> own_index;
    int other_components = 0;  ///< of a heterogeneous Slurm job: their hosts are not among these
    bool operator==(const Allocation&) const = default;
};

struct AllocationQuery {
    EnvironmentLookup variable;
    std::function<Result<std::string>(const std::string& path)> read_file;
    std::string hosts;     ///< --hosts; "" not given
    std::string hostfile;  ///< --hostfile; "" not given
};
/// The hosts of this job; nullopt: nobody says that there are any but this one. What the user names counts,
/// else what the scheduler tells. Pure but for `read_file`. Error: Mismatch showing both, where two sources
/// contradict each other (two schedulers, --hosts and --hostfile, a host that is not the scheduler's, a list
/// and its own count); InvalidArgument naming a malformed source; System: a file that cannot be read.
Result<std::optional<Allocation>> find_allocation(const AllocationQuery& query);

/// "a,b:4,c[01-03]": names, ranges, slots.
Result<std::vector<AllocatedHost>> parse_hosts(std::string_view text);
/// A file as MPI launchers and parallel ssh programs take it: a host a line, or several by spaces; "host
/// slots=4", "host:4", "user@host" (the user is ssh's business and stays in the name), ranges, comments (#,
/// ;). A host named again has the slots of both, one where a mention tells none. Error: InvalidArgument with
/// the number of the line.
Result<std::vector<AllocatedHost>> parse_hostfile(std::string_view text);
/// PBS_NODEFILE: a line for each MPI slot; hosts are the different names in their order.
Result<std::vector<AllocatedHost>> parse_node_file(std::string_view text);

/// True where both are spellings of one host: equal, or equal up to the first dot when one of them has none.
bool is_same_host(std::string_view one, std::string_view other);

}  // namespace ddprun
