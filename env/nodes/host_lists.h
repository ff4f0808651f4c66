#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/launcher_env.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// The hosts of a Slurm list, in its order: "a[01-03,07],b" gives a01 a02 a03 a07 b. Leading zeros are kept;
/// a name may have several brackets ("r[1-2]n[0-3]": the last runs fastest) and text after them. Error:
/// InvalidArgument for a malformed list, Limit for more than 65536 hosts.
Result<std::vector<std::string>> expand_hostlist(std::string_view text);

/// The tasks of each node from SLURM_TASKS_PER_NODE: "2(x2),1" gives 2 2 1.
/// Error: InvalidArgument, Limit, as above.
Result<std::vector<int>> parse_tasks_per_node(std::string_view text);

/// The places of the ranks of an application of Cray's PALS, from the file in PALS_APINFO on each host.
/// Flux's cray-pals and Slurm's cray_shasta write it, too.
struct PalsApplication {
    struct Rank {
        int local_rank = 0;
        int node = 0;
    };
    std::vector<Rank> ranks;
    std::vector<std::string> hosts;  ///< by node
};

/// Parses the file of version 1 or 5, whose tables of ranks and nodes are alike, in this processor's byte
/// order. Pure. Error: Protocol.
Result<PalsApplication> parse_apinfo(std::string_view bytes);

/// Reads the file in PALS_APINFO. Error: NotFound (the variable is unset), as parse_apinfo, System.
Result<PalsApplication> read_apinfo(const EnvironmentLookup& lookup);

/// Fills in the facts that the variables lack: PALS gives no size, Flux with its plug-in no local rank. A
/// placement of another application (another launcher, another size) stays unchanged. Pure.
void fill_from_apinfo(Placement& placement, const PalsApplication& application);
/// Fills in from the file in PALS_APINFO if it can be read.
void fill_from_apinfo(Placement& placement, const EnvironmentLookup& lookup);

}  // namespace ddprun
