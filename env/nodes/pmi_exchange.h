#pragma once

#include <memory>

#include "env/clock.h"
#include "env/nodes/exchange.h"

namespace ddprun {

/// PMI-1's text protocol on the descriptor that PMI_FD names: Hydra, Intel MPI, MVAPICH under hydra, Flux,
/// srun --mpi=pmi2. No library. The descriptor stays open and is not owned; after the conversation the
/// launcher serves nothing on it.
Result<std::unique_ptr<Exchange>> open_pmi_exchange(int fd, int rank, TimePoint deadline);

}  // namespace ddprun
