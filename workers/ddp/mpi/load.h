#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "ddp/cuda/shared_library.h"
#include "ddp/mpi/module.h"
#include "env/worker_env.h"

namespace ddp::mpi {

/// The folders in which a program of folder `here` looks for modules: its own, and the library folders of the
/// prefix that it is installed in. Modules are installed in PREFIX/`libdir` (Debian's is
/// "lib/x86_64-linux-gnu"), ddprun's programs in PREFIX/`programs` ("libexec/ddprun"). Pure.
std::vector<std::filesystem::path> module_folders(const std::filesystem::path& here,
                                                  const std::string& libdir, const std::string& programs);

/// The modules that may carry this process's calls, the likeliest first. There is one for each family of MPIs
/// (libddp-mpi-openmpi.so, libddp-mpi-mpich.so: Intel's and Cray's belong to MPICH's); the family of the
/// launcher that started this process comes first. Each module is tried in those `folders` that have it, and
/// then on the loader's path. Pure.
std::vector<std::string> module_names(const ddprun::EnvironmentLookup& lookup,
                                      const std::vector<std::filesystem::path>& folders);

/// The first of `names` that `open` opens; `passed_over` is the reason why the first name failed, "" if it
/// did not.
struct OpenedModule {
    SharedLibrary library;
    std::string passed_over;
};
/// Error: that of open_library for the first name.
ddprun::Result<OpenedModule> open_likeliest(
    const std::vector<std::string>& names,
    const std::function<ddprun::Result<SharedLibrary>(const std::string& name)>& open);

struct LoadedModule {
    const Module* entries;
    std::string name;
    std::string passed_over;  ///< reason why a likelier module was not used; "" without one
};
/// Loads the module that DDP_MPI_MODULE names, else the first of module_names() that loads: from the
/// module_folders() of the program, or from the loader's path. It is never unloaded. Throws
/// InvalidInput with the remedy.
LoadedModule load_module();

}  // namespace ddp::mpi
