#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "env/io/socket.h"
#include "launcher/head/job_state.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

/// How a job survives the loss of its head. Another agent, the standby, knows what a controller needs
/// (rdzv::JobSnapshot) and listens; all agents know its address (rdzv::Successor). When the head is lost,
/// every agent stops its workers and dials the standby. The standby's ddprun becomes the controller and
/// begins a new generation, as after the loss of any node. The head decides here, the other nodes by
/// FollowerState.
///
/// There is no vote and no consensus; a job survives one loss at a time. There are never two controllers:
/// of the agents that may be alive, a standby needs more than half and the head at least half.
namespace ddprun {

// ---- the head

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
    std::set<rdzv::AgentId> possible_standbys = {};  ///< agents that may take themselves for the standby
    bool is_last = false;                            ///< the job ends: no further standby
    bool is_handed_over = false;      ///< the job goes on under the successor of an earlier head
    bool may_be_succeeded = false;    ///< some agent may know a successor
    int electorate = 0;               ///< agents that may go on under a standby
    int known_dead = 0;               ///< of `electorate`: known to have ended
    TimePoint sees_no_death_until{};  ///< till then a closed connection proves no death (StoodStill)
    TimePoint silent_may_return{};    ///< till then a silent node is waited for
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

/// Notes in `hello`, for a later head, what this node is told of its generation. Pure.
void note_generation(rdzv::AgentHello& hello, const rdzv::StartGeneration& start);

/// Returns what a successor needs of the job's state; SuccessionState adds the rest. Pure.
rdzv::JobSnapshot snapshot_of(const JobState& state, TimePoint now);
/// The state in which a successor begins: its only node, number 0, is the lost head's, to be reported as
/// lost. It skips one generation's number, so that no number comes twice. Pure.
JobState inherited(const rdzv::JobSnapshot& snapshot, TimePoint now);
/// Takes over the newer generation and restart count that an agent was told by the lost head. Pure.
void catch_up(JobState& state, std::uint64_t generation, int restarts, TimePoint now);
/// A node of the lost head's last world whose workers wait for the next generation.
struct KeptNode {
    int first_rank;
    int workers;
};
/// Adds these nodes, by rank, to the state in which a successor begins, so that their workers can go on in
/// place. Returns the number of the lost head's node, which has the first ranks that are missing, and all
/// others. Pure.
std::size_t adopt(JobState& state, const std::vector<KeptNode>& nodes);

// ---- the nodes that follow a head

/// How much later than its agents a head can notice a broken link. A head whose messages do not arrive still
/// hears its agents for up to one heartbeat, and they may have lost it up to one heartbeat before.
inline Duration head_notices_within(const rdzv::Heartbeats& limits) { return 2 * limits.interval; }

/// What a node that follows a head does when it loses the head, without acting.
///
///   Following --head lost, somebody succeeds it--> Stopping --workers ended--> Orphaned
///      ^  ^------------ a generation begins, a successor is named ----------------'
///      |--- Returning <--head lost, which may live and need this node-- Following, Stopping, Orphaned
///
/// Orphaned: this node joins the standby; the standby joins itself. After the head's loss the standby counts
/// the agents that come. When all have come or its wait is over, it takes the job over if they are more than
/// half of those that may live. A head that may live has to have noticed the loss of so many: until then it
/// may begin a generation with them. Returning: the other nodes have ended this generation; when its workers
/// have ended, this node joins the head as a new one, and is no standby until the head appoints it again. In
/// all other cases the node leaves.
///
/// Workers that can recover in place are not stopped: they leave the generation, and wait for the one that
/// the new head begins. Until then "ended" means here that each has left the generation or is dead.
///
/// While this node still hears the head, an agent that arrives here was cut off alone: it is refused after a
/// while. If the head is lost next, that agent does not count (JobSnapshot::lost): the head may go on without
/// both.
///
/// The head's own node follows nobody: it leaves when it loses the head, and does not obey a Shutdown.
struct FollowerState {
    // Set at the beginning.
    bool is_head = false;        ///< the head is in this process; later also of a standby that took over
    bool has_restarts = false;   ///< a silent head that comes back begins another generation
    std::string own_host;        ///< this node's name, as the head tells it to the others
    std::string own_address;     ///< by which this process reaches its own listener
    Duration arrival_timeout{};  ///< after the head's loss, for all nodes to stop their workers and come
    Duration head_notices{};     ///< after the head's loss, for a living head to notice it
    Duration return_timeout{};   ///< to join the head again

    enum class Phase : std::uint8_t { Following, Stopping, Orphaned, Returning };
    Phase phase = Phase::Following;
    bool has_asked_to_end = false;  ///< this node has asked the head to let it end
    Endpoint head;                  ///< the address of the lost head
    std::string why;                ///< why the head was lost
    int instances = 1;              ///< as which this process has joined heads, one after the other
    std::optional<rdzv::JobSnapshot> snapshot;
    TimePoint snapshot_came{};
    std::uint16_t port = 0;  ///< that this node listens on; 0 none
    rdzv::Successor successor;
    bool head_is_dead = false;   ///< the head's process has ended: it is not merely cut off
    bool is_decided = false;     ///< this standby has taken over or given up
    TimePoint until = kNever;    ///< when the standby stops waiting for other nodes
    TimePoint head_knows_all{};  ///< when a living head has noticed that the nodes that have come left it
    struct Arrival {
        rdzv::AgentHello hello;
        TimePoint came;  ///< after `arrival_timeout` the agent is refused, unless the head is lost by then
    };
    std::map<rdzv::AgentId, Arrival> arrivals;
    std::set<std::string> lost_before;  ///< instances that the head has lost
    TimePoint timer = kNever;           ///< when TimerFired is due

    [[nodiscard]] bool is_orphan() const { return phase == Phase::Stopping || phase == Phase::Orphaned; }
    /// True when the other nodes join this node if the head is lost. Another node may listen on the same port
    /// number.
    [[nodiscard]] bool is_standby() const {
        return snapshot && port != 0 && successor.port == port && successor.host == own_host;
    }
};

namespace follower_event {
/// The head has appointed this node as the standby. `port`: the one it listens on; 0: it cannot.
struct Appointed {
    rdzv::JobSnapshot snapshot;
    std::uint16_t port;
};
struct LinkLost {
    Endpoint head;
    Error why;
    bool was_joined;    ///< this node had joined by this link
    bool head_is_dead;  ///< the standby has seen the head's process end
};
/// All workers of this node have ended, or have left the lost head's generation and wait for the next.
struct WorkersEnded {};
/// A world has been formed, under the old or a new head: a later loss of that head is a new one.
struct GenerationBegan {};
struct AgentCame {
    rdzv::AgentId agent;
    rdzv::AgentHello hello;
};
struct AgentGone {
    rdzv::AgentId agent;
};
/// This node is asked to end. The head decides. A node without a head leaves, and so does a node that loses
/// its head before the answer: no other node knows of the request.
struct EndAsked {
    rdzv::StopRequest how;
    bool is_connected;
};
struct TimerFired {};
}  // namespace follower_event

using FollowerEvent =
    std::variant<follower_event::Appointed, rdzv::Successor, rdzv::Shutdown, follower_event::LinkLost,
                 follower_event::WorkersEnded, follower_event::GenerationBegan, follower_event::AgentCame,
                 follower_event::AgentGone, follower_event::EndAsked, follower_event::TimerFired>;

struct FollowerActions {
    std::optional<rdzv::FromAgent> send;
    /// Why to stop them as after any failure, or to suspend them where they can recover in place; "" no. Feed
    /// WorkersEnded.
    std::string stop_workers;
    std::vector<std::pair<rdzv::AgentId, Error>> refuse;
    /// Kill the workers without a grace, because the other nodes may have begun the next generation. From now
    /// on this node is a new one. Feed WorkersEnded.
    std::optional<Error> renew;
    std::vector<Endpoint> join;  ///< dial the head at these until `join_by`
    TimePoint join_by{};
    std::optional<JobState> take_over;
    std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>> joined;  ///< in this order
    std::string give_up;                                             ///< why; "" no
    std::optional<rdzv::Shutdown> end;                               ///< end this node as the head says
    bool leave = false;
    std::optional<Error> lost;  ///< why the link ended, after LinkLost; with `leave` it is the reason
};

/// Pure: changes `state`, returns what to do, in the order of the members.
FollowerActions step(FollowerState& state, const FollowerEvent& event, TimePoint now);

}  // namespace ddprun
