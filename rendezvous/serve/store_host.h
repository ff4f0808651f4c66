#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun::rdzv {

struct StoreHostOptions {
    Credentials credentials;  ///< an empty token is refused
    ServerLimits limits;
    StoreLimits store_limits;
    std::string own_name = "";  ///< as which this process itself is a client
    Duration farewell = std::chrono::seconds(3);
};

/// The job's store for programs that no ddprun started: a thread of rank 0 serves it.
///
/// The StoreService of the launcher on an event loop of its own, which takes none of the program's signals.
/// Logs nothing: who is refused is told why.
class StoreHost {
  public:
    /// Serves from now on; `listener` listens and does not block. Error: InvalidArgument (no token), System.
    static Result<std::unique_ptr<StoreHost>> start(UniqueFd listener, StoreHostOptions options);
    /// Serves on until all clients have gone but those called `own_name`, for `farewell` at most: others may
    /// still have a last word for the store when this process has none. Then closes all connections. In a
    /// forked child: does nothing.
    ~StoreHost();
    StoreHost(const StoreHost&) = delete;
    StoreHost& operator=(const StoreHost&) = delete;

  private:
    struct Impl;
    explicit StoreHost(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun::rdzv
