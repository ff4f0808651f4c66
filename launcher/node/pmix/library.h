#pragma once

#ifdef DDPRUN_HAVE_PMIX

#include <pmix.h>
#include <pmix_server.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "env/result.h"
#include "rendezvous/wire/message.h"

/// libpmix, loaded at run time, and the queue of workers' calls from its thread to the loop's. Private to
/// server.cpp.
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

/// A worker's call that waits for an answer: libpmix's callback and its cookie.
struct OpenCall {
    pmix_modex_cbfunc_t answer;
    void* cookie;
};

struct ClientConnected {
    std::string name_space;
    std::uint32_t rank;
};
struct ClientFinalized {
    std::string name_space;
    std::uint32_t rank;
};
struct ClientAborted {
    std::string name_space;
    std::uint32_t rank;
    int status;
    std::string text;
};
struct FenceCalled {
    std::string name_space;
    std::vector<std::uint32_t> ranks;
    bool is_whole;
    rdzv::Blob data;
    OpenCall call;
};
struct ModexCalled {
    std::string name_space;
    std::uint32_t rank;
    OpenCall call;
};
/// The answer to a request of ours.
struct ModexFound {
    std::uint64_t number;
    bool found;
    rdzv::Blob data;
};
using Upcall =
    std::variant<ClientConnected, ClientFinalized, ClientAborted, FenceCalled, ModexCalled, ModexFound>;

/// The queue between the two threads. There is one for the whole process, never destroyed: libpmix's
/// callbacks take no argument of ours, and its thread may call them after our end.
class Upcalls {
  public:
    static Upcalls& instance();
    /// Keeps upcalls from now on and counts them in this eventfd; -1: drops them. Borrowed.
    void wake_by(int eventfd);
    void post(Upcall upcall);
    /// The upcalls since the last call.
    std::vector<Upcall> take();

  private:
    std::mutex mutex_;
    int eventfd_ = -1;
    std::vector<Upcall> posted_;
};

/// The functions that libpmix calls: each posts its arguments.
pmix_server_module_t* module_of_upcalls();

}  // namespace ddprun

#endif
