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

/// An agent's connection, for as long as it lives. Never used again.
using AgentId = ClientId;

/// What a node says of everything on which the nodes of a job must agree: "name=value", in the order in which
/// it is shown.
using Terms = std::vector<std::string>;

struct MembershipSpec {
    int min_nodes = 1;
    int max_nodes = 1;
    Duration join_timeout = std::chrono::seconds(600);
    Duration last_call = std::chrono::seconds(30);  ///< from min_nodes on, how long more nodes are waited for
    Terms terms = {};                               ///< with which every node must agree; none: not checked
    bool awaits_head = false;                       ///< no world without the node that `is_head`
    std::string head = {};                          ///< the host whose terms those are
    std::vector<std::string> hosts = {};            ///< by node rank, where it is known who is to come
};

/// An agent that wants to be part of the job.
struct Joiner {
    std::string host;
    int pid = 0;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;
    std::string role = "default";
    Terms terms = {};
    std::optional<int> kept_place = {};  ///< it had under a controller that is lost
    bool is_head = false;                ///< beside the controller: the first rank's port is held there
};

/// Whether the world can be formed. `why` explains, also (above all) "not yet"; who is missing is said with a
/// failure, and else by missing_ranks(), which takes its time.
struct Verdict {
    enum Kind : std::uint8_t { Wait, Ready, Failed } kind = Wait;
    std::string why;
};

/// Which nodes form the next generation, and in which order. Pure.
///
/// In the first world the nodes that ask for no place stand in the order of their host names (numbers as
/// numbers, those of one host by arrival), whoever comes first: ranks are the same in every run. The head
/// asks for the first place.
///
/// From then on places stick: a node keeps its place from one generation to the next, whoever else comes.
/// That of a node which has gone is taken by the agent that comes back from the same host, else by who waits.
/// Group ranks number the places that are taken, in their order: where one stays empty (fewer than
/// max_nodes), the nodes behind it move up, and back when it is taken again. Who asks for a place that is
/// taken, or beyond max_nodes, waits as any spare.
///
/// join, leave and decide take the same time however many nodes there are (but for places of lost nodes): all
/// of a large job's nodes join at once, and each of them is decided about.
class Membership {
  public:
    Membership(MembershipSpec spec, TimePoint now) : spec_(std::move(spec)), opened_(now) {}

    /// Error: InvalidArgument (a negative node rank, no slots), Mismatch (another node that is there has
    /// asked for the same node rank, naming both; other terms than the job's: with a table of lines of what
    /// differs).
    Status join(AgentId agent, Joiner joiner, TimePoint now);
    /// The agent is gone. Unknown agents are ignored.
    void leave(AgentId agent, TimePoint now);

    [[nodiscard]] Verdict decide(TimePoint now) const;
    /// When decide() may change its mind without anybody joining or leaving.
    [[nodiscard]] TimePoint next_change(TimePoint now) const;
    /// "; missing: node02, node03" by name where the hosts are known, "; missing: node rank 1, 3" where nodes
    /// have asked for ranks, else "". Goes through all places.
    [[nodiscard]] std::string missing_ranks() const;

    struct Member {
        AgentId agent;
        Joiner joiner;
        int place = 0;  ///< of one of the world
        bool operator==(const Member& other) const { return agent == other.agent; }
    };
    /// Forms the world of a Ready verdict: its nodes by group rank. They keep these ranks from now on.
    std::vector<Member> settle();
    /// Starts a new round: nodes are waited for up to `timeout` from now. Those who are there go on without a
    /// last call where they are enough: who comes later makes the world form again.
    void reopen(TimePoint now, Duration timeout);

    [[nodiscard]] int joined() const { return static_cast<int>(members_.size()); }
    [[nodiscard]] bool contains(AgentId agent) const { return arrivals_.contains(agent); }
    [[nodiscard]] bool has_enough() const;
    /// Whether there would still be enough without one of those who have joined.
    [[nodiscard]] bool can_spare_one() const { return joined() > spec_.min_nodes; }
    /// How many of those who wait would be part of a world that is formed now.
    [[nodiscard]] int admissible() const;
    /// Agents that are not part of the settled world. Goes through all of them.
    [[nodiscard]] std::vector<AgentId> spares() const;

  private:
    struct Entry {
        Member member;
        std::optional<int> place;  ///< asked for, or kept from the last generation
        bool settled = false;
    };
    using Arrival = std::uint64_t;
    std::optional<Error> refuse_twin(const Joiner& joiner) const;
    void claim(Entry& entry, std::optional<int> place);
    void note_enough(TimePoint now);

    MembershipSpec spec_;
    TimePoint opened_;
    std::optional<TimePoint> last_call_ends_;  ///< since min_nodes were reached
    int settled_ = 0;                          ///< of the members
    bool has_head_ = false;
    Arrival next_arrival_ = 0;
    std::map<Arrival, Entry> members_;
    std::unordered_map<AgentId, Arrival> arrivals_;
    std::unordered_map<int, Arrival> asked_;  ///< who asked for this node rank
    std::unordered_map<int, int> claims_;     ///< how many have this place; none is not in it
    std::map<int, std::string> holes_;        ///< places whose node has gone, and its host
};

}  // namespace ddprun::rdzv
