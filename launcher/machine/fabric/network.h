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
    bool is_virtual = false;  ///< without a device: a bridge, a tunnel, a container's end
    std::vector<std::string> addresses;
    std::optional<int> megabits;
    int mtu = 0;
};
/// True when a job can use the interface: up, not the loopback, with an address.
[[nodiscard]] bool is_usable(const NetworkInterface& one);

struct FabricPort {
    std::string device;  ///< "mlx5_0"
    int port = 1;
    std::string state;        ///< "ACTIVE"
    std::string rate;         ///< "400 Gb/sec (4X NDR)"
    std::string layer;        ///< "InfiniBand", "Ethernet", "Unspecified"
    std::string driver = {};  ///< "mlx5_core", "efa"; "" not known
};

/// The network devices of this node.
struct NetworkFacts {
    std::vector<NetworkInterface> interfaces;
    std::vector<FabricPort> ports;         ///< RDMA devices
    std::vector<std::string> cxi_devices;  ///< Slingshot's: "cxi0"
    /// The loopback address of this host's own name in /etc/hosts, as Debian writes it; "" none.
    std::string own_name_at = {};
};

/// Reads this node's network, which takes some milliseconds. Never fails: facts that cannot be read keep
/// their defaults.
NetworkFacts detect_network();
/// The RDMA ports and cxi devices of a /sys tree ("/sys"; another root in tests).
void read_fabric_devices(const std::string& sys, NetworkFacts& facts);

/// The address of `name` in the text of a hosts file, if the first line with the name is of the loopback;
/// else
/// "". Pure.
std::string loopback_of_name(std::string_view hosts, std::string_view name);

/// The interfaces that NCCL by its documentation takes for its sockets by default: ib*, else any but docker*,
/// virbr* and lo, else docker*, else lo.
std::vector<std::string> nccls_own_interfaces(const std::vector<NetworkInterface>& interfaces);

}  // namespace ddprun
