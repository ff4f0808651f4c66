#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/result.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// The first and the last rank of each range of "0-3, 5", ascending.
using RankRanges = std::vector<std::pair<int, int>>;
/// Error: InvalidArgument.
Result<RankRanges> parse_rank_ranges(std::string_view text);

/// The head's part of the workers' exchange through PMIx: decides which nodes a fence still waits for, when
/// it is complete, and which node answers for a rank. Nothing waits for a worker that has ended, a node that
/// is lost or a generation that is over.
///
/// Pure: takes messages and returns messages. The workers' own servers have their timeouts, so there is no
/// clock.
class PmixExchange {
  public:
    struct Node {
        rdzv::AgentId agent = 0;
        std::string host;
        int first_rank = 0;
        int workers = 0;
    };
    struct Outgoing {
        rdzv::AgentId agent;
        rdzv::ToAgent message;
    };
    using Messages = std::vector<Outgoing>;

    /// Begins a generation and forgets the last one's open requests, which its agents end themselves. Returns
    /// the World for each node.
    Messages begin(const std::string& job, std::uint64_t generation, std::vector<Node> nodes);

    Messages entered(rdzv::AgentId agent, const rdzv::FenceEntered& fence);
    Messages asked(rdzv::AgentId agent, const rdzv::ModexRequest& request);
    Messages answered(rdzv::AgentId agent, const rdzv::ModexReply& reply);
    /// Call it when a worker has ended: it enters no fence and puts no value any more.
    Messages rank_ended(std::uint64_t generation, int rank);
    Messages node_lost(rdzv::AgentId agent);

    /// The nodes that an open fence waits for, as "node01 (ranks 2-3)"; "" no such fence is open.
    [[nodiscard]] std::string missing(const std::string& ranks) const;

  private:
    struct Fence {
        RankRanges ranges;
        std::map<std::size_t, rdzv::Blob> parts;  ///< by the node's place in nodes_
        std::set<std::size_t> awaited;
    };
    struct Modex {
        rdzv::AgentId asker;
        std::uint64_t number;  ///< the asker's
        rdzv::AgentId owner;
        int rank;
    };

    [[nodiscard]] const Node* node_of(rdzv::AgentId agent) const;
    [[nodiscard]] const Node* node_with(int rank) const;
    [[nodiscard]] std::string why_never(const Fence& fence) const;
    Messages close(const std::string& ranks, const std::string& failure);
    Messages end_lost(const std::function<bool(const Modex&)>& is_lost);

    std::uint64_t generation_ = 0;
    std::vector<Node> nodes_;  ///< by group rank
    std::set<rdzv::AgentId> lost_;
    std::set<int> ended_;
    std::map<std::string, Fence> fences_;  ///< by the ranks that take part
    std::map<std::uint64_t, Modex> modexes_;
    std::uint64_t next_number_ = 1;
};

}  // namespace ddprun
