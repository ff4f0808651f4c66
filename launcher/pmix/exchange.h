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
#include "rendezvous/agent_message.h"
#include "rendezvous/membership.h"

namespace ddprun {

/// The ranks of "0-3, 5", as the first and the last of each range, ascending. Error: InvalidArgument.
using RankRanges = std::vector<std::pair<int, int>>;
Result<RankRanges> parse_rank_ranges(std::string_view text);

/// The head's part in what workers exchange through PMIx: which nodes a fence still waits for, when it is
/// complete, who is asked what a rank has put. Nothing waits for what cannot come any more: not for a worker
/// that has ended, a node that is lost or a generation that is over.
///
/// Pure: takes what arrives and returns what is to be sent. How long workers are willing to wait they tell
/// their own server, so there is no clock.
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

    /// What was open belongs to a generation that is over: its agents end that themselves. The World to be
    /// sent to each.
    Messages begin(const std::string& job, std::uint64_t generation, std::vector<Node> nodes);

    Messages entered(rdzv::AgentId agent, const rdzv::FenceEntered& fence);
    Messages asked(rdzv::AgentId agent, const rdzv::ModexRequest& request);
    Messages answered(rdzv::AgentId agent, const rdzv::ModexReply& reply);
    /// A worker that has ended enters no fence and puts nothing.
    Messages rank_ended(std::uint64_t generation, int rank);
    Messages node_lost(rdzv::AgentId agent);

    /// "node01 (ranks 2-3)": the nodes that an open fence waits for; "" there is no such fence.
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
    Messages end_what_waits(const std::function<bool(const Modex&)>& is_in_vain);

    std::uint64_t generation_ = 0;
    std::vector<Node> nodes_;  ///< by group rank
    std::set<rdzv::AgentId> lost_;
    std::set<int> ended_;
    std::map<std::string, Fence> fences_;  ///< by the ranks that take part
    std::map<std::uint64_t, Modex> modexes_;
    std::uint64_t next_number_ = 1;
};

}  // namespace ddprun
