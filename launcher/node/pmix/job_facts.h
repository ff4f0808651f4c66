#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "env/result.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// A node of the world, in the order of group ranks.
struct PmixNode {
    std::string host;
    int workers = 0;
    bool operator==(const PmixNode&) const = default;
};

/// Encodes the nodes for World::nodes.
std::string encode_nodes(const std::vector<PmixNode>& nodes);
/// Error: Protocol.
Result<std::vector<PmixNode>> decode_nodes(std::string_view text);

/// A rank, which PMIx distinguishes from other integers.
struct PmixRank {
    std::uint32_t rank;
    bool operator==(const PmixRank&) const = default;
};
using PmixValue = std::variant<std::uint32_t, std::uint16_t, PmixRank, std::string, bool>;
struct PmixFact {
    std::string_view key;
    PmixValue value;
    bool operator==(const PmixFact&) const = default;
};

/// The keys that Open MPI 4.1 asks for and other servers have, as in pmix_common.h (server.cpp compares).
namespace pmix_key {
inline constexpr std::string_view kJobId = "pmix.jobid";
inline constexpr std::string_view kJobSize = "pmix.job.size";
inline constexpr std::string_view kUniverseSize = "pmix.univ.size";
inline constexpr std::string_view kMaxProcs = "pmix.max.size";
inline constexpr std::string_view kJobApps = "pmix.job.napps";
inline constexpr std::string_view kNodes = "pmix.num.nodes";
inline constexpr std::string_view kNodeMap = "pmix.nmap";
inline constexpr std::string_view kProcMap = "pmix.pmap";
inline constexpr std::string_view kLocalSize = "pmix.local.size";
inline constexpr std::string_view kNodeSize = "pmix.node.size";
inline constexpr std::string_view kLocalPeers = "pmix.lpeers";
inline constexpr std::string_view kLocalLeader = "pmix.lldr";
inline constexpr std::string_view kTopDirectory = "pmix.tmpdir";
inline constexpr std::string_view kJobDirectory = "pmix.nsdir";
inline constexpr std::string_view kCleansDirectories = "pmix.tdir.rmclean";
inline constexpr std::string_view kRank = "pmix.rank";
inline constexpr std::string_view kGlobalRank = "pmix.grank";
inline constexpr std::string_view kLocalRank = "pmix.lrank";
inline constexpr std::string_view kNodeRank = "pmix.nrank";
inline constexpr std::string_view kNodeId = "pmix.nodeid";
inline constexpr std::string_view kHostName = "pmix.hname";
inline constexpr std::string_view kAppNumber = "pmix.appnum";
inline constexpr std::string_view kReincarnation = "pmix.reinc";
}  // namespace pmix_key

/// The data with which a generation's namespace is registered.
struct PmixJob {
    std::string name_space;                    ///< a new one for each generation
    std::vector<PmixFact> facts;               ///< of the job and of this node
    std::vector<std::vector<PmixFact>> ranks;  ///< by rank, of all nodes
};

/// The world as this node's server shows it. When two agents share a host, the other node's name gets its
/// group rank as a suffix. `directory` is for MPI's files. Error: Protocol when `order` and `nodes` do not
/// fit.
Result<PmixJob> describe_job(const rdzv::StartGeneration& order, const std::vector<PmixNode>& nodes,
                             const std::string& job_name, const std::string& directory);

}  // namespace ddprun
