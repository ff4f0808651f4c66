#include "rendezvous/client/resolver.h"

#include <netdb.h>
#include <sys/epoll.h>

#include <utility>

namespace ddprun::rdzv {

void Resolver::look_up(const Endpoint& endpoint, Handler handler) {
    forget();
    const auto answer_soon = [this, &handler](Result<SocketAddresses> found) {
        soon_ = loop_.call_after(Duration::zero(), [handler, found = std::move(found)] { handler(found); });
    };
    // A numeric address, such as that of the only node, needs no thread.
    if (Result<SocketAddresses> numeric = resolve(endpoint, AI_NUMERICHOST))
        return answer_soon(std::move(numeric));
    call_.emplace([endpoint]() -> Result<SocketAddresses> {
        Result<SocketAddresses> found = resolve(endpoint, 0);
        if (!found) return found.error().with("resolve " + endpoint.host);
        return found;
    });
    const auto answer = [this, handler](std::uint32_t) {
        Result<SocketAddresses> found = *call_->wait(loop_.now());
        forget();
        handler(std::move(found));
    };
    const Result<int> done = call_->done();
    const Status watched = done ? loop_.watch(*done, EPOLLIN, answer) : Status(done.error());
    if (!watched) answer_soon(watched.error());
}

void Resolver::forget() {
    loop_.cancel(std::exchange(soon_, 0));
    if (call_) loop_.unwatch(call_->done().value_or(-1));
    call_.reset();
}

}  // namespace ddprun::rdzv
