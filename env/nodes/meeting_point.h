#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/io/socket.h"
#include "env/result.h"

namespace ddprun {

/// The endpoint at which the processes of a job meet, and their secret.
struct MeetingPoint {
    std::string job;    ///< id of the job
    std::string token;  ///< hexadecimal
    std::uint16_t port = 0;
    std::vector<std::string> addresses;  ///< numeric, of the listening host, best first
    bool operator==(const MeetingPoint&) const = default;
    /// One endpoint per address.
    [[nodiscard]] std::vector<Endpoint> endpoints() const;
};

/// Encodes it as one word for an Exchange, with as many addresses as fit. Never show the word: it holds the
/// secret.
std::string encode(const MeetingPoint& point);
/// Error: Protocol.
Result<MeetingPoint> decode_meeting_point(std::string_view word);

/// An address of one of this host's interfaces.
struct InterfaceAddress {
    std::string interface;
    std::string address;
    bool is_loopback = false;
    bool is_up = true;
};

/// The addresses by which other hosts can reach this one, best first: no loopback (unless there is nothing
/// else: then all others are on this host too), no link-local addresses, no bridges of containers and virtual
/// machines. `wish` is as NCCL_SOCKET_IFNAME: interfaces that it names ("ib,eth0", "=eth0") come first, those
/// that it excludes ("^docker") are left out. Pure.
std::vector<std::string> reachable_addresses(const std::vector<InterfaceAddress>& all, std::string_view wish);
/// This host's one address for the job. `iface` is an interface's name ("ib0"), a network ("10.1.0.0/16",
/// "fd77::/64") or an address; of several matches IPv4 comes first, then the order of `all`. Interfaces that
/// are down and link-local addresses do not count. Pure. Error: NotFound, with the addresses that exist;
/// InvalidArgument (a malformed network).
Result<std::string> address_on(std::string_view iface, const std::vector<InterfaceAddress>& all);
/// Reads this host's interfaces.
std::vector<InterfaceAddress> list_interfaces();

/// A unique name for this host: its own, and the kernel's boot id if there is one. A word for an Exchange.
std::string host_identity();

}  // namespace ddprun
