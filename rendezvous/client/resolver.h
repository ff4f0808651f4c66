#pragma once

#include <functional>
#include <optional>

#include "env/io/background_call.h"
#include "env/io/resolve.h"
#include "env/os/event_loop.h"
#include "env/result.h"

namespace ddprun::rdzv {

/// Looks host names up without blocking the loop.
class Resolver {
  public:
    using Handler = std::function<void(Result<SocketAddresses>)>;

    explicit Resolver(os::EventLoop& loop) : loop_(loop) {}
    ~Resolver() { forget(); }
    Resolver(const Resolver&) = delete;
    Resolver& operator=(const Resolver&) = delete;

    /// Calls `handler` later, once, on the loop's thread. A look-up in progress is dropped.
    /// The handler's errors: NotFound (with the resolver's own text), System.
    void look_up(const Endpoint& endpoint, Handler handler);
    void forget();

  private:
    os::EventLoop& loop_;
    std::optional<BackgroundCall<Result<SocketAddresses>>> call_;
    os::EventLoop::TimerId soon_ = 0;  ///< calls the handler when the answer needs no thread
};

}  // namespace ddprun::rdzv
