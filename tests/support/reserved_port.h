#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>
#include <string>

#include "env/io/socket.h"
#include "env/unique_fd.h"

namespace ddprun::test {

/// A loopback port for a server that starts later, or never. It is bound while this object lives and never
/// listens: the kernel gives it to no other socket, refuses connections, and lets a server with SO_REUSEADDR
/// bind it.
class ReservedPort {
  public:
    ReservedPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        const int on = 1;
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        auto* const generic = reinterpret_cast<sockaddr*>(&address);
        if (::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
            ::bind(fd_.get(), generic, length) != 0 || ::getsockname(fd_.get(), generic, &length) != 0) {
            throw std::runtime_error("no port can be reserved");
        }
        endpoint_ = {"127.0.0.1", ntohs(address.sin_port)};
    }

    [[nodiscard]] const Endpoint& endpoint() const { return endpoint_; }
    [[nodiscard]] std::string number() const { return std::to_string(endpoint_.port); }
    /// "127.0.0.1:29400"
    [[nodiscard]] std::string text() const { return to_string(endpoint_); }

  private:
    UniqueFd fd_;
    Endpoint endpoint_;
};

}  // namespace ddprun::test
