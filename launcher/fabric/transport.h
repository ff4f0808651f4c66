#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/worker_env.h"
#include "launcher/fabric/fabric.h"

namespace ddprun {

/// Whether NCCL is to be asked which network it has taken: on a fabric that is not Ethernet, where the user
/// has not given NCCL's own words a place or a level (NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_DEBUG_SUBSYS).
bool asks_for_network(const FabricProfile& profile, const EnvironmentLookup& inherited);

/// "AWS Libfabric" of "node:1:2 [0] NCCL INFO Using network AWS Libfabric"; nullopt: the line says something
/// else.
std::optional<std::string> network_in(std::string_view line);

struct TransportVerdict {
    bool as_meant = true;
    std::string line;
};
/// Whether NCCL took the network that the fabric is there for.
TransportVerdict judge_transport(Fabric fabric, std::string_view network);

}  // namespace ddprun
