#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ddp/cuda/shared_library.h"
#include "ddp/mpi/module.h"
#include "env/worker_env.h"

namespace ddp::mpi {

/// Pure: the modules that may carry this process's calls, the likeliest first. There is one for each family
/// of MPIs (libddp-mpi-openmpi.so, libddp-mpi-mpich.so: Intel's and Cray's are of MPICH's), and the one that
/// belongs to who started this process comes first. Each is looked for in `folders`, where it exists, and
/// then where the loader looks.
std::vector<std::string> module_names(const ddprun::EnvironmentLookup& lookup,
                                      const std::vector<std::filesystem::path>& folders);

/// The first of `names` that `open` can open, and why the likeliest, the first, is not it: "" it is.
struct OpenedModule {
    SharedLibrary library;
    std::string passed_over;
};
/// Error: as open_library, of the first name.
ddprun::Result<OpenedModule> open_likeliest(
    const std::vector<std::string>& names,
    const std::function<ddprun::Result<SharedLibrary>(const std::string& name)>& open);

struct LoadedModule {
    const Module* entries;
    std::string name;
    std::string passed_over;  ///< why a likelier module is not it; "" there is none
};
/// The one that DDP_MPI_MODULE names, else the first of module_names() that loads: beside the program, in the
/// lib folders beside its own, or where the loader looks. It is never unloaded. Throws InvalidInput with the
/// remedy.
LoadedModule load_module();

}  // namespace ddp::mpi
