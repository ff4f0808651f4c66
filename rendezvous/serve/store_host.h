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
    std::string own_name = "";  ///< the name under which this process itself is a client
    Duration farewell = std::chrono::seconds(3);
};

/// The job's store for programs that ddprun did not start: a thread of rank 0 serves it.
///
/// The thread runs a StoreService on its own event loop and takes none of the program's signals. It logs
/// nothing; a refused peer is told why.
class StoreHost {
  public:
    /// Serves from now on. `listener` is a listening, non-blocking socket. Error: InvalidArgument (no token),
    /// System.
    static Result<std::unique_ptr<StoreHost>> start(UniqueFd listener, StoreHostOptions options);
    /// Serves until all clients but those called `own_name` have gone, for `farewell` at most, because other
    /// ranks may still need the store. Then closes all connections. In a forked child: does nothing.
    ~StoreHost();
    StoreHost(const StoreHost&) = delete;
    StoreHost& operator=(const StoreHost&) = delete;

  private:
    struct Impl;
    explicit StoreHost(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

}  // namespace ddprun::rdzv
