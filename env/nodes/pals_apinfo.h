#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/launcher_env.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

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
