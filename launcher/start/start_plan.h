#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The decision which hosts a job runs on, and what starts ddprun on the others.

/// The facts that are known before anything is started.
struct StartFacts {
    std::optional<Allocation> allocation;
    std::string host_name;  ///< of this host
    /// The allocation's host that has an address of this one. Asks the resolver, for kResolverPatience at
    /// most.
    std::function<std::optional<std::size_t>(const std::vector<AllocatedHost>& hosts)> find_by_address;
    std::function<bool(std::string_view program)> is_there;  ///< PATH has it
};

/// This host's addresses and names, besides its host name.
struct OwnPlaces {
    std::vector<std::string> addresses;                        ///< of its interfaces
    std::vector<std::string> names;                            ///< the resolver's names of `addresses`
    std::map<std::string, std::vector<std::string>> resolved;  ///< addresses of some names of `hosts`
};
/// The index of this host in `hosts`, names or numeric addresses; nullopt: none. Pure.
std::optional<std::size_t> find_own_place(const std::vector<std::string>& hosts, const OwnPlaces& own);

struct StartPlan {
    enum Kind : std::uint8_t {
        Here,  ///< this host only
        All,   ///< this process is the head, and starts the others
        Wait,  ///< this process is the head, and others start the others (--start=none)
    } kind = Here;
    int slots = 0;                     ///< of this host; 0: not known
    std::vector<AllocatedHost> hosts;  ///< by node rank, this host first unless `is_apart`; empty with Here
    bool is_apart = false;  ///< this host is not among `hosts`: its ddprun is the head and runs no workers
    Starter starter = Starter::None;
    std::string why;  ///< for one line: "PBS job 12.server (PBS_NODEFILE=...): 3 hosts, the other 2 by
                      ///< pbsdsh"; "" nothing to say
};

/// What the command line's options on nodes, other than --hosts, ask for.
enum class NodesSaid : std::uint8_t {
    Nothing,
    Count,     ///< --nnodes of several without an endpoint: as many hosts as the allocation has
    ByOthers,  ///< torchrun's way (--node-rank, --standalone, --nnodes=1, --nnodes with an endpoint): others
               ///< start the other nodes
};

/// Decides which hosts a job has and what starts ddprun there, when no launcher has started one per node. A
/// head on a host of its own (a login node, a laptop) starts all hosts that the user names, or Slurm's. Pure
/// but for the functions in `facts`. Error, with the remedy: Mismatch (this host is not in the PBS or LSF
/// job; --nnodes contradicts the allocation), NotFound (PATH has no starter).
Result<StartPlan> plan_start(const JobSpec& spec, NodesSaid said, const StartFacts& facts);

/// Lines about hosts that may be used otherwise than the user meant. `asked` is --nproc-per-node when given
/// as a number; `cores` is the number that the job has on this host. Pure.
std::vector<std::string> remarks_on(const Allocation& allocation, bool workers_were_given,
                                    std::optional<int> asked, int cores);

/// A line for a scheduler's job with more workers than `cores`, those that the job has on this host; "" there
/// are enough, or `scheduler` (as in Grant) is "". Pure.
std::string remark_on_cores(std::string_view scheduler, int workers, int cores);

std::string_view name_of(Starter starter);

/// Collects the facts for plan_start(): the allocation around us or the hosts that the user names. Thin; the
/// functions in the result ask the resolver and PATH later. Error: as find_allocation.
Result<StartFacts> look_for_hosts(const StartSpec& asked);
/// The names of a job's hosts by node rank, for those who are missing: of those that we `start` (null: none),
/// or of the allocation where our own rank goes by it; empty: not known.
std::vector<std::string> hosts_by_rank(const JobSpec& spec, const std::vector<AllocatedHost>* start,
                                       const std::string& own_name);

}  // namespace ddprun
