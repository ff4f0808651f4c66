#pragma once

#include <sys/socket.h>

#include <functional>
#include <memory>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"

namespace ddprun::rdzv {

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;
};
using SocketAddresses = std::vector<SocketAddress>;

/// Looks host names up without blocking the loop: the system's resolver runs on a thread of its own, which is
/// left to itself when nobody waits for it any more.
class Resolver {
  public:
    using Handler = std::function<void(Result<SocketAddresses>)>;

    explicit Resolver(os::EventLoop& loop) : loop_(loop) {}
    ~Resolver() { forget(); }
    Resolver(const Resolver&) = delete;
    Resolver& operator=(const Resolver&) = delete;

    /// Calls `handler` later, once, on the loop's thread. A look-up in progress is forgotten.
    /// Errors it is given: NotFound (the resolver's own sentence), System.
    void look_up(const Endpoint& endpoint, Handler handler);
    void forget();

  private:
    struct Lookup;
    Status start(const Endpoint& endpoint);

    os::EventLoop& loop_;
    Handler handler_;
    std::shared_ptr<Lookup> lookup_;
};

}  // namespace ddprun::rdzv
