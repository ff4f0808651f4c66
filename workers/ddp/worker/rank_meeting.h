#pragma once

#include <string>

#include "env/nodes/launcher_env.h"
#include "env/result.h"
#include "env/worker_env.h"

namespace ddp {

/// What the ranks of mpiexec or srun have found together, without any ddprun.
struct RankMeeting {
    ddprun::Placement placement;  ///< with the local rank and sizes, which some launchers do not tell
    ddprun::EnvironmentList
        variables;    ///< of the contract: store, token, MASTER_ADDR, MASTER_PORT, id of the job
    std::string how;  ///< "they meet at 10.1.0.7:40123 (told by PMIx)"
};

/// Whether the ranks have to meet: they are on several hosts, or may be.
bool must_meet(const ddprun::Placement& placement);

/// Collective: rank 0 hosts the job's store in a thread of its own until the process ends; address and secret
/// go through what the launcher carries, else a file in DDPRUN_EXCHANGE_DIR or the working directory. Returns
/// when all ranks have come, each once.
///
/// A launcher speaks with a process once: the second call gets what the first one got. Blocks for
/// DDPRUN_EXCHANGE_TIMEOUT at most (120 s). Error: NotFound where nothing carries it, with the remedy;
/// Mismatch where a rank is there twice, with both; Timeout, saying how many came; what Exchange and reach
/// say.
ddprun::Result<RankMeeting> meet_ranks(const ddprun::LauncherChoice& launcher,
                                       const ddprun::EnvironmentLookup& lookup);

}  // namespace ddp
