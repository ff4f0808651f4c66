#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "launcher/job_spec.h"
#include "launcher/restart_policy.h"

namespace ddprun {

/// What the controller decides for the whole job, without acting.
///
///   Joining --world formed--> Running --failure, signal, loss--> Stopping --all drained--> BackingOff
///      ^                        |  \--all exited 0--> Draining        |                        |
///      |                        |                        |            +--> Finished            |
///      +------------------------+------------------------+--- Finished        new generation <-+
///
/// A generation that lost a node goes back to Joining, so that a spare or the returning node can take the hole.
struct JobState {
    enum class Phase : std::uint8_t { Joining, Running, Draining, Stopping, BackingOff, Finished };
    /// What follows when a stopping generation has drained.
    enum class After : std::uint8_t { Finish, Restart, Rejoin };
    struct Node {
        int workers = 0;
        int succeeded = 0;
        bool drained = false;
        bool lost = false;
    };

    Phase phase = Phase::Joining;
    After after = After::Finish;
    std::uint64_t generation = 0;  ///< of the world that runs or ran last; 0 none yet
    int restarts_used = 0;
    std::vector<Node> nodes;
    RestartHistory history;
    TimePoint generation_started{};
    TimePoint timer = kNever;      ///< when TimerFired is due
    std::optional<int> stopped_by;  ///< the signal that asked us to stop
    bool preempted = false;
    bool hung = false;             ///< the generation was stopped because it hung
    bool killing = false;
    std::string failure;           ///< a cause that is no worker: rendezvous, lost node
};

namespace job_event {
/// Enough nodes have joined; workers per node in group-rank order.
struct WorldFormed { std::vector<int> workers; };
/// The world cannot be formed.
struct JoinFailed { std::string why; };
struct WorkerEnded {
    int node;
    int rank;
    FailureFacts facts;   ///< meaningful when `failed`
    bool failed;
    bool by_us;
    std::string what;     ///< "rank 5 on node02, signal 9 (SIGKILL)"
};
struct NodeDrained { int node; };
struct NodeLost { int node; std::string why; };
/// A signal whose action is Stop. `again`: it is not the first.
struct StopAsked { int signal; bool again; };
/// Preemption: a signal with that action, the walltime, `ddprun drain`.
struct PreemptAsked { int signal; std::string why; };
/// The hang detector's verdict. `what` names the ranks.
struct HangFound { std::string what; int culprit = -1; };
struct TimerFired {};
}  // namespace job_event

using JobEvent = std::variant<job_event::WorldFormed, job_event::JoinFailed, job_event::WorkerEnded,
                              job_event::NodeDrained, job_event::NodeLost, job_event::StopAsked,
                              job_event::PreemptAsked, job_event::HangFound, job_event::TimerFired>;

namespace job_action {
/// Start this generation on every node.
struct StartGeneration { std::uint64_t generation; int restart_count; };
/// Every node: stop signal, grace, then SIGKILL. `failed_rank`: >= 0 ends collectives at once.
struct StopGeneration { int signal; Duration grace; int failed_rank; std::string why; };
struct KillGeneration {};
/// libddp workers are told to save and stop; others get the signal.
struct NotifyPreempt { std::string why; };
struct SetTimer { TimePoint when; };
/// One line for the operator.
struct Say { std::string text; bool warning; };
/// Wait for nodes again.
struct Rejoin {};
/// The job is over; its end is in the state and in the collected worker ends.
struct Finish {};
}  // namespace job_action

using JobAction = std::variant<job_action::StartGeneration, job_action::StopGeneration,
                               job_action::KillGeneration, job_action::NotifyPreempt, job_action::SetTimer,
                               job_action::Say, job_action::Rejoin, job_action::Finish>;

/// The parts of the command line that the decisions need, and one random number per decision.
struct JobPolicy {
    RestartSpec restart;
    Duration shutdown_timeout = std::chrono::seconds(30);
    /// Grace of survivors after a failure: they have nothing to save, most hang in a collective.
    Duration failure_grace = std::chrono::seconds(5);
    Duration preempt_grace = std::chrono::seconds(30);
    double random = 0;
};

/// A generation that lived longer than this has made progress, also if it cannot say so.
inline constexpr Duration kProgressAge = std::chrono::seconds(60);

/// Pure: changes `state`, returns what to do, in order.
std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now);

}  // namespace ddprun
