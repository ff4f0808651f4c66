#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

struct NetworkInterface {
    std::string name;
    bool up = false;
    bool loopback = false;
    bool is_virtual = false;  ///< no device behind it: bridges, tunnels, containers' ends
    std::vector<std::string> addresses;
    std::optional<int> megabits;
    int mtu = 0;
};
/// Whether a job could use it: up, not the loopback, with an address.
[[nodiscard]] bool is_usable(const NetworkInterface& one);

struct FabricPort {
    std::string device;  ///< "mlx5_0"
    int port = 1;
    std::string state;        ///< "ACTIVE"
    std::string rate;         ///< "400 Gb/sec (4X NDR)"
    std::string layer;        ///< "InfiniBand", "Ethernet", "Unspecified"
    std::string driver = {};  ///< "mlx5_core", "efa"; "" not known
};

/// What connects this node with others.
struct NetworkFacts {
    std::vector<NetworkInterface> interfaces;
    std::vector<FabricPort> ports;         ///< RDMA devices
    std::vector<std::string> cxi_devices;  ///< Slingshot's: "cxi0"
    std::string own_name_at =
        {};  ///< the loopback address of this host's own name in /etc/hosts, as Debian writes it; "" none
};

/// Looks at this node; some milliseconds. Nothing fails: what cannot be read stays at its default.
NetworkFacts look_at_network();
/// The RDMA ports and cxi devices of a /sys tree ("/sys"; another root in tests).
void read_fabric_devices(const std::string& sys, NetworkFacts& facts);

/// The address of `name` in the text of a hosts file, where the first line that has it is a loopback's; else
/// "". Pure.
std::string loopback_of_name(std::string_view hosts, std::string_view name);

/// What NCCL takes for its sockets when nobody says, as far as is documented: ib*, then any but docker*,
/// virbr* and lo, then docker*, then lo.
std::vector<std::string> nccls_own_interfaces(const std::vector<NetworkInterface>& interfaces);

}  // namespace ddprun
