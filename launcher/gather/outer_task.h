#pragma once

#include <optional>
#include <string>

#include "env/nodes/launcher_env.h"
#include "env/nodes/pmix_source.h"
#include "env/result.h"
#include "launcher/cli/options.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// A ddprun that mpiexec, srun, flux ... has started, and what it stands for among the others; `nodes` 1:
/// there are none.
struct OuterTask {
    LauncherChoice launcher;
    NodePlace place;
    PmixSession pmix;  ///< held until the nodes have met
};

/// "node 1 of 2: launcher=slurm rank 1/2 local 0/1".
std::string describe(const OuterTask& task);

/// Whether the launcher around us counts, and as what we count there. What its variables do not tell, its
/// PMIx server is asked for (at most 10 s). nullopt: there is none, or the user has said where the nodes are:
/// --standalone, --nnodes=1, --node-rank,
/// --hosts, --hostfile, --start, or --nnodes with an endpoint.
/// Error: what node_place and choose_launcher say; Mismatch where --nnodes is another number than the
/// launcher's.
Result<std::optional<OuterTask>> find_outer_task(const CommandLine& line, const EnvironmentLookup& lookup);

/// The place that the launcher gave the one worker of this ddprun. Error: NotFound, where it told none.
Result<OuterRank> outer_rank_of(const OuterTask& task);

}  // namespace ddprun
