#include "launcher/node/pmix/library.h"

#ifdef DDPRUN_HAVE_PMIX

#include <dlfcn.h>
#include <fmt/core.h>

#include "env/io/library.h"

namespace ddprun {

Result<PmixLibrary> load_pmix(const std::string& file) {
    const std::string name = file.empty() ? "libpmix.so.2" : file;
    void* const handle = load_library(name.c_str());
    if (handle == nullptr) return Error{Errc::NotFound, ::dlerror(), 0};
    PmixLibrary library;
    const bool whole = find_function(handle, "PMIx_server_init", library.init) &&
                       find_function(handle, "PMIx_server_finalize", library.finalize) &&
                       find_function(handle, "PMIx_server_register_nspace", library.register_nspace) &&
                       find_function(handle, "PMIx_server_deregister_nspace", library.deregister_nspace) &&
                       find_function(handle, "PMIx_server_register_client", library.register_client) &&
                       find_function(handle, "PMIx_server_setup_fork", library.setup_fork) &&
                       find_function(handle, "PMIx_server_dmodex_request", library.dmodex_request) &&
                       find_function(handle, "PMIx_Error_string", library.error_string);
    if (!whole) return Error{Errc::NotFound, fmt::format("{} lacks functions of a PMIx server", name), 0};
    return library;
}

}  // namespace ddprun

#endif
