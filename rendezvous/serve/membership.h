#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/serve/store.h"

namespace ddprun::rdzv {

/// Names an agent for as long as its session lives. Never used again.
using AgentId = ClientId;

/// A node's values of the settings on which all nodes must agree: "name=value", in the order in which they
/// are shown.
using Terms = std::vector<std::string>;

struct MembershipSpec {
    int min_nodes = 1;
    int max_nodes = 1;
    Duration join_timeout = std::chrono::seconds(600);
    Duration last_call = std::chrono::seconds(30);  ///< the wait for more nodes once min_nodes have joined
    Terms terms = {};                               ///< every node must agree with them; empty: not checked
    bool awaits_head = false;                       ///< forms no world without the node that `is_head`
    std::string head = {};                          ///< the host that `terms` come from
    std::vector<std::string> hosts = {};            ///< the expected hosts by node rank, where known
};

/// An agent that wants to be part of the job.
struct Joiner {
    std::string host;
    int pid = 0;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;
    std::string role = "default";
    Terms terms = {};
    std::optional<int> kept_place = {};  ///< the place that it had under a lost controller
    bool is_head = false;                ///< on the controller's host, which holds the first rank's port
};

/// Whether the world can be formed. `why` explains it, above all for Wait. Only a Failed verdict names the
/// missing nodes; else call missing_ranks(), which is slower.
struct Verdict {
    enum Kind : std::uint8_t { Wait, Ready, Failed } kind = Wait;
    std::string why;
};

/// Which nodes form the next generation, and in which order. Pure.
///
/// In the first world, nodes that ask for no place are sorted by host name ("node2" before "node10"), and
/// nodes of the same host by arrival, so that ranks are the same in every run. The head asks for the first
/// place.
///
/// After that a node keeps its place from one generation to the next. The place of a lost node goes to the
/// agent that comes back from the same host, else to a node that waits. Group ranks number the occupied
/// places in order: while a place is empty (fewer than max_nodes), the nodes after it move up. A node that
/// asks for an occupied place, or for one beyond max_nodes, waits like any spare.
///
/// join, leave and decide take constant time (but for places of lost nodes), because all nodes of a large job
/// join at once, and decide() is called for each of them.
class Membership {
  public:
    Membership(MembershipSpec spec, TimePoint now) : spec_(std::move(spec)), opened_(now) {}

    /// Error: InvalidArgument (a negative node rank, no slots), Mismatch (another present node has asked for
    /// the same node rank, and is not a node of the settled world on the same host: the error names both; or
    /// the terms differ: the error has a table of them).
    Status join(AgentId agent, Joiner joiner, TimePoint now);
    /// Removes an agent that is gone. Unknown agents are ignored.
    void leave(AgentId agent, TimePoint now);

    [[nodiscard]] Verdict decide(TimePoint now) const;
    /// The time at which decide() may change without a join or leave.
    [[nodiscard]] TimePoint next_change(TimePoint now) const;
    /// "; missing: node02, node03" when the hosts are known, else "; missing: node rank 1, 3"; "" when no
    /// node has a place yet or none is missing. Goes through all places.
    [[nodiscard]] std::string missing_ranks() const;

    struct Member {
        AgentId agent;
        Joiner joiner;
        int place = 0;  ///< set in the members that settle() returns
        bool operator==(const Member& other) const { return agent == other.agent; }
    };
    /// Forms the world after a Ready verdict and returns its nodes by group rank. They keep their places.
    std::vector<Member> settle();
    /// Starts a new round, which waits for nodes for up to `timeout`. When enough nodes are present they go
    /// on without a last call: a node that comes later makes the world form again.
    void reopen(TimePoint now, Duration timeout);

    [[nodiscard]] int joined() const { return static_cast<int>(members_.size()); }
    [[nodiscard]] bool contains(AgentId agent) const { return arrivals_.contains(agent); }
    [[nodiscard]] bool has_enough() const;
    /// True when min_nodes would still be there if one node left.
    [[nodiscard]] bool can_spare_one() const { return joined() > spec_.min_nodes; }
    /// How many waiting nodes would be part of a world formed now.
    [[nodiscard]] int admissible() const;
    /// Agents that are not part of the settled world. Goes through all of them.
    [[nodiscard]] std::vector<AgentId> spares() const;

  private:
    struct Entry {
        Member member;
        std::optional<int> place;  ///< the place asked for, or kept from the last generation
        bool settled = false;
    };
    using Arrival = std::uint64_t;
    std::optional<Error> refuse_twin(const Joiner& joiner) const;
    void claim(Entry& entry, std::optional<int> place);
    void note_enough(TimePoint now);

    MembershipSpec spec_;
    TimePoint opened_;
    std::optional<TimePoint> last_call_ends_;  ///< nullopt while has_enough() is false
    int settled_ = 0;                          ///< number of settled members
    bool has_head_ = false;
    Arrival next_arrival_ = 0;
    std::map<Arrival, Entry> members_;
    std::unordered_map<AgentId, Arrival> arrivals_;
    std::unordered_map<int, Arrival> asked_;  ///< the node that asked for this node rank last
    std::unordered_map<int, int> claims_;     ///< the number of nodes with this place, never 0
    std::map<int, std::string> holes_;        ///< places of lost nodes, with the node's host
};

/// The host, slots and role of one node of the world.
struct NodeSlots {
    std::string host;
    int slots = 0;
    std::string role = "default";
    bool operator==(const NodeSlots&) const = default;
};

/// The ranks of a node's workers.
struct NodeRanks {
    int group_rank = 0;
    int first_rank = 0;
    int local_world_size = 0;
    int role_first_rank = 0;  ///< rank of local rank 0 among the workers of the same role
    int role_world_size = 0;
    bool operator==(const NodeRanks&) const = default;
};

/// The ranks of one worker.
struct WorkerRanks {
    int rank = 0;
    int local_rank = 0;
    int group_rank = 0;
    int role_rank = 0;
    bool operator==(const WorkerRanks&) const = default;
};

/// The ranks of all workers, as prefix sums over the nodes in group-rank order: one row per node.
class RankTable {
  public:
    /// Error: InvalidArgument, for a node without workers (named), or for too many workers in all.
    static Result<RankTable> from(std::vector<NodeSlots> nodes);

    [[nodiscard]] int world_size() const { return world_size_; }
    [[nodiscard]] int nodes() const { return static_cast<int>(rows_.size()); }
    /// 0 <= group_rank < nodes().
    [[nodiscard]] const NodeRanks& node(int group_rank) const {
        return rows_[static_cast<std::size_t>(group_rank)];
    }
    [[nodiscard]] const std::string& host(int group_rank) const {
        return hosts_[static_cast<std::size_t>(group_rank)];
    }
    /// 0 <= rank < world_size().
    [[nodiscard]] WorkerRanks worker(int rank) const;

  private:
    std::vector<NodeRanks> rows_;
    std::vector<std::string> hosts_;
    int world_size_ = 0;
};

}  // namespace ddprun::rdzv
