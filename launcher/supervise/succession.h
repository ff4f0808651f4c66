#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "launcher/supervise/job_state.h"
#include "rendezvous/agent_message.h"
#include "rendezvous/membership.h"

/// What becomes of a job whose head dies. One other agent, the standby, knows what another controller needs
/// (rdzv::Legacy), listens, and all agents know where (rdzv::Successor). When the head is lost every agent
/// stops its workers and goes there; the standby's ddprun becomes the controller, and a new generation
/// begins, as after the loss of any node.
///
/// There is no vote and no consensus: it survives one loss at a time. That there are never two controllers
/// follows from counting: whoever goes on without the other side needs more than half of the agents that may
/// be alive, the head as many as half.
namespace ddprun {

/// An agent, as far as that matters for the standby.
struct HeirFacts {
    bool is_connected = false;
    bool is_heads = false;  ///< in the head's own process
};
/// The first that can be it; -1: none. Pure.
int choose_standby(const std::vector<HeirFacts>& by_group_rank);

/// Those who are left without a head.
struct Orphans {
    int agents = 0;             ///< that the job had, the head's too
    bool head_is_dead = false;  ///< nothing listens where it did: it is not merely cut off
    bool head_may_run = false;  ///< it may not have noticed yet that nobody hears it: its workers run
    int present = 0;            ///< have come to the standby, its own too
    int stopping =
        0;  ///< have not, and may still have workers: spares, whom the standby did not know of, come at once
};
/// How much later than its agents a head can notice that they do not hear each other. A head that hears and
/// is not heard goes on hearing for up to one heartbeat, and its agents may have lost it up to one heartbeat
/// before that.
inline Duration head_notices_within(const rdzv::Heartbeats& limits) { return 2 * limits.interval; }
enum class Succession : std::uint8_t { Wait, TakeOver, GiveUp };
/// `time_is_up`: whoever has not come is not waited for any longer. While the head may run nobody takes over.
/// Pure.
Succession judge_succession(const Orphans& orphans, bool time_is_up);

/// Whether a head goes on that hears `present` agents (its own too) of `agents`, `known_dead` of which have
/// ended before its eyes. Where nobody could succeed it, it always does. Pure.
bool head_keeps_job(int agents, int present, int known_dead);

/// A head that hears of another one, which succeeded the head of the same job.
struct OtherHead {
    std::uint64_t generation = 0;  ///< of this head; 0: it has begun none
    bool is_successor = false;     ///< this head is one itself
    bool can_join = false;         ///< this process can be a node of the other head
};
enum class Encounter : std::uint8_t { Ignore, Join, Stop };
/// No job runs a second time beside its successor: a ddprun that was started again joins, or ends. Pure.
Encounter meet_successor(const OtherHead& here);

/// What the controller leaves to its successor. Pure.
rdzv::Legacy legacy_of(const JobState& state, int agents, TimePoint now);
/// The state of a job whose only node so far, number 0, is the head's, to be reported as lost. One
/// generation's number is left out: no number comes twice. Pure.
JobState inherited(const rdzv::Legacy& legacy, TimePoint now);
using EarlyAgent = std::pair<rdzv::AgentId, rdzv::AgentHello>;
/// Those who have come to the standby, in the order in which they are to join: a place is theirs who had it
/// last. Pure.
std::vector<EarlyAgent> newest_first(const std::map<rdzv::AgentId, rdzv::AgentHello>& early);
/// An agent that goes on under the successor was told more than that by the lost controller: it stays true.
/// Pure.
void take_word(JobState& state, std::uint64_t generation, int restarts, TimePoint now);

}  // namespace ddprun
