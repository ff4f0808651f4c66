#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/nodes/meeting_point.h"
#include "env/worker_env.h"
#include "launcher/machine/fabric/network.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// A variable for NCCL or libfabric, and the reason for its value.
struct FabricSetting {
    std::string name;
    std::string value;
    std::string reason;
    bool operator==(const FabricSetting&) const = default;
};

/// The network between this node and the others, and the settings for it.
struct FabricProfile {
    Fabric fabric = Fabric::None;
    std::string why;                      ///< "cxi0, hsn0", "--fabric ib"
    std::vector<FabricSetting> settings;  ///< used unless the user has set the variable: unset_settings
};

/// "slingshot", "ib", "efa", "ethernet" or "none", as in the option.
std::string_view name_of(Fabric fabric);
/// True when the job needs a profile: it has several nodes, or the user names a fabric.
bool wants_fabric(const JobSpec& spec);

/// True when the node has a cxi device, or an interface hsn<N>.
bool has_slingshot(const NetworkFacts& network);
/// The profile of `wanted`, else of the first fabric that the node has: Slingshot, EFA, InfiniBand; else
/// Ethernet. Pure.
FabricProfile choose_fabric(const std::optional<Fabric>& wanted, const NetworkFacts& network);

/// Makes gloo and NCCL's sockets use the interface of --iface, too, unless the fabric names one for NCCL.
/// Pure.
void use_interface(FabricProfile& profile, const std::string& interface);

/// Makes gloo use the interface of `reached`, this host's address that the other nodes use, unless gloo finds
/// it by this host's own name (`by_name`, its addresses in the resolver's order) or --iface or Slingshot has
/// named one. `own` are this host's addresses. Does nothing for an address that is not one of them. Pure.
void reach_by(FabricProfile& profile, const std::vector<InterfaceAddress>& own, const std::string& reached,
              const std::vector<std::string>& by_name);

/// The settings whose variable is not set. A value of the user's stays, even an empty one.
std::vector<FabricSetting> unset_settings(const FabricProfile& profile, const EnvironmentLookup& inherited);
/// "slingshot (cxi0, hsn0): NCCL_CROSS_NIC=1 ...; as you set it: NCCL_SOCKET_IFNAME"; the name alone when
/// there are no settings.
std::string describe_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// One line for each variable, with its reason; ends with a newline.
std::string render_fabric(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// The fabric of one node of the job, which it sent when it joined.
struct NodeFabric {
    std::string host;
    std::string fabric;  ///< "" not sent
};
/// The head's log line about the fabrics of all nodes at the start.
struct FabricVerdict {
    bool differs = false;
    std::string line;  ///< "" none
};
/// `own` is the head's describe_fabric. Nodes that differ are named with their fabric, because NCCL finds no
/// way between two fabrics. Ethernet everywhere without settings gives no line.
FabricVerdict judge_fabrics(const std::vector<NodeFabric>& nodes, const std::string& own);

/// True when NCCL's log is read for its network: on a fabric other than Ethernet, unless the user directs
/// that log (NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_DEBUG_SUBSYS).
bool asks_for_network(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// "AWS Libfabric" in "node:1:2 [0] NCCL INFO Using network AWS Libfabric"; nullopt: the line is about
/// something else.
std::optional<std::string> network_in(std::string_view line);

struct TransportVerdict {
    bool as_meant = true;
    std::string line;
};
/// Judges whether NCCL took the fabric's network.
TransportVerdict judge_transport(Fabric fabric, std::string_view network);

}  // namespace ddprun
