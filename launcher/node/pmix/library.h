#pragma once

#ifdef DDPRUN_HAVE_PMIX

#include <pmix.h>
#include <pmix_server.h>

#include <string>

#include "env/result.h"

/// libpmix, loaded at run time. Private to server.cpp and upcalls.cpp.
namespace ddprun {

/// The functions of a server. We do not use pmix.h's macros that allocate or load values: they call others.
struct PmixLibrary {
    decltype(&::PMIx_server_init) init = nullptr;
    decltype(&::PMIx_server_finalize) finalize = nullptr;
    decltype(&::PMIx_server_register_nspace) register_nspace = nullptr;
    decltype(&::PMIx_server_deregister_nspace) deregister_nspace = nullptr;
    decltype(&::PMIx_server_register_client) register_client = nullptr;
    decltype(&::PMIx_server_setup_fork) setup_fork = nullptr;
    decltype(&::PMIx_server_dmodex_request) dmodex_request = nullptr;
    decltype(&::PMIx_Error_string) error_string = nullptr;
};

/// Loads libpmix, which is never unloaded because it runs threads. Error: NotFound naming what is missing.
Result<PmixLibrary> load_pmix(const std::string& file);

}  // namespace ddprun

#endif
