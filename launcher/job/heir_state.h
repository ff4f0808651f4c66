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

namespace ddprun {

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
/// while. If the head is lost next, that agent does not count (Legacy::lost): the head may go on without
/// both.
///
/// The head's own node follows nobody: it leaves when it loses the head, and does not obey a Shutdown.
struct HeirState {
    // Set at the beginning.
    bool is_head = false;       ///< the head is in this process; later also of a standby that took over
    bool has_restarts = false;  ///< a silent head that comes back begins another generation
    std::string own_host;       ///< this node's name, as the head tells it to the others
    std::string own_address;    ///< by which this process reaches its own listener
    Duration patience{};        ///< after the head's loss, for all nodes to stop their workers and come
    Duration head_notices{};    ///< after the head's loss, for a living head to notice it
    Duration return_timeout{};  ///< to join the head again

    enum class Phase : std::uint8_t { Following, Stopping, Orphaned, Returning };
    Phase phase = Phase::Following;
    bool has_asked_to_end = false;  ///< this node has asked the head to let it end
    Endpoint head;                  ///< the address of the lost head
    std::string why;                ///< why the head was lost
    std::optional<rdzv::Legacy> legacy;
    TimePoint legacy_came{};
    std::uint16_t port = 0;  ///< that this node listens on; 0 none
    rdzv::Successor successor;
    bool head_is_dead = false;   ///< the head's process has ended: it is not merely cut off
    bool is_decided = false;     ///< this standby has taken over or given up
    TimePoint until = kNever;    ///< when the standby stops waiting for other nodes
    TimePoint head_knows_all{};  ///< when a living head has noticed that the nodes that have come left it
    struct Arrival {
        rdzv::AgentHello hello;
        TimePoint came;  ///< after `patience` the agent is refused, unless the head is lost by then
    };
    std::map<rdzv::AgentId, Arrival> arrivals;
    std::set<std::string> lost_before;  ///< instances that the head has lost
    TimePoint timer = kNever;           ///< when TimerFired is due

    [[nodiscard]] bool is_orphan() const { return phase == Phase::Stopping || phase == Phase::Orphaned; }
    /// True when the other nodes join this node if the head is lost. Another node may listen on the same port
    /// number.
    [[nodiscard]] bool is_standby() const {
        return legacy && port != 0 && successor.port == port && successor.host == own_host;
    }
};

namespace heir_event {
/// The head has appointed this node as the standby. `port`: the one it listens on; 0: it cannot.
struct Appointed {
    rdzv::Legacy legacy;
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
    rdzv::Notice how;
    bool is_connected;
};
struct TimerFired {};
}  // namespace heir_event

using HeirEvent = std::variant<heir_event::Appointed, rdzv::Successor, rdzv::Shutdown, heir_event::LinkLost,
                               heir_event::WorkersEnded, heir_event::GenerationBegan, heir_event::AgentCame,
                               heir_event::AgentGone, heir_event::EndAsked, heir_event::TimerFired>;

struct HeirActions {
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
HeirActions step(HeirState& state, const HeirEvent& event, TimePoint now);

}  // namespace ddprun
