#pragma once

#include <string>
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

}  // namespace ddprun
