#include "launcher/machine/fabric/transport.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddprun {
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
