#pragma once

#include <memory>

#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/handshake.h"
#include "rendezvous/protocol_limits.h"

namespace ddprun::rdzv {

struct StoreHostOptions {
    Credentials credentials;  ///< an empty token is refused
    ServerLimits limits;
    StoreLimits store_limits;
};

/// The job's store for programs that no ddprun started: a thread of rank 0 serves it.
///
/// Speaks the wire of Server, but for agents, whom it refuses. A poll loop of its own over the same pure parts: a worker does
/// not link the launcher's loop, and it must not take the program's signals or its descriptors' time. Tells nobody anything:
/// who is refused hears why.
class StoreHost {
  public:
    /// Serves from now on; `listener` listens and does not block. Error: InvalidArgument (no token), System.
    static Result<std::unique_ptr<StoreHost>> start(UniqueFd listener, StoreHostOptions options);
    /// Sends what has been answered, for a second at most, and closes all connections. In a forked child: does nothing.
    ~StoreHost();
    StoreHost(const StoreHost&) = delete;
    StoreHost& operator=(const StoreHost&) = delete;

  private:
    struct Impl;
    explicit StoreHost(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun::rdzv
