#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// The end of a generation, as far as it matters for starting another.
struct FailureFacts {
    bool never_ran = false;  ///< exec failed: wrong program, no permission, missing interpreter
    bool signaled = false;
    int status = 0;             ///< exit code or signal
    bool made_progress = true;  ///< the generation got further than the one before (steps, or time)
    std::string meaning = {};   ///< what it probably means, said once; "" nothing more than it says itself
};

struct RestartDecision {
    bool restart = false;
    TimePoint at{};   ///< when; now unless we back off
    std::string why;  ///< "1 of 3 restarts left", "exit code 64 means wrong usage: a restart cannot help"
    bool out_of_time =
        false;  ///< the walltime alone is why there is none: the same job may go on in another run
};

/// What has happened so far in this job.
struct RestartHistory {
    std::vector<TimePoint> restarts;  ///< when each restart was decided, oldest first
    int without_progress =
        0;  ///< generations in a row that got nowhere, whether they failed or nodes came or went
    std::int64_t furthest_step = -1;  ///< of any worker; -1: none has told one
};

/// Generations in a row without any progress after which restarts stop, whatever the budget, and nodes that
/// come wait.
inline constexpr int kStuckGenerations = 5;

/// A generation that lived longer than this has made progress, also if it cannot say so. One that cannot live
/// so long before the walltime ends is not started.
inline constexpr Duration kProgressAge = std::chrono::seconds(60);

/// Nodes that come, or leave, within this span make one new generation.
inline constexpr Duration kOneChange = std::chrono::seconds(1);

/// Pure. `random` in [0, 1) spreads the back-off (half to all of it), so that many jobs that lost the same
/// file server do not come back at the same instant. `time_up`: when the job is stopped for its walltime;
/// kNever: not known.
RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random,
                               TimePoint time_up = kNever);

/// Why starting this program again cannot help; "" when it may. EX_USAGE, EX_DATAERR, EX_NOINPUT, EX_CONFIG,
/// 126, 127 and 93 (do not requeue), and exec failures.
std::string permanent_failure(const FailureFacts& failure);

/// What the controller decides for the whole job, without acting.
///
///   Joining --world formed--> Running --failure, signal, loss--> Stopping --all ended--> BackingOff
///      ^                        |  \--all exited 0--> Succeeded       |                        |
///      |                        |                        |            +--> Finished            |
///      +------------------------+------------------------+--- Finished        new generation <-+
///
/// A generation whose nodes change goes back to Joining, so that a spare or a returning node can take a hole.
/// Where enough nodes are there this is a change of the world and no restart: it uses up none and does not
/// back off. Where too few are left it is a restart like any other, also when they become too few while the
/// generation stops. Several changes are one: so long as kOneChange after a node has come or asked to leave,
/// or as others may follow one that was lost, no other generation begins.
///
/// SIGTERM at the ddprun of one node is that node's leave where the others are enough without it, else a stop
/// of the job. Which of the two is meant when every node gets one (scancel, mpirun, qdel), nobody can know at
/// the first. So both begin alike: all workers get a notice, SIGTERM and the whole grace. Each further node
/// that is signalled leaves too, until too few would be left or the head's own ddprun is signalled: then the
/// leave has become a stop, and the grace runs on. Should a generation have begun in between, it is stopped
/// with a whole grace as well.
struct JobState {
    enum class Phase : std::uint8_t { Joining, Running, Succeeded, Stopping, BackingOff, Finished };
    /// What follows when a stopping generation has ended.
    enum class After : std::uint8_t { Finish, Restart, Rejoin };
    struct Node {
        int workers = 0;
        int succeeded = 0;
        bool ended = false;  ///< nobody is left on it
        bool lost = false;
        std::optional<std::uint64_t> leaving =
            {};  ///< the number of its ddprun, which ends when no worker is left on it
    };

    Phase phase = Phase::Joining;
    After after = After::Finish;
    std::uint64_t generation = 0;  ///< of the world that runs or ran last; 0 none yet
    int restarts_used = 0;
    std::vector<Node> nodes;
    int nodes_there = 0;  ///< of them, neither ended nor lost
    int unfinished = 0;   ///< workers that have not succeeded
    RestartHistory history;
    TimePoint generation_started{};
    TimePoint timer = kNever;       ///< when TimerFired is due
    int waiting_nodes = 0;          ///< that a world formed now would take in
    std::optional<int> stopped_by;  ///< the signal that asked us to stop first
    struct StopSource {
        std::uint64_t source = 0;
        TimePoint since{};  ///< when it asked first
    };
    std::vector<StopSource> stop_sources;  ///< who has asked for it
    TimePoint time_up = kNever;  ///< when the walltime's notice is due, or its end where there is no notice
    bool out_of_time = false;    ///< there was no time left for a restart
    bool preempted = false;
    bool hung = false;  ///< the generation was stopped because it hung
    bool killing = false;
    bool is_free = false;                      ///< what follows the stopping generation uses up no restart
    std::string failure;                       ///< a cause that is no worker: rendezvous, lost node, hang
    std::optional<TimePoint> failure_decided;  ///< when; what workers do after that, they do because of it
};

namespace job_event {
/// Enough nodes have joined; workers per node in group-rank order.
struct WorldFormed {
    std::vector<int> workers;
};
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
    std::string what;         ///< "rank 5 on node02, signal 9 (SIGKILL)"
    std::int64_t steps = -1;  ///< that it has done; -1: it does not say
};
struct NodeEnded {
    int node;
};
/// `others_go_on`: enough nodes are left, or wait. `others_may_follow`: so long what took this one may be
/// seen to take more.
struct NodeLost {
    int node;
    std::string why;
    bool others_go_on = false;
    Duration others_may_follow{};
};
/// So many nodes wait that a world formed now would take in.
struct NodesWaiting {
    int nodes;
};
/// So many nodes are silent that they may go on without this controller: its workers are killed, without a
/// grace in which they would run beside the others' next generation.
struct Outnumbered {
    std::string why;
};
/// A signal whose action is Stop. The `source` is the ddprun that got it (a number of its own): what is sent
/// to the ddprun of every node (scancel, mpirun) is one request to stop, and only who asks for a second time
/// means "now".
struct StopAsked {
    int signal;
    std::uint64_t source;
    int node = -1;  ///< of the running world; -1: the head's own ddprun, or one that waits
    std::string host = {};
    bool others_go_on =
        false;  ///< it is a node's leave: not the head's, and enough nodes are left without it
};
/// Preemption: a signal with that action, the walltime, `ddprun drain`.
struct PreemptAsked {
    int signal;
    std::string why;
    std::optional<Duration> left = {};
};
/// The hang detector's verdict. `what` names the ranks.
struct HangFound {
    std::string what;
    int culprit = -1;
};
/// When the job is stopped for its walltime, by us or by the scheduler.
struct WalltimeKnown {
    TimePoint time_up;
};
struct TimerFired {};
}  // namespace job_event

using JobEvent = std::variant<job_event::WorldFormed, job_event::JoinFailed, job_event::WorkerEnded,
                              job_event::NodeEnded, job_event::NodeLost, job_event::NodesWaiting,
                              job_event::Outnumbered, job_event::StopAsked, job_event::PreemptAsked,
                              job_event::HangFound, job_event::WalltimeKnown, job_event::TimerFired>;

namespace job_action {
/// Start this generation on every node.
struct StartGeneration {
    std::uint64_t generation;
    int restart_count;
};
/// Every node: stop signal, grace, then SIGKILL. `failed_rank`: >= 0 ends collectives at once.
struct StopGeneration {
    int signal;
    Duration grace;
    int failed_rank;
    std::string why;
};
struct KillGeneration {};
struct KillNode {
    int node;
};
/// This node is in no further world.
struct NodeLeaves {
    std::uint64_t source;
};
/// Nothing of it runs any more: its ddprun ends.
struct Dismiss {
    std::uint64_t source;
};
/// libddp workers are told to save and stop; others get the signal.
struct NotifyPreempt {
    std::string why;
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
/// The job is over; its end is in the state and in the collected worker ends.
struct Finish {};
}  // namespace job_action

using JobAction =
    std::variant<job_action::StartGeneration, job_action::StopGeneration, job_action::KillGeneration,
                 job_action::KillNode, job_action::NodeLeaves, job_action::Dismiss, job_action::NotifyPreempt,
                 job_action::SetTimer, job_action::Say, job_action::Rejoin, job_action::Finish>;

/// The parts of the command line that the decisions need, and one random number per decision.
struct JobPolicy {
    RestartSpec restart;
    Duration shutdown_timeout = std::chrono::seconds(30);
    /// Grace of survivors after a failure: they have nothing to save, most hang in a collective.
    Duration failure_grace = std::chrono::seconds(5);
    Duration preempt_grace = std::chrono::seconds(30);
    /// A scheduler's SIGTERM comes by several ways at once (PBS: to every process, and again from pbsdsh or
    /// mpiexec, which got it too): what the same ddprun hears of it within this span is one request. Zero:
    /// every signal counts.
    Duration one_stop = Duration::zero();
    Grow grow = Grow::Now;
    double random = 0;
};

/// Pure: changes `state`, returns what to do, in order.
std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now);

}  // namespace ddprun
