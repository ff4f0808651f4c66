#include "ddp/worker/lifeline_socket.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "ddp/types.h"
#include "env/io/socket.h"
#include "env/lifeline.h"
#include "env/text.h"

namespace ddp {

using ddprun::MonotonicClock;
using ddprun::UniqueFd;

namespace {

UniqueFd inherited_descriptor(int fd) {
    UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!own) throw InvalidInput(fmt::format("DDPRUN_LIFELINE_FD={}: {}", fd, std::strerror(errno)));
    // The program's own children would keep it open, and read packets meant for this process.
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return own;
}

ddprun::EnvironmentList variables_in(const std::string& payload) {
    ddprun::EnvironmentList list;
    for (const auto line : ddprun::split(payload, '\n')) {
        const std::size_t equals = line.find('=');
        if (equals != line.npos) list.emplace_back(line.substr(0, equals), line.substr(equals + 1));
    }
    return list;
}

std::uint64_t number_in(std::string_view text) {
    const auto number = ddprun::parse_int_between(text, 0, INT64_MAX);
    return number ? static_cast<std::uint64_t>(*number) : 0;
}

}  // namespace

LifelineSocket::LifelineSocket(int inherited) : fd_(inherited_descriptor(inherited)) {}

void LifelineSocket::tell(char kind, const std::string& payload) {
    const std::string packet = kind + payload;
    (void)::send(fd_.get(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

void LifelineSocket::report(char kind, const std::string& payload, ddprun::TimePoint deadline) {
    const std::string packet = kind + payload;
    while (::send(fd_.get(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        if (errno != EAGAIN && errno != EINTR) return;
        const auto now = MonotonicClock::now();
        if (now >= deadline) throw TimeoutError("the agent of ddprun does not read its lifeline");
        pollfd entry{.fd = fd_.get(), .events = POLLOUT, .revents = 0};
        ::poll(&entry, 1, ddprun::poll_milliseconds(now, deadline));
    }
}

void LifelineSocket::receive() {
    char packet[ddprun::lifeline::kMaxPacket];
    UniqueFd descriptor;
    while (fd_) {
        const ssize_t n = ddprun::receive_packet(fd_.get(), packet, descriptor, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) return fd_.reset();  // the agent has gone and will send nothing more
        take(packet[0], {packet + 1, static_cast<std::size_t>(n) - 1}, std::move(descriptor));
    }
}

void LifelineSocket::take(char kind, std::string payload, UniqueFd descriptor) {
    if (kind == ddprun::lifeline::kPreempt) {
        stop_request_ = std::move(payload);
    } else if (kind == ddprun::lifeline::kRelease) {
        released_ = number_in(payload);
    } else if (kind == ddprun::lifeline::kGeneration && payload.empty()) {
        is_last_ = true;
    } else if (kind == ddprun::lifeline::kGeneration) {
        Generation next{variables_in(payload), std::move(descriptor)};
        for (const auto& [name, value] : next.variables) {
            if (name == "DDPRUN_GENERATION") next.number = number_in(value);
        }
        generation_ = std::move(next);
    }
}

bool LifelineSocket::wait(ddprun::TimePoint deadline) const {
    const auto now = MonotonicClock::now();
    if (now >= deadline) return false;
    pollfd entry{.fd = fd_.get(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, ddprun::poll_milliseconds(now, deadline));
    return true;
}

}  // namespace ddp
