#pragma once

#include <string>

#include "env/worker_env.h"

namespace ddp {

/// This process's place in its world, and one line that says where it comes from.
struct LauncherContext {
    ddprun::WorkerEnv env;
    std::string origin;  ///< "launcher=openmpi rank 3/4 local 3/4; ignored: slurm (batch script)"
};

/// From ddprun's or torchrun's variables, else from those of mpirun, mpiexec, srun or flux; a PMIx server is
/// asked only for what these do not say. Nobody's variables: a world of one. Error: what the variables lack
/// or contradict, ready to be shown.
ddprun::Result<LauncherContext> read_launcher(const ddprun::EnvironmentLookup& lookup);

}  // namespace ddp
