#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "launcher/head/restart_policy.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

namespace job_event {
/// Enough nodes have joined. `workers`: per node, by group rank. `before`: per node, its group rank in the
/// suspended world; -1: a new node.
struct WorldFormed {
    std::vector<int> workers;
    std::vector<int> before = {};
};
/// Too few nodes are there to form the suspended world anew.
struct NodesMissing {};
/// The world cannot be formed.
struct JoinFailed {
    std::string why;
};
struct WorkerEnded {
    int node;
    int rank;
    FailureFacts facts;  ///< meaningful when `failed`
    bool failed;
    bool by_us;
    std::string what;           ///< "rank 5 on node02, signal 9 (SIGKILL)"
    std::int64_t steps = -1;    ///< steps done; -1: the worker does not count them
    bool is_late = false;       ///< it ended before its node knew of this generation
    bool never_joined = false;  ///< it ended with 0 before it had joined a group
};
/// All workers of a node have started, or have reached this stage of recovery in place (rdzv::WorkersReady).
struct NodeReady {
    using Stage = rdzv::WorkerStage;
    int node;
    Stage stage;
    std::string why = {};     ///< of a refusal, or why a worker has left its group
    std::int64_t steps = -1;  ///< the most steps done by a worker of the node
};
struct NodeEnded {
    int node;
};
/// A node is lost. `others_go_on`: enough nodes are left or wait. `others_may_follow`: for this long, more
/// nodes may be noticed as lost by the same cause.
struct NodeLost {
    int node;
    std::string why;
    bool others_go_on = false;
    Duration others_may_follow{};
};
/// The number of waiting nodes that a world formed now would take in has changed.
struct NodesWaiting {
    int nodes;
};
/// So many nodes are silent that they may go on without this controller. Its workers are killed without a
/// grace, so that they do not run beside the others' next generation.
struct Outnumbered {
    std::string why;
};
/// A signal whose action is Stop. `source` is the number of the ddprun that got it: signals to the ddprun of
/// every node (scancel, mpirun) are one request to stop, and only a second one from the same ddprun means
/// "now".
struct StopAsked {
    int signal;
    std::uint64_t source;
    int node = -1;  ///< of the running world; -1: the head's own ddprun or a waiting node's
    std::string host = {};
    bool others_go_on =
        false;  ///< the node leaves: it is not the head's, and enough nodes are left without it
};
/// Preemption by a signal with that action, by the walltime or by `ddprun drain`.
struct PreemptAsked {
    int signal;
    std::string why;
    std::optional<Duration> left = {};
};
/// The hang detector's verdict. `what` names the ranks.
struct HangFound {
    std::string what;
    int culprit = -1;
    bool was_asked = true;  ///< for the detector, by --hang-timeout
};
/// `time_up`: when the job is stopped for its walltime, by us or by the scheduler.
struct WalltimeKnown {
    TimePoint time_up;
};
/// The ranks have committed as many steps as --rehearse asks for.
struct RehearsalDue {};
struct TimerFired {};
}  // namespace job_event

using JobEvent = std::variant<job_event::WorldFormed, job_event::NodesMissing, job_event::JoinFailed,
                              job_event::WorkerEnded, job_event::NodeReady, job_event::NodeEnded,
                              job_event::NodeLost, job_event::NodesWaiting, job_event::Outnumbered,
                              job_event::StopAsked, job_event::PreemptAsked, job_event::HangFound,
                              job_event::WalltimeKnown, job_event::RehearsalDue, job_event::TimerFired>;

namespace job_action {
/// Start this generation on every node.
struct StartGeneration {
    std::uint64_t generation;
    int restart_count;
};
/// Start the generation in place: workers that run go on.
struct Recover {
    std::uint64_t generation;
    int restart_count;
    int failed_rank;  ///< -1: none, a rehearsal
};
/// End the collectives of the generation on all nodes that stay; their workers wait.
struct Suspend {
    int failed_rank;
    std::string why;
};
/// Stop the workers of a node that leaves; the others go on.
struct StopNode {
    int node;
    Duration grace;
    std::string why;
};
/// Form the suspended world anew, of the nodes that are there.
struct Reform {};
/// All ranks are in the generation in place.
struct Recovered {
    std::string cause;       ///< "" none: a rehearsal
    std::vector<int> ranks;  ///< that have started again
    Duration took;
    std::int64_t steps;  ///< -1 not known
};
/// Ranks that have finished may end, now and later.
struct Release {};
/// Kill a rank as a failed one.
struct KillRank {
    int rank;
    std::string why;
};
/// Stop the workers of every node: signal, grace, then SIGKILL. `failed_rank`: >= 0 ends collectives at once.
struct StopGeneration {
    int signal;
    Duration grace;
    int failed_rank;
    std::string why;
};
struct KillGeneration {};
/// Ends the collectives of a generation that is being stopped already: `lost_rank` will never answer.
struct EndCollectives {
    int lost_rank;
};
/// Ends the wait of workers that join a group: `absent_rank` has ended with 0, and will never come.
struct EndJoining {
    int absent_rank;
};
struct KillNode {
    int node;
};
/// This node will be in no further world.
struct NodeLeaves {
    std::uint64_t source;
};
/// The leaving node has no workers any more: its ddprun ends.
struct Dismiss {
    std::uint64_t source;
};
/// Tell the workers to save and stop within `time`. (Those that do not listen get the signal that follows.)
struct NotifyPreempt {
    std::string why;
    Duration time;
};
struct SetTimer {
    TimePoint when;
};
/// One line for the operator.
struct Say {
    std::string text;
    bool warning;
};
/// Wait for nodes again.
struct Rejoin {};
/// The job is over; the state and the collected ends of workers tell how.
struct Finish {};
}  // namespace job_action

using JobAction =
    std::variant<job_action::StartGeneration, job_action::Recover, job_action::Suspend, job_action::StopNode,
                 job_action::Reform, job_action::Recovered, job_action::Release, job_action::KillRank,
                 job_action::StopGeneration, job_action::KillGeneration, job_action::EndCollectives,
                 job_action::EndJoining, job_action::KillNode, job_action::NodeLeaves, job_action::Dismiss,
                 job_action::NotifyPreempt, job_action::SetTimer, job_action::Say, job_action::Rejoin,
                 job_action::Finish>;

}  // namespace ddprun
