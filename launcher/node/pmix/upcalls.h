#pragma once

#include "launcher/node/pmix/library.h"

#ifdef DDPRUN_HAVE_PMIX

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rendezvous/wire/message.h"

/// The queue of workers' calls from libpmix's thread to the loop's.
namespace ddprun {

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
