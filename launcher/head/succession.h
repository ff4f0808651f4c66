#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launcher/head/job_state.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

/// How a job survives the loss of its head. Another agent, the standby, knows what a controller needs
/// (rdzv::Legacy) and listens; all agents know its address (rdzv::Successor). When the head is lost, every
/// agent stops its workers and dials the standby. The standby's ddprun becomes the controller and begins a
/// new generation, as after the loss of any node. The head decides here, the other nodes in heir_state.h.
///
/// There is no vote and no consensus; a job survives one loss at a time. There are never two controllers:
/// of the agents that may be alive, a standby needs more than half and the head at least half.
namespace ddprun {

/// What a head decides about its succession, without acting.
///
/// The standby is the first connected node of the world after the head's, if enough nodes would be left. The
/// end of the job is told only when every agent that may take itself for the standby is lost or has confirmed
/// that it is not: else a standby would continue a job that other nodes know as ended.
struct SuccessionState {
    // Set at the beginning.
    bool can_be_succeeded = false;  ///< the other nodes' agents do not end with this process
    bool is_successor = false;      ///< this process was the standby
    bool nobody_can_come = false;   ///< this process has started all nodes and starts none again
    JobSpec spec;

    std::set<rdzv::AgentId> agents = {};    ///< connected
    std::set<rdzv::AgentId> leaving = {};   ///< agents that will be in no further world
    std::set<rdzv::AgentId> running = {};   ///< agents told of the generation, without the head's own
    std::vector<rdzv::AgentId> world = {};  ///< the generation's agents by group rank
    int unconfirmed = 0;                    ///< nodes that may not know of the generation yet
    rdzv::AgentId own = 0;                  ///< the agent in this process; 0 none
    rdzv::AgentId standby = 0;              ///< 0 none
    rdzv::Successor successor = {};         ///< the one that all agents know; host "": none
    std::set<rdzv::AgentId> heirs = {};     ///< agents that may take themselves for the standby
    bool is_last = false;                   ///< the job ends: no further standby
    bool is_handed_over = false;            ///< the job goes on under the successor of an earlier head
    bool may_be_succeeded = false;          ///< some agent may know a successor
    int electorate = 0;                     ///< agents that may go on under a standby
    int known_dead = 0;                     ///< of `electorate`: known to have ended
    TimePoint sees_no_death_until{};        ///< till then a closed connection proves no death (StoodStill)
    TimePoint silent_may_return{};          ///< till then a silent node is waited for
};

namespace succession_event {
struct Joined {
    rdzv::AgentId agent;
    bool is_own;
};
/// An agent is lost. Silent: its process may live. Dismissed: it goes on under no other head.
struct Lost {
    enum How : std::uint8_t { Silent, Closed, Dismissed };
    rdzv::AgentId agent;
    std::string instance;
    How how;
};
struct Leaves {
    rdzv::AgentId agent;
};
struct GenerationBegan {
    std::vector<rdzv::AgentId> world;
};
/// The workers of one more node of the generation have started.
struct Confirmed {};
/// A count of the job that its successor takes over has changed.
struct CountChanged {};
/// A standby's answer. Port 0: it knows that it is no longer the standby.
struct StandbyListens {
    rdzv::AgentId agent;
    rdzv::Successor where;
};
/// This process stood still for longer than the heartbeat timeout. Living nodes may have closed their
/// connections meanwhile and go on under the standby.
struct StoodStill {};
/// The job ends, and the nodes are to be told.
struct JobEnds {};
/// The generation is over, and the next one needs other nodes.
struct NodesNeeded {
    bool are_enough;
};
/// This process was started as the head of a job that goes on under another one.
struct SuccessorMet {
    rdzv::Successor successor;
    bool can_join;  ///< this process can be a node of that job
};
}  // namespace succession_event

using SuccessionEvent =
    std::variant<succession_event::Joined, succession_event::Lost, succession_event::Leaves,
                 succession_event::GenerationBegan, succession_event::Confirmed,
                 succession_event::CountChanged, succession_event::StandbyListens,
                 succession_event::StoodStill, succession_event::JobEnds, succession_event::NodesNeeded,
                 succession_event::SuccessorMet>;

struct SuccessionActions {
    std::vector<std::pair<rdzv::AgentId, rdzv::ToAgent>> send;  ///< agent 0: to all
    std::string say;
    std::string hand_over;  ///< why this head, which began no generation, decides nothing any more; "" no
    std::string overrule;   ///< why the job ends here (job_event::Outnumbered); "" no
    bool tell_end = false;  ///< tell the nodes of the end that JobEnds announced
    std::optional<Duration> await_nodes;
    bool nobody_comes = false;  ///< too few nodes are left, and no others can come
};

/// Pure: changes `state`, returns what to do, in the order of the members.
SuccessionActions step(SuccessionState& state, const SuccessionEvent& event, const JobState& job,
                       TimePoint now);

/// Returns what a successor needs of the job's state; SuccessionState adds the rest. Pure.
rdzv::Legacy legacy_of(const JobState& state, TimePoint now);
/// The state in which a successor begins: its only node, number 0, is the lost head's, to be reported as
/// lost. It skips one generation's number, so that no number comes twice. Pure.
JobState inherited(const rdzv::Legacy& legacy, TimePoint now);
/// Takes over the newer generation and restart count that an agent was told by the lost head. Pure.
void take_word(JobState& state, std::uint64_t generation, int restarts, TimePoint now);
/// A node of the lost head's last world whose workers wait for the next generation.
struct KeptNode {
    int first_rank;
    int workers;
};
/// Adds these nodes, by rank, to the state in which a successor begins, so that their workers can go on in
/// place. Returns the number of the lost head's node, which has the first ranks that are missing, and all
/// others. Pure.
std::size_t adopt(JobState& state, const std::vector<KeptNode>& nodes);

}  // namespace ddprun
