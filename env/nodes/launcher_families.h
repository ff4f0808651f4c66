#pragma once

#include <string>
#include <vector>

#include "env/nodes/launcher_env.h"

namespace ddprun {

/// One launcher's variables as found in an environment; for choose_launcher only.
struct Candidate {
    Placement says;
    std::string rank_variable;  ///< the one that was read
    std::string dropped;        ///< why it is no evidence of a rank; "" it is
    std::string broken;         ///< which of its variables is malformed; "" none
    bool by_hand = false;       ///< RANK and so on, without the mark of ddprun or torchrun
    bool from_hydra = false;    ///< PMI variables that Hydra or Intel MPI made
};

/// All that are present, innermost first.
std::vector<Candidate> collect_candidates(const EnvironmentLookup& lookup);

}  // namespace ddprun
