#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "ddp/mpi/module.h"
#include "env/worker_env.h"

namespace ddp::mpi {

/// Pure: the modules that may carry this process's calls, the likeliest first. There is one for each family of MPIs
/// (libddp-mpi-openmpi.so, libddp-mpi-mpich.so: Intel's and Cray's are of MPICH's), and the one that belongs to who started this
/// process comes first. Each is looked for in `folders`, where it exists, and then where the loader looks.
std::vector<std::string> module_names(const ddprun::EnvironmentLookup& lookup, const std::vector<std::filesystem::path>& folders);

struct LoadedModule {
    const Module* entries;
    std::string name;
};
/// The one that DDP_MPI_MODULE names, else the first of module_names() that loads: beside the program, in the lib folders beside its
/// own, or where the loader looks. It is never unloaded. Throws InvalidInput with the remedy.
LoadedModule load_module();

}  // namespace ddp::mpi
