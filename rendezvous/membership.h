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
#include "rendezvous/store.h"

namespace ddprun::rdzv {

/// An agent's connection, for as long as it lives. Never used again.
using AgentId = ClientId;

struct MembershipSpec {
    int min_nodes = 1;
    int max_nodes = 1;
    Duration join_timeout = std::chrono::seconds(600);
    Duration last_call = std::chrono::seconds(30);  ///< from min_nodes on, how long more nodes are waited for
    std::string spec_hash;                          ///< every node must bring the same; "" is not checked
};

/// An agent that wants to be part of the job.
struct Joiner {
    std::string host;
    int pid = 0;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;
    std::string role = "default";
    std::string spec_hash;
};

/// Whether the world can be formed. `why` explains, also (above all) "not yet"; who is missing is said with a failure, and
/// else by missing_ranks(), which takes its time.
struct Verdict {
    enum Kind : std::uint8_t { Wait, Ready, Failed } kind = Wait;
    std::string why;
};

/// Which nodes form the next generation, and in which order. Pure.
///
/// Ranks stick: a node keeps its group rank from one generation to the next; the place of a lost node goes to
/// the agent that comes back from the same host, else to a spare. Where a place stays empty (fewer than
/// max_nodes), the nodes behind it move up. Agents beyond max_nodes wait as spares.
///
/// join, leave and decide take the same time however many nodes there are (but for places of lost nodes): all of a
/// large job's nodes join at once, and each of them is decided about.
class Membership {
  public:
    Membership(MembershipSpec spec, TimePoint now) : spec_(std::move(spec)), opened_(now) {}

    /// Error: InvalidArgument (a node rank out of range, no slots), Mismatch (the node rank is taken, naming
    /// both claimants; another command line than the other nodes').
    Status join(AgentId agent, Joiner joiner, TimePoint now);
    /// The agent is gone. Unknown agents are ignored.
    void leave(AgentId agent, TimePoint now);

    [[nodiscard]] Verdict decide(TimePoint now) const;
    /// When decide() may change its mind without anybody joining or leaving.
    [[nodiscard]] TimePoint next_change(TimePoint now) const;
    /// "; missing: node rank 1, 3" where nodes have asked for ranks, else "". Goes through all places.
    [[nodiscard]] std::string missing_ranks() const;

    struct Member {
        AgentId agent;
        Joiner joiner;
        bool operator==(const Member& other) const { return agent == other.agent; }
    };
    /// Forms the world of a Ready verdict: its nodes by group rank. They keep these ranks from now on.
    std::vector<Member> settle();
    /// Starts a new round after a node was lost: the join timeout counts from now.
    void reopen(TimePoint now);

    [[nodiscard]] int joined() const { return static_cast<int>(members_.size()); }
    /// Agents that are not part of the settled world.
    [[nodiscard]] std::vector<AgentId> spares() const;

  private:
    struct Entry {
        Member member;
        std::optional<int> place;  ///< asked for, or kept from the last generation
        bool settled = false;
    };
    /// A place whose node was lost.
    struct Hole {
        std::string host;
        int place;
    };
    using Arrival = std::uint64_t;
    std::optional<Error> refuse_twin(const Joiner& joiner) const;
    void claim(Entry& entry, std::optional<int> place);
    void note_enough(TimePoint now);
    std::vector<Arrival> chosen() const;
    std::vector<Member> seat(const std::map<int, Arrival>& by_place);

    MembershipSpec spec_;
    TimePoint opened_;
    std::optional<TimePoint> enough_since_;  ///< when min_nodes were reached
    Arrival next_arrival_ = 0;
    std::map<Arrival, Entry> members_;
    std::unordered_map<AgentId, Arrival> arrivals_;
    std::unordered_map<int, Arrival> asked_;  ///< who asked for this node rank
    std::unordered_map<int, int> claims_;     ///< how many have this place; none is not in it
    std::vector<Hole> holes_;
};

}  // namespace ddprun::rdzv
