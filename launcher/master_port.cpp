#include "launcher/master_port.h"

#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace ddprun {

namespace {

/// A socket bound to `port` on all IPv4 interfaces, as servers bind it.
Result<UniqueFd> bind_port(int port) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) return Error::system("socket");
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return Error::system("bind");
    return fd;
}

}  // namespace

Result<int> MasterPort::reserve() {
    Result<UniqueFd> fd = bind_port(0);
    if (!fd) return fd.error().with("a port for MASTER_PORT");
    sockaddr_in address{};
    socklen_t length = sizeof address;
    ::getsockname(fd->get(), reinterpret_cast<sockaddr*>(&address), &length);
    held_ = std::move(*fd);
    return static_cast<int>(ntohs(address.sin_port));
}

Status MasterPort::check(int port) {
    const Result<UniqueFd> fd = bind_port(port);
    if (fd) return {};
    Error error = fd.error();
    error.what = fmt::format("--master-port: {}: {}", port, ::strerror(error.sys));
    return error;
}

}  // namespace ddprun
