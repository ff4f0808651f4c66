#pragma once

#ifdef DDPRUN_HAVE_PMIX

#include <pmix.h>
#include <pmix_server.h>

#include <string>

#include "env/result.h"

/// Private to server.cpp and upcalls.cpp: libpmix, found at run time.
namespace ddprun {

/// The functions of a server. Macros of pmix.h that allocate or load values call others: not used.
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

/// Never unloaded: it runs threads of its own. Error: NotFound naming what is missing.
Result<PmixLibrary> load_pmix(const std::string& file);

}  // namespace ddprun

#endif
