#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/io/socket.h"
#include "env/result.h"

namespace ddprun {

/// Where the processes of a job meet, and the secret by which they know each other.
struct MeetingPoint {
    std::string job;    ///< id of the job
    std::string token;  ///< hexadecimal
    std::uint16_t port = 0;
    std::vector<std::string> addresses;  ///< numeric, of the host that listens, the most promising first
    bool operator==(const MeetingPoint&) const = default;
    /// One endpoint per address.
    [[nodiscard]] std::vector<Endpoint> endpoints() const;
};

/// One word for an Exchange, with as many addresses as fit in; not to be shown to anybody: it holds the
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

/// Pure: those by which other hosts can reach this one, the most promising first: no loopback (unless there
/// is nothing else: then all others are on this host too), no link-local, no bridges of containers and
/// virtual machines. `wish` is as NCCL_SOCKET_IFNAME: what it names comes first ("ib,eth0", "=eth0"), what it
/// excludes ("^docker") does not come.
std::vector<std::string> reachable_addresses(const std::vector<InterfaceAddress>& all, std::string_view wish);
/// Pure: this host's one address for the job. `iface` is an interface's name ("ib0"), a network
/// ("10.1.0.0/16", "fd77::/64") or an address; of several that fit IPv4 comes first, then the order of `all`.
/// Not what is down, and nothing link-local. Error: NotFound, with what there is; InvalidArgument (a network
/// that is none).
Result<std::string> address_on(std::string_view iface, const std::vector<InterfaceAddress>& all);
/// Thin.
std::vector<InterfaceAddress> list_interfaces();

/// A name for this host that no other has: its own, and the kernel's boot id where there is one. A word for
/// an Exchange.
std::string host_identity();

}  // namespace ddprun
