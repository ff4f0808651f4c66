#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/worker_env.h"
#include "launcher/machine/fabric/fabric.h"

namespace ddprun {

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
