#pragma once

#include <string>

#include "env/nodes/launcher_env.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddp {

/// The result of the rendezvous of ranks that mpiexec or srun started, without ddprun.
struct RankRendezvous {
    ddprun::Placement placement;  ///< includes the local rank and sizes, which some launchers do not give
    ddprun::EnvironmentList
        variables;    ///< of the environment contract: store, token, MASTER_ADDR, MASTER_PORT, job id
    std::string how;  ///< "they meet at 10.1.0.7:40123 (told by PMIx)"
};

/// True when the ranks need a rendezvous: they are, or may be, on several hosts.
bool needs_rendezvous(const ddprun::Placement& placement);

/// Collective: rank 0 serves the job's store in a thread of its own until the process ends; address and
/// secret travel over the launcher's channel, else in a file in DDPRUN_EXCHANGE_DIR or the working directory.
/// Returns when all ranks have arrived, each once.
///
/// A launcher serves a process once: a second call returns the first result. Blocks for
/// DDPRUN_EXCHANGE_TIMEOUT at most (120 s). Error: NotFound with the remedy when there is no channel;
/// Mismatch when two processes have one rank, with both; Timeout with the number of arrivals; the errors of
/// Exchange and reach.
ddprun::Result<RankRendezvous> rendezvous_of_ranks(const ddprun::LauncherChoice& launcher,
                                                   const ddprun::EnvironmentLookup& lookup);

}  // namespace ddp
