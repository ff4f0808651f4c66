#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/launcher_env.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// Who sits where in an application of Cray's PALS: the file that PALS_APINFO names on each host. Flux's
/// cray-pals and Slurm's cray_shasta write it too.
struct PalsApplication {
    struct Rank {
        int local_rank = 0;
        int node = 0;
    };
    std::vector<Rank> ranks;
    std::vector<std::string> hosts;  ///< by node
};

/// From the file's bytes: version 1 or 5, whose tables of ranks and nodes are alike, as a program on the same
/// processor wrote them. Pure. Error: Protocol.
Result<PalsApplication> parse_apinfo(std::string_view bytes);

/// What PALS_APINFO names. Reads a file of the host. Error: NotFound (there is none), as parse_apinfo,
/// System.
Result<PalsApplication> read_apinfo(const EnvironmentLookup& lookup);

/// Fills in what the variables left out of the place of a rank: PALS tells no size, Flux in its place no
/// local rank. A placement that is not of this application (another launcher's, another size) stays as it is.
/// Pure.
void fill_from_apinfo(Placement& placement, const PalsApplication& application);
/// The same, by the file that PALS_APINFO names, where it can be read.
void fill_from_apinfo(Placement& placement, const EnvironmentLookup& lookup);

}  // namespace ddprun
