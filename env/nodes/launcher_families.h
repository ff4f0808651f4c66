#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/launcher_env.h"

namespace ddprun {

/// One launcher's variables as found in an environment; for choose_launcher only.
struct Candidate {
    Placement placement;
    std::string rank_variable;  ///< the variable with the rank
    std::string dropped;        ///< why it gives no rank; "" it does
    std::string broken;         ///< the malformed variable; "" none
    bool by_hand = false;       ///< RANK and so on, without the mark of ddprun or torchrun
    bool from_hydra = false;    ///< PMI variables set by Hydra or Intel MPI
};

/// All candidates that are present, innermost first.
std::vector<Candidate> collect_candidates(const EnvironmentLookup& lookup);

/// A name for the launcher's process on this node, the same for all its ranks and for no other job: the
/// nearest ancestor whose environment has no `rank_variable`, by pid and start time. For launchers that tell
/// no job id (Hydra); shells between the launcher and us carry the variable. Reads /proc.
std::string launcher_process(std::string_view rank_variable);

/// The id of the mpiexec of MPICH's Hydra, the same on all its hosts and for no other mpiexec at the same
/// time: where its proxies reach it, "node00:41234". The launcher's process on this node has it on its
/// command line.
/// "": another launcher. Reads /proc.
std::string hydra_job(std::string_view rank_variable);

}  // namespace ddprun
