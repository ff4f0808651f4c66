#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <span>

#include "env/io/socket.h"

namespace ddprun::test {

/// Fills the whole span from a socket. Error: Timeout, Closed (the peer has closed), System.
inline Status receive_exactly(int fd, std::span<char> into, TimePoint deadline) {
    while (!into.empty()) {
        const Result<bool> ready = wait_readable(fd, deadline);
        if (!ready) return ready.error();
        if (!*ready) return Error{Errc::Timeout, "receive: timed out", 0};
        const ssize_t got = ::recv(fd, into.data(), into.size(), MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno == ECONNRESET))
            return Error{Errc::Closed, "receive: closed by the peer", 0};
        if (got < 0 && errno != EAGAIN && errno != EINTR) return Error::system("receive");
        if (got > 0) into = into.subspan(static_cast<std::size_t>(got));
    }
    return {};
}

}  // namespace ddprun::test
