#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/result.h"

/// Name look-ups by a BackgroundCall, because the system's resolver has no deadline: a name server that does
/// not answer holds a caller for 10 s per name and more.
namespace ddprun {

/// The timeout of the resolver, after which ddprun goes on without the answer.
inline constexpr Duration kResolverPatience = std::chrono::seconds(5);

/// An address that a TCP socket can bind or connect to.
struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
using SocketAddresses = std::vector<SocketAddress>;

/// The addresses of a name, with the port. `flags` are getaddrinfo's; without AI_NUMERICHOST a name blocks as
/// long as the resolver does. Error: NotFound (the resolver's message), System.
Result<SocketAddresses> resolve(const Endpoint& endpoint, int flags);
/// Resolves by a deadline. Error: Timeout, too.
Result<SocketAddresses> resolve_by(const Endpoint& endpoint, TimePoint deadline);

/// The addresses (as numeric_host) of each name, or the names of each numeric address; all are asked at once.
/// Error of each: NotFound (the resolver's message), System, Timeout.
using ResolverAnswer = Result<std::vector<std::string>>;
std::vector<ResolverAnswer> addresses_of_all(const std::vector<std::string>& names, TimePoint deadline);
std::vector<ResolverAnswer> names_of_all(const std::vector<std::string>& addresses, TimePoint deadline);

/// The servers that the resolver asks, for messages: "10.0.0.53 and 10.0.0.54 (/etc/resolv.conf)".
std::string name_servers();

}  // namespace ddprun
