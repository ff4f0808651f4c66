#include "env/os/acceptor.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace ddprun::os {
namespace {

/// The most accepts per event, so that accepted connections are served in between.
constexpr int kAcceptsPerEvent = 64;
/// The pause after accept(2) has failed.
constexpr Duration kAcceptPause = std::chrono::milliseconds(200);

/// True for errors of that one connection or its network; the next connection may succeed.
bool is_of_that_connection(int error) {
    switch (error) {
        case ECONNABORTED:
        case EINTR:
        case EPROTO:
        case ENOPROTOOPT:
        case ENETDOWN:
        case EHOSTDOWN:
        case ENONET:
        case EHOSTUNREACH:
        case ENETUNREACH:
        case EOPNOTSUPP: return true;
        default: return false;
    }
}

/// True when a connection waits. (Without a free descriptor accept(2) fails before it looks for one.)
bool has_pending(int listener) {
    pollfd look{listener, POLLIN, 0};
    return ::poll(&look, 1, 0) > 0;
}

}  // namespace

Acceptor::~Acceptor() {
    loop_.cancel(pause_timer_);
    for (const UniqueFd& listener : listeners_) loop_.unwatch(listener.get());
}

Status Acceptor::listen(UniqueFd listener) {
    const int fd = listener.get();
    if (const Status watched = loop_.watch(fd, EPOLLIN, [this, fd](std::uint32_t) { accept_some(fd); });
        !watched)
        return watched;
    listeners_.push_back(std::move(listener));
    return {};
}

void Acceptor::room_was_made() {
    if (waits_for_room_) resume();
}

void Acceptor::accept_some(int listener) {
    for (int i = 0; i < kAcceptsPerEvent; ++i) {
        if (accept_one(listener) == Outcome::Done) return;
    }
}

Acceptor::Outcome Acceptor::accept_one(int listener) {
    if (const TimePoint room_at = owner_.room_at(); room_at > loop_.now()) {
        pause(room_at, true);
        return Outcome::Done;
    }
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) return judge(errno, listener);
    owner_.on_accepted(std::move(fd));
    return Outcome::Again;
}

Acceptor::Outcome Acceptor::judge(int error, int listener) {
    if (error == EAGAIN || error == EWOULDBLOCK) return Outcome::Done;
    if (is_of_that_connection(error)) return Outcome::Again;
    const bool is_full = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
    if (is_full && !has_pending(listener)) return Outcome::Done;
    if (is_full && owner_.close_another()) return Outcome::Again;
    owner_.on_accept_failed(error);
    pause(loop_.now() + kAcceptPause, false);
    return Outcome::Done;
}

/// Stops watching the listeners: they stay readable, so the loop would spin.
void Acceptor::pause(TimePoint until, bool waits_for_room) {
    for (const UniqueFd& listener : listeners_) loop_.change(listener.get(), 0);
    loop_.cancel(pause_timer_);
    pause_timer_ = loop_.call_at(until, [this] { resume(); });
    waits_for_room_ = waits_for_room;
}

void Acceptor::resume() {
    loop_.cancel(std::exchange(pause_timer_, 0));
    waits_for_room_ = false;
    for (const UniqueFd& listener : listeners_) loop_.change(listener.get(), EPOLLIN);
}

}  // namespace ddprun::os
