#pragma once

#include <optional>
#include <string>

#include "env/nodes/launcher_env.h"
#include "env/nodes/pmix_source.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// A ddprun that mpiexec, srun, flux ... has started, and its place among the others; `nodes` 1: there are no
/// others.
struct OuterTask {
    LauncherChoice launcher;
    NodePlace place;
    PmixSession pmix;  ///< held until the nodes have met
};

/// "node 1 of 2: launcher=slurm rank 1/2 local 0/1".
std::string describe(const OuterTask& task);

/// Finds our place under an outer launcher. Its PMIx server is asked (for 10 s at most) for facts that its
/// variables do not have. nullopt: there is no launcher, or the user has told where the nodes are
/// (--standalone, --nnodes=1, --node-rank, --hosts, --hostfile, --start, or --nnodes with an endpoint).
/// Error: as node_place and choose_launcher; Mismatch when --nnodes differs from the launcher's number.
Result<std::optional<OuterTask>> find_outer_task(const CommandLine& line, const EnvironmentLookup& lookup);

/// The place that the launcher gave the one worker of this ddprun. Error: NotFound when it gave none.
Result<OuterRank> outer_rank_of(const OuterTask& task);

}  // namespace ddprun
