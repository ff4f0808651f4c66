#include "rendezvous/client/resolver.h"

#include <sys/epoll.h>

#include <utility>

namespace ddprun::rdzv {

void Resolver::look_up(const Endpoint& endpoint, Handler handler) {
    forget();
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
    if (watched) return;
    failed_ = loop_.call_after(Duration::zero(),
                               [handler = std::move(handler), why = watched.error()] { handler(why); });
}

void Resolver::forget() {
    loop_.cancel(std::exchange(failed_, 0));
    if (call_) loop_.unwatch(call_->done().value_or(-1));
    call_.reset();
}

}  // namespace ddprun::rdzv
