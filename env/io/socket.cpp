#include "env/io/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "env/io/resolve.h"
#include "env/text.h"

namespace ddprun {
namespace {

UniqueFd open_socket(const SocketAddress& address) {
    return UniqueFd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

Result<Endpoint> endpoint_of(int fd, int (*ask)(int, sockaddr*, socklen_t*), std::string_view attempt) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (ask(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return Error::system(attempt);
    return numeric_endpoint(address, length);
}

Result<Listener> listen_on(const SocketAddress& address) {
    UniqueFd fd = open_socket(address);
    if (!fd) return Error::system("socket");
    // A port whose last connections are in TIME_WAIT is free; one with a listener stays taken.
    set_socket_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (address.storage.ss_family == AF_INET6) set_socket_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(fd.get(), address.get(), address.length) != 0) return Error::system("bind");
    if (::listen(fd.get(), SOMAXCONN) != 0) return Error::system("listen");
    Result<Endpoint> bound = local_endpoint(fd.get());
    if (!bound) return bound.error();
    return Listener{std::move(fd), *std::move(bound)};
}

/// Waits for `events`; errors and hang-ups count as events. False: the deadline passed.
Result<bool> wait_for(int fd, short events, TimePoint deadline) {
    for (;;) {
        pollfd entry{fd, events, 0};
        const int ready = ::poll(&entry, 1, poll_milliseconds(MonotonicClock::now(), deadline));
        if (ready > 0) return true;
        if (ready == 0 && MonotonicClock::now() >= deadline) return false;
        if (ready < 0 && errno != EINTR) return Error::system("poll");
    }
}

Result<sockaddr_un> unix_address(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof address.sun_path) {
        return Error::system(fmt::format("a Unix socket at '{}'", path),
                             path.empty() ? ENOENT : ENAMETOOLONG);
    }
    std::memcpy(address.sun_path, path.data(), path.size());
    return address;
}

bool is_connected_to_itself(int fd) {
    sockaddr_storage local{};
    sockaddr_storage peer{};
    socklen_t local_length = sizeof local;
    socklen_t peer_length = sizeof peer;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_length) != 0) return false;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) return false;
    return local_length == peer_length && std::memcmp(&local, &peer, local_length) == 0;
}

Result<UniqueFd> connect_to_address(const SocketAddress& address, TimePoint deadline) {
    Result<UniqueFd> fd = begin_connect(address);
    if (!fd) return fd;
    const Result<bool> done = wait_for(fd->get(), POLLOUT, deadline);
    if (!done) return done.error();
    if (!*done) return Error{Errc::Timeout, "timed out", 0};
    if (const int failure = connect_outcome(fd->get())) return Error::system("connect", failure);
    set_socket_option(fd->get(), IPPROTO_TCP, TCP_NODELAY, 1);
    return fd;
}

/// The deadline of one of `attempts`, so that a dead first address leaves time for the others.
TimePoint share_of(TimePoint deadline, int attempts) {
    if (deadline == kNever || attempts <= 1) return deadline;
    const TimePoint now = MonotonicClock::now();
    return now + (deadline - now) / attempts;
}

bool means_closed(int error) { return error == EPIPE || error == ECONNRESET || error == ENOTCONN; }

Error transfer_error(std::string_view attempt, int error) {
    Error failure = Error::system(attempt, error);
    if (means_closed(error)) {
        failure.code = Errc::Closed;
        failure.sys = 0;
    }
    return failure;
}

/// Call it after a send or recv that returned -1: waits if the socket was not ready, else returns the error.
Status wait_or_fail(int fd, std::string_view attempt, short events, TimePoint deadline) {
    const int error = errno;
    if (error == EINTR) return {};
    if (error != EAGAIN && error != EWOULDBLOCK) return transfer_error(attempt, error);
    const Result<bool> ready = wait_for(fd, events, deadline);
    if (!ready) return ready.error();
    if (!*ready) return Error{Errc::Timeout, fmt::format("{}: timed out", attempt), 0};
    return {};
}

}  // namespace

std::string to_string(const Endpoint& endpoint) {
    const bool is_v6 = endpoint.host.find(':') != std::string::npos;
    return fmt::format("{}{}{}:{}", is_v6 ? "[" : "", endpoint.host, is_v6 ? "]" : "", endpoint.port);
}

Result<Endpoint> parse_endpoint(std::string_view text, std::uint16_t default_port) {
    const auto not_an_endpoint = [&](std::string_view why) {
        return Error{Errc::InvalidArgument, fmt::format("'{}' is not host:port ({})", text, why), 0};
    };
    std::string_view host = text;
    std::string_view port;
    bool has_port = false;
    if (text.starts_with('[')) {
        const std::size_t close = text.find(']');
        if (close == std::string_view::npos) return not_an_endpoint("']' is missing");
        host = text.substr(1, close - 1);
        const std::string_view rest = text.substr(close + 1);
        if (!rest.empty() && rest[0] != ':') return not_an_endpoint("expected ':' after ']'");
        has_port = !rest.empty();
        if (has_port) port = rest.substr(1);
    } else if (const std::size_t colon = text.find(':'); colon != std::string_view::npos) {
        if (text.find(':', colon + 1) != std::string_view::npos)
            return not_an_endpoint("write an IPv6 address as [address]:port");
        host = text.substr(0, colon);
        port = text.substr(colon + 1);
        has_port = true;
    }
    if (host.empty()) return not_an_endpoint("the host is missing");
    if (host.find_first_of(" \t\r\n/") != std::string_view::npos)
        return not_an_endpoint("a host has no blanks or slashes");
    if (!has_port && host.find_first_not_of("0123456789") == std::string_view::npos)
        return not_an_endpoint("a port without a host");
    if (!has_port) return Endpoint{std::string(host), default_port};
    const Result<std::int64_t> number = parse_int_between(port, 0, 65535);
    if (!number) return not_an_endpoint("port " + number.error().what);
    return Endpoint{std::string(host), static_cast<std::uint16_t>(*number)};
}

Result<Listener> listen_tcp(const Endpoint& where) {
    const std::string attempt = "listen " + to_string({where.host.empty() ? "*" : where.host, where.port});
    Result<SocketAddresses> addresses = resolve(where, AI_PASSIVE);
    if (!addresses) return addresses.error().with(attempt);
    // For "" try IPv6, which serves IPv4 too, before IPv4.
    std::stable_partition(addresses->begin(), addresses->end(),
                          [](const SocketAddress& one) { return one.storage.ss_family == AF_INET6; });
    Error last{Errc::NotFound, attempt + ": no address", 0};
    for (const SocketAddress& address : *addresses) {
        Result<Listener> listener = listen_on(address);
        if (listener) return listener;
        last = Error::system(attempt, listener.error().sys);
        // Do not fall back to IPv4 when IPv6's port is taken: that would listen on half of the addresses.
        if (last.sys != EAFNOSUPPORT && last.sys != EADDRNOTAVAIL) break;
    }
    return last;
}

Result<UniqueFd> begin_connect(const SocketAddress& address) {
    UniqueFd fd = open_socket(address);
    if (!fd) return Error::system("socket");
    const int outcome = ::connect(fd.get(), address.get(), address.length);
    if (outcome != 0 && errno != EINPROGRESS && errno != EINTR) return Error::system("connect");
    return fd;
}

Result<UniqueFd> connect_tcp(const Endpoint& server, TimePoint deadline) {
    const std::string attempt = "connect " + to_string(server);
    const Result<SocketAddresses> addresses = resolve_by(server, deadline);
    if (!addresses) return addresses.error().with(attempt);
    auto left = static_cast<int>(addresses->size());
    Error last{Errc::NotFound, attempt + ": no address", 0};
    for (const SocketAddress& address : *addresses) {
        Result<UniqueFd> fd = connect_to_address(address, share_of(deadline, left--));
        if (fd) return fd;
        const Error& error = fd.error();
        last = error.sys != 0 ? Error::system(attempt, error.sys) : error.with(attempt);
    }
    return last;
}

Result<UnixListener> listen_unix(const std::string& path) {
    const Result<sockaddr_un> address = unix_address(path);
    if (!address) return address.error();
    UnixListener listener{UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)), {}};
    if (!listener.fd) return Error::system("socket");
    if (::bind(listener.fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0)
        return Error::system("bind " + path);
    listener.inode = UniqueFd(::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (!listener.inode) return Error::system("open " + path);
    if (::listen(listener.fd.get(), SOMAXCONN) != 0) return Error::system("listen " + path);
    return listener;
}

Result<UniqueFd> connect_unix(const std::string& path, TimePoint deadline) {
    constexpr int kPauseMilliseconds = 2;  // no event announces room in a full queue
    const Result<sockaddr_un> address = unix_address(path);
    if (!address) return address.error();
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) return Error::system("socket");
    while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&*address), sizeof *address) != 0) {
        if (errno != EAGAIN && errno != EINTR) return Error::system("connect " + path);
        if (MonotonicClock::now() >= deadline)
            return Error{Errc::Timeout, fmt::format("connect {}: too many others do", path), 0};
        ::poll(nullptr, 0, kPauseMilliseconds);
    }
    return fd;
}

Result<UnixPeer> unix_peer(int fd) {
    ucred peer{};
    socklen_t length = sizeof peer;
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return Error::system("SO_PEERCRED");
    return UnixPeer{peer.pid, peer.uid};
}

ssize_t send_packet(int socket, std::string_view packet, int descriptor, int flags) {
    iovec part{const_cast<char*>(packet.data()), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* const header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    }
    return ::sendmsg(socket, &message, MSG_NOSIGNAL | flags);
}

ssize_t receive_packet(int socket, std::span<char> packet, UniqueFd& descriptor, int flags) {
    iovec part{packet.data(), packet.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
    descriptor.reset();
    const cmsghdr* const header = n < 0 ? nullptr : CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return n;
    // The buffer's alignment has room for a second descriptor: own it, too, so that it is closed.
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + at - CMSG_LEN(0), sizeof fd);
        UniqueFd received(fd);
        if (!descriptor) descriptor = std::move(received);
    }
    return n;
}

Status send_all(int fd, std::string_view bytes, TimePoint deadline) {
    while (!bytes.empty()) {
        // MSG_DONTWAIT: the deadline holds even on a blocking socket.
        const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            bytes.remove_prefix(static_cast<std::size_t>(sent));
            continue;
        }
        if (Status waited = wait_or_fail(fd, "send", POLLOUT, deadline); !waited) return waited;
    }
    return {};
}

Result<bool> wait_readable(int fd, TimePoint deadline) { return wait_for(fd, POLLIN, deadline); }

void set_socket_option(int fd, int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof value);
}

Status set_nonblocking(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) return Error::system("fcntl O_NONBLOCK");
    return {};
}

int connect_outcome(int fd) {
    int failure = 0;
    socklen_t length = sizeof failure;
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &length) != 0) return errno;
    if (failure == 0 && is_connected_to_itself(fd)) return ECONNREFUSED;
    return failure;
}

std::string numeric_host(const sockaddr& address) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    const void* number = nullptr;
    if (address.sa_family == AF_INET) number = &reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    if (address.sa_family == AF_INET6) number = &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    if (number != nullptr) ::inet_ntop(address.sa_family, number, text.data(), text.size());
    return text.data();
}

Endpoint numeric_endpoint(const sockaddr_storage& address, socklen_t length) {
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    const auto* const generic = reinterpret_cast<const sockaddr*>(&address);
    if (::getnameinfo(generic, length, host.data(), host.size(), port.data(), port.size(),
                      NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return {};
    }
    std::string name = host.data();
    constexpr std::string_view kMapped = "::ffff:";  // an IPv4 peer on a dual-stack listener
    if (name.starts_with(kMapped) && name.find('.') != std::string::npos) name.erase(0, kMapped.size());
    return {name, static_cast<std::uint16_t>(parse_int_between(port.data(), 0, 65535).value_or(0))};
}

Result<Endpoint> local_endpoint(int fd) { return endpoint_of(fd, &::getsockname, "getsockname"); }
Result<Endpoint> remote_endpoint(int fd) { return endpoint_of(fd, &::getpeername, "getpeername"); }

std::string host_name() {
    std::array<char, 256> name{};
    if (::gethostname(name.data(), name.size() - 1) != 0) return "localhost";
    return name.data();
}

}  // namespace ddprun
