#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/worker_env.h"
#include "launcher/fabric/network.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// A variable for NCCL or libfabric, and why it is set so.
struct FabricSetting {
    std::string name;
    std::string value;
    std::string reason;
    bool operator==(const FabricSetting&) const = default;
};

/// What connects this node with the others, and the settings that follow from it.
struct FabricProfile {
    Fabric fabric = Fabric::None;
    std::string why;                      ///< "cxi0, hsn0", "--fabric ib"
    std::vector<FabricSetting> settings;  ///< for what the user has not set himself: see unset_settings
};

/// "slingshot", "ib", "efa", "ethernet", "none": the option's words.
std::string_view name_of(Fabric fabric);
/// Whether the profile matters to the job: it has several nodes, or the user names one.
bool wants_fabric(const JobSpec& spec);

/// A cxi device, or an interface hsn<N>.
bool has_slingshot(const NetworkFacts& network);
/// `wanted`, else by what the node has: Slingshot, EFA, InfiniBand, in this order; else Ethernet. Pure.
FabricProfile choose_fabric(const std::optional<Fabric>& wanted, const NetworkFacts& network);

/// With --iface: gloo's and NCCL's sockets go over that interface, too, unless the fabric has one of its own
/// for NCCL. Pure.
void use_interface(FabricProfile& profile, const std::string& interface);

/// The settings whose variable is not set: what the user set stands, also where it is empty.
std::vector<FabricSetting> unset_settings(const FabricProfile& profile, const EnvironmentLookup& inherited);
/// "slingshot (cxi0, hsn0): NCCL_CROSS_NIC=1 ...; as you set it: NCCL_SOCKET_IFNAME". Without what follows
/// the name where there is nothing to set.
std::string describe_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// The same with the reasons, a line for each variable; ends with a newline.
std::string render_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// The fabric of one node of the job, as it said it when it joined.
struct NodeFabric {
    std::string host;
    std::string fabric;  ///< "" it did not say
};
/// What the head says of all nodes at the start.
struct FabricVerdict {
    bool differs = false;
    std::string line;  ///< "" nothing to say
};
/// `own`: the head's describe_fabric. Nodes that differ are named with theirs: NCCL finds no way between two
/// fabrics. Ethernet everywhere with nothing to set is not worth a line.
FabricVerdict judge_fabrics(const std::vector<NodeFabric>& nodes, const std::string& own);

}  // namespace ddprun
