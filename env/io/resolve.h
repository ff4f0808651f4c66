#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/result.h"

/// The system's resolver has no deadline of its own: a name server that does not answer holds a caller for 10
/// s a name and more. So names are looked up by a BackgroundCall.
namespace ddprun {

/// So long ddprun waits for the resolver before it goes on without the answer.
inline constexpr Duration kResolverPatience = std::chrono::seconds(5);

/// Where a TCP socket can be bound or connected to.
struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
using SocketAddresses = std::vector<SocketAddress>;

/// The addresses of a name, with the port. `flags` are getaddrinfo's; without AI_NUMERICHOST a name blocks as
/// long as the resolver does. Error: NotFound (the resolver's own sentence), System.
Result<SocketAddresses> resolve(const Endpoint& endpoint, int flags);
/// The same by a deadline. Error: Timeout, too.
Result<SocketAddresses> resolve_by(const Endpoint& endpoint, TimePoint deadline);

/// Of each name the addresses (as numeric_host), of each numeric address the names, as the resolver knows
/// them; all asked at once. Error of each: NotFound (the resolver's own sentence), System, Timeout.
using ResolverAnswer = Result<std::vector<std::string>>;
std::vector<ResolverAnswer> addresses_of_all(const std::vector<std::string>& names, TimePoint deadline);
std::vector<ResolverAnswer> names_of_all(const std::vector<std::string>& addresses, TimePoint deadline);

/// The servers that the resolver asks, for messages: "10.0.0.53 and 10.0.0.54 (/etc/resolv.conf)".
std::string name_servers();

}  // namespace ddprun
