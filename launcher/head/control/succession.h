#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launcher/head/control/job_state.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

/// What becomes of a job whose head dies. One other agent, the standby, knows what another controller needs
/// (rdzv::Legacy), listens, and all agents know where (rdzv::Successor). When the head is lost every agent
/// stops its workers and goes there; the standby's ddprun becomes the controller, and a new generation
/// begins, as after the loss of any node. The head decides here, the other nodes decide in heir_state.h.
///
/// There is no vote and no consensus: it survives one loss at a time. That there are never two controllers
/// follows from counting: whoever goes on without the other side needs more than half of the agents that may
/// be alive, the head as many as half.
namespace ddprun {

/// What a head decides about its succession, without acting.
///
/// The standby is the first connected node of the world after the head's, where enough nodes would be left.
/// What ends the job is told to nobody before every agent that may take itself for the standby is lost or has
/// said that it is none: else a standby would begin again what others were told is over.
struct SuccessionState {
    // Set at the beginning.
    bool can_be_succeeded = false;  ///< the other nodes' agents do not end with this process
    bool is_successor = false;      ///< this process was the standby
    bool nobody_can_come = false;   ///< this process has started all nodes, and starts none a second time
    JobSpec spec;

    std::set<rdzv::AgentId> agents = {};    ///< connected
    std::set<rdzv::AgentId> leaving = {};   ///< of them: in no further world
    std::set<rdzv::AgentId> running = {};   ///< of them: told of the generation, the head's own agent not
    std::vector<rdzv::AgentId> world = {};  ///< of the generation, by group rank
    int unconfirmed = 0;                    ///< nodes that may not know of the generation yet
    rdzv::AgentId own = 0;                  ///< the agent in this process; 0 none
    rdzv::AgentId standby = 0;              ///< 0 none
    rdzv::Successor successor = {};         ///< whom all know; host "": nobody
    std::set<rdzv::AgentId> heirs = {};     ///< agents that may take themselves for the standby
    bool is_last = false;                   ///< no further standby: the job ends
    bool is_handed_over = false;            ///< the job, to the successor of an earlier head
    bool may_be_succeeded = false;          ///< some agent may know a successor
    int electorate = 0;                     ///< agents that may count themselves among those who go on, and
    int known_dead = 0;                     ///< those whose process has ended before this head's eyes
    TimePoint sees_no_death_until{};        ///< after this process stood still
    TimePoint silent_may_return{};          ///< a node that fell silent is waited for
};

namespace succession_event {
struct Joined {
    rdzv::AgentId agent;
    bool is_own;
};
/// Silent: its process may live. Dismissed: it goes on nowhere else.
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
struct RestartUsed {};
/// A standby's answer. Port 0: it has heard that it is the standby no more.
struct StandbyListens {
    rdzv::AgentId agent;
    rdzv::Successor where;
};
/// This process stood still for longer than the time-out. Connections that are found closed now were given up
/// by nodes that live, and may go on under the standby.
struct StoodStill {};
/// Something that ends the job is to be told.
struct JobEnds {};
/// The generation is over, and the next one needs other nodes.
struct NodesNeeded {
    bool are_enough;
};
/// This process was started as the head of a job that goes on under another one.
struct SuccessorMet {
    rdzv::Successor successor;
    bool can_join;  ///< this process can be a node of it
};
}  // namespace succession_event

using SuccessionEvent =
    std::variant<succession_event::Joined, succession_event::Lost, succession_event::Leaves,
                 succession_event::GenerationBegan, succession_event::Confirmed,
                 succession_event::RestartUsed, succession_event::StandbyListens,
                 succession_event::StoodStill, succession_event::JobEnds, succession_event::NodesNeeded,
                 succession_event::SuccessorMet>;

struct SuccessionActions {
    std::vector<std::pair<rdzv::AgentId, rdzv::ToAgent>> send;  ///< agent 0: to all
    std::string say;
    std::string hand_over;  ///< why this head, which has begun no generation, decides nothing any more; ""
    std::string overrule;   ///< why the job ends here (job_event::Outnumbered); ""
    bool tell_end = false;  ///< what JobEnds came for
    std::optional<Duration> await_nodes;
    bool nobody_comes = false;  ///< too few nodes are left, and no others can come
};

/// Pure: changes `state`, returns what to do, in the order of the members.
SuccessionActions step(SuccessionState& state, const SuccessionEvent& event, const JobState& job,
                       TimePoint now);

/// What the controller leaves to its successor, but for what SuccessionState knows. Pure.
rdzv::Legacy legacy_of(const JobState& state, TimePoint now);
/// The state of a job whose only node so far, number 0, is the head's, to be reported as lost. One
/// generation's number is left out: no number comes twice. Pure.
JobState inherited(const rdzv::Legacy& legacy, TimePoint now);
/// An agent that goes on under the successor was told more than that by the lost controller: it stays true.
/// Pure.
void take_word(JobState& state, std::uint64_t generation, int restarts, TimePoint now);

}  // namespace ddprun
