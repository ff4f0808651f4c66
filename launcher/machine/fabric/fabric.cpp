#include "launcher/machine/fabric/fabric.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/io/socket.h"
#include "env/text.h"

namespace ddprun {
namespace {

struct SettingRow {
    Fabric fabric;
    const char* name;
    const char* value;
    const char* reason;
};

/// Left out on purpose: NCCL_NET (the libfabric plug-in's name differs from version to version, and a wrong
/// one ends the job), NCCL_SHM_DISABLE (it costs speed inside the node), NCCL_TIMEOUT (no variable of NCCL's)
/// and CUDA_VISIBLE_DEVICES (set by the scheduler).
constexpr SettingRow kSettingRows[] = {
    {Fabric::Slingshot, "NCCL_SOCKET_IFNAME", "hsn",
     "sockets and NCCL's first contact go over hsn0 and its like, not over the management network"},
    {Fabric::Slingshot, "NCCL_IB_DISABLE", "1", "there is no InfiniBand to look for"},
    {Fabric::Slingshot, "NCCL_CROSS_NIC", "1",
     "rings may change network cards: the fabric is not built in rails"},
    {Fabric::Slingshot, "NCCL_NCHANNELS_PER_NET_PEER", "4", "more channels to each peer fill the link"},
    {Fabric::Slingshot, "NCCL_NET_GDR_LEVEL", "PHB",
     "GPUs use a network card on the same host bridge without a copy"},
    {Fabric::Slingshot, "FI_CXI_DISABLE_HOST_REGISTER", "1",
     "registering host memory with CUDA can deadlock"},
    {Fabric::Slingshot, "FI_CXI_OPTIMIZED_MRS", "false", "optimized memory regions are known to hang"},
    {Fabric::Slingshot, "FI_CXI_DEFAULT_CQ_SIZE", "131072",
     "large jobs overflow the default completion queue"},
    {Fabric::Slingshot, "FI_MR_CACHE_MONITOR", "userfaultfd",
     "the default monitor and CUDA's allocator disturb each other"},
    {Fabric::Efa, "FI_PROVIDER", "efa", "libfabric must not fall back to a slower provider in silence"},
    {Fabric::Efa, "FI_EFA_FORK_SAFE", "1", "data loaders fork"},
};

std::string joined_prefix(const std::vector<std::string>& names) {
    return fmt::format("={}", join(names, ","));
}

bool is_active(const FabricPort& port) { return port.state == "ACTIVE"; }
bool is_efa(const FabricPort& port) { return port.driver == "efa"; }
bool is_infiniband(const FabricPort& port) { return is_active(port) && port.layer == "InfiniBand"; }

std::vector<std::string> devices_where(const NetworkFacts& network, bool (*fits)(const FabricPort&)) {
    std::vector<std::string> devices;
    for (const FabricPort& port : network.ports) {
        if (fits(port) && (devices.empty() || devices.back() != port.device)) devices.push_back(port.device);
    }
    return devices;
}

std::vector<std::string> interfaces_where(const NetworkFacts& network, const auto& fits) {
    std::vector<std::string> names;
    for (const NetworkInterface& one : network.interfaces) {
        if (is_usable(one) && fits(one)) names.push_back(one.name);
    }
    return names;
}

std::vector<std::string> slingshot_parts(const NetworkFacts& network) {
    std::vector<std::string> parts = network.cxi_devices;
    for (const NetworkInterface& one : network.interfaces) {
        if (one.name.starts_with("hsn")) parts.push_back(one.name);
    }
    return parts;
}

Fabric found_fabric(const NetworkFacts& network) {
    if (has_slingshot(network)) return Fabric::Slingshot;
    if (!devices_where(network, is_efa).empty()) return Fabric::Efa;
    // RDMA over Ethernet is left to NCCL: many cloud machines show such ports on a network without RDMA.
    return devices_where(network, is_infiniband).empty() ? Fabric::Ethernet : Fabric::Infiniband;
}

std::vector<std::string> parts_of(Fabric fabric, const NetworkFacts& network) {
    switch (fabric) {
        case Fabric::Slingshot: return slingshot_parts(network);
        case Fabric::Efa: return devices_where(network, is_efa);
        case Fabric::Infiniband: return devices_where(network, is_infiniband);
        case Fabric::Ethernet:
            return interfaces_where(network, [](const NetworkInterface& one) { return !one.is_virtual; });
        case Fabric::None: break;
    }
    return {};
}

/// Names the InfiniBand devices beside RDMA over Ethernet: NCCL would use both, and the second is mostly a
/// storage or management network.
void add_infiniband(const NetworkFacts& network, std::vector<FabricSetting>& settings) {
    const std::vector<std::string> others = devices_where(
        network, [](const FabricPort& port) { return is_active(port) && !is_infiniband(port); });
    const std::vector<std::string> devices = devices_where(network, is_infiniband);
    if (others.empty() || devices.empty()) return;
    settings.push_back(
        {"NCCL_IB_HCA", joined_prefix(devices),
         fmt::format("{} carr{} no InfiniBand", join(others, ", "), others.size() == 1 ? "ies" : "y")});
}

/// Names the real interfaces: NCCL leaves out docker0 and lo by itself, but uses other bridges and tunnels.
void add_ethernet(const NetworkFacts& network, bool asked_for, std::vector<FabricSetting>& settings) {
    const std::vector<std::string> real =
        interfaces_where(network, [](const NetworkInterface& one) { return !one.is_virtual; });
    std::vector<std::string> virtual_ones = nccls_own_interfaces(network.interfaces);
    std::erase_if(virtual_ones, [&](const std::string& name) {
        return std::find(real.begin(), real.end(), name) != real.end();
    });
    if (!real.empty() && !virtual_ones.empty()) {
        settings.push_back({"NCCL_SOCKET_IFNAME", joined_prefix(real),
                            fmt::format("NCCL would also use {}, which other nodes cannot reach",
                                        join(virtual_ones, ", "))});
    }
    if (asked_for && !devices_where(network, is_active).empty()) {
        settings.push_back({"NCCL_IB_DISABLE", "1", "TCP was asked for although RDMA ports are active"});
    }
}

/// Names an interface to gloo, which otherwise sends the address of the host's own name to the other nodes.
void add_gloo(const NetworkFacts& network, std::vector<FabricSetting>& settings) {
    if (network.own_name_at.empty()) return;
    std::vector<std::string> names =
        interfaces_where(network, [](const NetworkInterface& one) { return one.name.starts_with("hsn"); });
    if (names.empty())
        names = interfaces_where(network, [](const NetworkInterface& one) { return !one.is_virtual; });
    if (names.empty()) names = nccls_own_interfaces(network.interfaces);
    if (names.empty()) return;
    settings.push_back(
        {"GLOO_SOCKET_IFNAME", names.front(),
         fmt::format("this host's own name is {} in /etc/hosts, which gloo would tell the other nodes",
                     network.own_name_at)});
}

}  // namespace

std::string_view name_of(Fabric fabric) {
    switch (fabric) {
        case Fabric::None: return "none";
        case Fabric::Ethernet: return "ethernet";
        case Fabric::Infiniband: return "ib";
        case Fabric::Efa: return "efa";
        case Fabric::Slingshot: return "slingshot";
    }
    return "";
}

bool wants_fabric(const JobSpec& spec) {
    if (spec.fabric) return *spec.fabric != Fabric::None;
    return spec.outer_rank ? spec.outer_rank->nodes > 1 : spec.nodes.max > 1;
}

bool has_slingshot(const NetworkFacts& network) { return !slingshot_parts(network).empty(); }

FabricProfile choose_fabric(const std::optional<Fabric>& wanted, const NetworkFacts& network) {
    FabricProfile profile;
    profile.fabric = wanted.value_or(found_fabric(network));
    profile.why =
        wanted ? fmt::format("--fabric {}", name_of(*wanted)) : join(parts_of(profile.fabric, network), ", ");
    for (const SettingRow& row : kSettingRows) {
        if (row.fabric == profile.fabric) profile.settings.push_back({row.name, row.value, row.reason});
    }
    if (profile.fabric == Fabric::Infiniband) add_infiniband(network, profile.settings);
    if (profile.fabric == Fabric::Ethernet) add_ethernet(network, wanted.has_value(), profile.settings);
    if (profile.fabric != Fabric::None) add_gloo(network, profile.settings);
    return profile;
}

void use_interface(FabricProfile& profile, const std::string& interface) {
    if (profile.fabric == Fabric::None) return;
    const bool keeps_nccl = profile.fabric == Fabric::Slingshot;
    std::erase_if(profile.settings, [&](const FabricSetting& one) {
        return one.name == "GLOO_SOCKET_IFNAME" || (one.name == "NCCL_SOCKET_IFNAME" && !keeps_nccl);
    });
    profile.settings.push_back({"GLOO_SOCKET_IFNAME", interface, "--iface"});
    if (!keeps_nccl) profile.settings.push_back({"NCCL_SOCKET_IFNAME", "=" + interface, "--iface"});
}

void reach_by(FabricProfile& profile, const std::vector<InterfaceAddress>& own, const std::string& reached,
              const std::vector<std::string>& by_name) {
    const auto interface_of = [&](const std::string& address) -> std::string {
        const auto found = std::ranges::find(own, address, &InterfaceAddress::address);
        return found == own.end() ? "" : found->interface;
    };
    const std::string interface = interface_of(reached);
    if (profile.fabric == Fabric::None || interface.empty() || stays_on_host(reached)) return;
    constexpr const char* kGloo = "GLOO_SOCKET_IFNAME";
    const auto set = std::ranges::find(profile.settings, kGloo, &FabricSetting::name);
    const bool is_set = set != profile.settings.end();
    if (is_set && (set->reason == "--iface" || set->value.starts_with("hsn"))) return;
    if (is_set) profile.settings.erase(set);
    // gloo takes the first address of the name that is one of this host's.
    std::string gloos;
    for (const std::string& address : by_name) {
        if (gloos.empty()) gloos = interface_of(address);
    }
    if (gloos == interface) return;
    profile.settings.push_back(
        {kGloo, interface,
         fmt::format("the other nodes reach this host at {}; by its own name gloo would {}", reached,
                     gloos.empty() ? "find no address of it" : "take " + gloos)});
}

std::vector<FabricSetting> unset_settings(const FabricProfile& profile, const EnvironmentLookup& inherited) {
    std::vector<FabricSetting> settings = profile.settings;
    std::erase_if(settings, [&](const FabricSetting& one) { return inherited(one.name).has_value(); });
    return settings;
}

std::string describe_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited) {
    std::string text(name_of(profile.fabric));
    if (!profile.why.empty()) text += fmt::format(" ({})", profile.why);
    std::vector<std::string> ours, users;
    for (const FabricSetting& one : profile.settings) {
        if (inherited(one.name)) users.push_back(one.name);
        else ours.push_back(one.name + "=" + one.value);
    }
    if (!ours.empty()) text += fmt::format(": {}", join(ours, " "));
    if (!users.empty())
        text += fmt::format("; as you set {}: {}", users.size() == 1 ? "it" : "them", join(users, " "));
    return text;
}

std::string render_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited) {
    std::string text(name_of(profile.fabric));
    if (!profile.why.empty()) text += fmt::format(" ({})", profile.why);
    text += profile.settings.empty() ? ", nothing to set\n" : "\n";
    for (const FabricSetting& one : profile.settings) {
        if (inherited(one.name)) text += fmt::format("  {}: as you set it\n", one.name);
        else text += fmt::format("  {}={}  ({})\n", one.name, one.value, one.reason);
    }
    return text;
}

FabricVerdict judge_fabrics(const std::vector<NodeFabric>& nodes, const std::string& own) {
    std::map<std::string, std::vector<std::string>> hosts;
    for (const NodeFabric& node : nodes) {
        if (!node.fabric.empty()) hosts[node.fabric].push_back(node.host);
    }
    if (hosts.empty()) return {};
    if (hosts.size() == 1) {
        const bool is_worth_it =
            hosts.begin()->first != name_of(Fabric::Ethernet) || own.find(": ") != std::string::npos;
        if (!is_worth_it || hosts.begin()->first == name_of(Fabric::None)) return {};
        return {false, fmt::format("fabric {}", own.empty() ? hosts.begin()->first : own)};
    }
    std::vector<std::string> parts;
    for (const auto& [fabric, names] : hosts) {
        constexpr std::size_t kNamed = 4;
        parts.push_back(fmt::format("{} on {}", fabric, join_first(names, kNamed)));
    }
    return {true,
            fmt::format(
                "the nodes' fabrics differ: {}; NCCL may find no way between them (--fabric NAME is the same "
                "for all)",
                join(parts, "; "))};
}

namespace {

/// Judges by the network's name, which for the libfabric plug-in differs from version to version.
bool is_of(Fabric fabric, std::string_view network) {
    const std::string name = lower(network);
    switch (fabric) {
        case Fabric::Slingshot:
        case Fabric::Efa:
            return name.find("libfabric") != std::string::npos || name.find("ofi") != std::string::npos;
        case Fabric::Infiniband: return name != "socket";  // "IB", "IBext_v8", "UCX", "SHARP"
        case Fabric::Ethernet:
        case Fabric::None: break;
    }
    return true;
}

const char* remedy_for(Fabric fabric) {
    if (fabric == Fabric::Infiniband) return "is libibverbs installed, and NCCL_IB_DISABLE not set?";
    return "is the libfabric plug-in (aws-ofi-nccl) in LD_LIBRARY_PATH?";
}

}  // namespace

bool asks_for_network(const FabricProfile& profile, const EnvironmentLookup& inherited) {
    if (profile.fabric == Fabric::None || profile.fabric == Fabric::Ethernet) return false;
    return !inherited("NCCL_DEBUG") && !inherited("NCCL_DEBUG_FILE") && !inherited("NCCL_DEBUG_SUBSYS");
}

std::optional<std::string> network_in(std::string_view line) {
    constexpr std::string_view kWords = "NCCL INFO Using network ";
    const std::size_t at = line.find(kWords);
    if (at == std::string_view::npos) return std::nullopt;
    const std::string_view name = trim(line.substr(at + kWords.size()));
    return name.empty() ? std::nullopt : std::optional(std::string(name));
}

TransportVerdict judge_transport(Fabric fabric, std::string_view network) {
    const std::string name = excerpt(network);
    if (is_of(fabric, network)) return {true, fmt::format("NCCL uses the network {}", name)};
    return {false, fmt::format("NCCL uses the network {}, not the node's fabric ({}), and is slow for it: {}",
                               name, name_of(fabric), remedy_for(fabric))};
}

}  // namespace ddprun
