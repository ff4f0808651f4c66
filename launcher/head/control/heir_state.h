#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "env/io/socket.h"
#include "launcher/head/control/job_state.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// How much later than its agents a head can notice that they do not hear each other. A head that hears and
/// is not heard goes on hearing for up to one heartbeat, and its agents may have lost it up to one heartbeat
/// before that.
inline Duration head_notices_within(const rdzv::Heartbeats& limits) { return 2 * limits.interval; }

/// What a node that follows a head does when it loses the head, without acting.
///
///   Following --head lost, somebody succeeds it--> Stopping --workers ended--> Orphaned
///      ^  ^------------ a generation begins, a successor is named ----------------'
///      |--- Returning <--head lost, which may live and need this node-- Following, Stopping, Orphaned
///
/// Orphaned: this node has gone to the standby, the standby to itself. From the head's loss on the standby
/// counts who comes, and takes the job over when all who are left have come or none is waited for any longer,
/// with more than half of those who may live. Returning: the workers belong to a generation that is over for
/// the other nodes; when they have ended, this node joins the head as a new one, and is no standby until it
/// is told again. In all other cases the node leaves.
///
/// An agent that comes while this node still has the head has lost the head alone: it is no part of the job
/// any more, and is refused after a while. It is not counted either if the head is lost next (Legacy::lost):
/// the head may go on without both.
struct HeirState {
    // Set at the beginning.
    bool has_restarts = false;  ///< a silent head that comes back begins another generation
    std::string own_address;    ///< where this process reaches what listens here
    Duration patience{};        ///< from the head's loss on, for all nodes to stop their workers and come
    Duration head_notices{};    ///< from there on, for a head that lives to notice it
    Duration return_timeout{};  ///< to join the head again

    enum class Phase : std::uint8_t { Following, Stopping, Orphaned, Returning };
    Phase phase = Phase::Following;
    bool has_asked_to_end = false;  ///< the head, which may not have heard it
    Endpoint head;                  ///< where it was lost
    std::string why;                ///< it was lost
    std::optional<rdzv::Legacy> legacy;
    TimePoint legacy_came{};
    std::uint16_t port = 0;  ///< where this node listens; 0: it does not
    rdzv::Successor successor;
    bool head_is_dead = false;    ///< its process has ended: it is not merely cut off
    bool is_decided = false;      ///< whether this standby takes over
    TimePoint until = kNever;     ///< others are waited for
    TimePoint head_runs_until{};  ///< at the latest
    struct Arrival {
        rdzv::AgentHello hello;
        TimePoint refused_at;  ///< unless the head is lost by then
    };
    std::map<rdzv::AgentId, Arrival> arrivals;
    std::set<std::string> lost_before;  ///< instances that the head has lost
    TimePoint timer = kNever;           ///< when TimerFired is due

    [[nodiscard]] bool is_orphan() const { return phase == Phase::Stopping || phase == Phase::Orphaned; }
    /// The other nodes come here when the head is lost.
    [[nodiscard]] bool is_standby() const { return legacy && port != 0 && successor.port == port; }
};

namespace heir_event {
/// By the head, as the standby. `port`: where this node listens; 0: it cannot.
struct Appointed {
    rdzv::Legacy legacy;
    std::uint16_t port;
};
struct LinkLost {
    Endpoint head;
    Error why;
    bool was_joined;    ///< the link had come about
    bool head_is_dead;  ///< the standby has seen so
};
/// No worker of this node is left.
struct WorkersEnded {};
/// A world has been formed, under whatever controller: its loss is another one.
struct GenerationBegan {};
struct AgentCame {
    rdzv::AgentId agent;
    rdzv::AgentHello hello;
};
struct AgentGone {
    rdzv::AgentId agent;
};
/// This node is asked to end. The head decides; a node without one leaves. So does a node that loses its head
/// before that has answered: nobody else knows what was asked.
struct EndAsked {
    rdzv::Notice how;
    bool is_connected;
};
struct TimerFired {};
}  // namespace heir_event

using HeirEvent = std::variant<heir_event::Appointed, rdzv::Successor, heir_event::LinkLost,
                               heir_event::WorkersEnded, heir_event::GenerationBegan, heir_event::AgentCame,
                               heir_event::AgentGone, heir_event::EndAsked, heir_event::TimerFired>;

struct HeirActions {
    std::optional<rdzv::FromAgent> send;
    std::string stop_workers;  ///< why, as survivors of any failure; "" no. Feed WorkersEnded
    std::vector<std::pair<rdzv::AgentId, Error>> refuse;
    /// Kill the workers, without a grace: the other nodes may have begun the next generation. This node is a
    /// new one from now on. Feed WorkersEnded.
    std::optional<Error> renew;
    std::vector<Endpoint> join;  ///< the controller by whichever of these, until `join_by`
    TimePoint join_by{};
    std::optional<JobState> take_over;
    std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>> joined;  ///< these, in this order
    std::string give_up;                                             ///< why; "" no
    bool leave = false;
    std::optional<Error> lost;  ///< with `leave`: the link's end, where that is why
};

/// Pure: changes `state`, returns what to do, in the order of the members.
HeirActions step(HeirState& state, const HeirEvent& event, TimePoint now);

}  // namespace ddprun
