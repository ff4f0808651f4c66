#pragma once

#include "launcher/pmix/library.h"

#ifdef DDPRUN_HAVE_PMIX

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rendezvous/message.h"

/// What libpmix's thread says of the workers' calls, to be heard on the loop's.
namespace ddprun {

/// A worker's call that has not been answered: what libpmix wants to be called with.
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

/// Between the two threads. libpmix's functions take no argument of ours, and its thread may speak after our
/// end, so it is one for the whole process, for good.
class Upcalls {
  public:
    static Upcalls& instance();
    /// From now on what is said is kept, and counted up in this eventfd; -1: nobody listens. Borrowed.
    void wake_by(int eventfd);
    void say(Upcall upcall);
    /// All that was said since the last call.
    std::vector<Upcall> take();

  private:
    std::mutex mutex_;
    int eventfd_ = -1;
    std::vector<Upcall> said_;
};

/// The functions that libpmix calls: each says what it was called with.
pmix_server_module_t* module_of_upcalls();

}  // namespace ddprun

#endif
