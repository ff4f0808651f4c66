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
#include "launcher/job_spec.h"

/// Which hosts a job runs on, and who starts the ddprun of the others.
namespace ddprun {

/// What is known before anything is started.
struct StartFacts {
    std::optional<Allocation> allocation;
    std::string host_name;  ///< of this host
    /// Which of the allocation's hosts has an address of this one; asks the resolver, for kResolverPatience
    /// at most.
    std::function<std::optional<std::size_t>(const std::vector<AllocatedHost>& hosts)> find_by_address;
    std::function<bool(std::string_view program)> is_there;  ///< PATH has it
};

/// By what else than its name a host is known.
struct OwnPlaces {
    std::vector<std::string> addresses;                        ///< of its interfaces
    std::vector<std::string> names;                            ///< that the resolver has for these
    std::map<std::string, std::vector<std::string>> resolved;  ///< of some names of `hosts` their addresses
};
/// Which of `hosts`, names or numeric addresses, is this host. Pure.
std::optional<std::size_t> find_own_place(const std::vector<std::string>& hosts, const OwnPlaces& own);

struct StartPlan {
    enum Kind : std::uint8_t {
        Here,  ///< this host only
        All,   ///< this process is the head, and starts the others
        Wait,  ///< this process is the head, and others start the others (--start=none)
    } kind = Here;
    int slots = 0;  ///< of this host, where its source tells; else 0
    std::vector<AllocatedHost>
        hosts;  ///< in the order of node ranks, the first is this one unless `is_apart`; empty with Here
    bool is_apart = false;  ///< this host is none of them: its ddprun is the head, and runs no workers
    Starter starter = Starter::None;
    std::string why;  ///< for one line: "PBS job 12.server (PBS_NODEFILE=...): 3 hosts, the other 2 by
                      ///< pbsdsh"; "" nothing to say
};

/// What the command line says of the nodes, hosts apart.
enum class NodesSaid : std::uint8_t {
    Nothing,
    Count,     ///< --nnodes of several, and not where they meet: as many hosts as there are
    ByOthers,  ///< torchrun's way (--node-rank, --standalone, --nnodes=1, --nnodes with an endpoint): others
               ///< start the other nodes
};

/// Where no launcher has started one ddprun per node: whether the job is more than this host, and what starts
/// it there. Pure but for the functions in `facts`. A head on a host of its own (a login node, a laptop)
/// starts all hosts that the user names, or that are Slurm's. Error: Mismatch (this host is none of a PBS or
/// LSF job's; --nnodes contradicts it), NotFound (no program that starts something there), each with what to
/// do.
Result<StartPlan> plan_start(const JobSpec& spec, NodesSaid said, const StartFacts& facts);

/// What the user should know of hosts that are used otherwise than may have been meant, a line each. `asked`:
/// --nproc-per-node where it was given as a number; `cores`: those that the job has on this host. Pure.
std::vector<std::string> remarks_on(const Allocation& allocation, bool workers_were_given,
                                    std::optional<int> asked, int cores);

std::string_view name_of(Starter starter);

}  // namespace ddprun
