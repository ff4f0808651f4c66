#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "launcher/ends/useful_time.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The facts about a failed generation that a decision on a restart needs.
struct FailureFacts {
    bool never_ran =
        false;  ///< exec failed: wrong program, no permission, missing interpreter, no more processes
    bool signaled = false;
    int status = 0;             ///< exit code or signal
    bool made_progress = true;  ///< the generation got further than the one before (steps, or time)
    std::string meaning = {};   ///< what the end probably means; "" no more than it says itself
    bool ran_before = false;    ///< all nodes have run the program in this job
};

struct RestartDecision {
    bool restart = false;
    TimePoint at{};   ///< when to restart; later than now with a back-off
    std::string why;  ///< "1 of 3 restarts left", "exit code 64 means wrong usage: a restart cannot help"
    bool out_of_time = false;  ///< no restart because of the walltime alone: the job may go on in another run
};

/// The past of a job that limits further restarts.
struct RestartHistory {
    std::vector<TimePoint> restarts;  ///< when each restart was decided, oldest first
    int without_progress =
        0;  ///< generations in a row without progress, ended by failures or by nodes that came or went
    std::int64_t furthest_step = -1;  ///< of any worker; -1: no worker has told one
    // Since all workers were last started.
    int stuck_recoveries = 0;          ///< recoveries in a row without a further step
    std::int64_t recovered_step = -1;  ///< the furthest step at the last of them; -1: none
};

/// After this many generations in a row without progress there are no more restarts, whatever the budget, and
/// new nodes have to wait.
inline constexpr int kStuckGenerations = 5;

/// A generation that ran this long counts as having made progress. A generation that has less time left
/// before the walltime ends is not started.
inline constexpr Duration kProgressAge = std::chrono::seconds(60);

/// How long the head waits after the agents' own limit (--recover-within) for all ranks to join a generation
/// in place.
inline constexpr Duration kJoinPatience = std::chrono::seconds(10);

/// When workers have left their generation although nobody has ended, an end may still be reported this long.
inline constexpr Duration kLetGoPatience = std::chrono::milliseconds(100);

/// The pause before a worker is started again in place that could not be started at all: processes or memory
/// may be short for a moment.
inline constexpr Duration kSpawnPause = std::chrono::seconds(1);

/// Nodes that come or leave within this span cause one new generation.
inline constexpr Duration kOneChange = std::chrono::seconds(1);

/// Decides whether and when to restart. `random` in [0, 1) spreads the back-off (half to all of it), so that
/// jobs that lost the same file server do not restart at the same instant. `time_up`: when the job is stopped
/// for its walltime; kNever: not known. Pure.
RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random,
                               TimePoint time_up = kNever);

/// Why a restart of this program cannot help; "" when it may. It cannot after EX_USAGE, EX_DATAERR,
/// EX_NOINPUT, EX_CONFIG, 126, 127, 93 (do not requeue) and exec failures.
std::string permanent_failure(const FailureFacts& failure);

/// True for exit code 75: the worker was asked to stop, and has saved before its end. Pure.
bool stopped_early(const FailureFacts& failure);

/// What the controller decides for the whole job, without acting.
///
///   Joining --world formed--> Running --failure, signal, loss--> Stopping --all ended--> BackingOff
///      ^                        |  \--all exited 0--> Succeeded       |                        |
///      |                        |                        |            +--> Finished            |
///      +------------------------+------------------------+--- Finished        new generation <-+
///
/// When the nodes of a generation change, the job goes back to Joining, so that a spare or a returning node
/// can take a free place. With enough nodes this is no restart: it uses up none and does not back off. With
/// too few it is a restart like any other, also when nodes become too few while the generation stops. Several
/// changes are taken as one: the next generation waits for kOneChange after a node has come or asked to
/// leave, and after a lost node for as long as others may follow.
///
/// SIGTERM at the ddprun of one node means that the node leaves if the others are enough without it, else
/// that the job stops. When every node gets SIGTERM (scancel, mpirun, qdel), the first one does not tell
/// which is meant. So both begin alike: all workers get a notice, SIGTERM and the whole grace. Each further
/// signalled node leaves too, until too few would be left or the head's own ddprun is signalled: then the
/// leave becomes a stop, and the grace runs on. A generation that began in between is stopped with a whole
/// grace as well.
///
/// Recovery in place (in_place.h): when all workers have announced that they survive the end of a generation,
/// a failure begins the next generation at once, in which only the failed ranks start again. The phase stays
/// Running, and no restart is used up. `in_place` is set until all ranks have joined. A rank that has ended
/// before its node knew of the new generation (`is_late`) starts again with the others of that node. Ranks
/// that have finished wait for `is_released`, so that a failure before it can be recovered.
///
/// With --recover=program a worker's failure stops nobody. When all have ended, the job is over if one has
/// succeeded; else the first failure is handled like any other.
///
/// A node that leaves goes on for kOneChange, in which the leave may become a stop of all; then the others go
/// on without it, and its workers are stopped (`leave`).
///
/// If nodes of the world are lost, leave or come, or the ranks have left it although nobody has ended,
/// Running becomes Suspended: the generation is over, and its workers wait. When all nodes have confirmed
/// that, and no further loss is expected, the nodes that are there form the world anew, and the next
/// generation begins in place: ranks of new nodes start, ranks of lost nodes start on a spare or are gone.
///
///   Running --lost node, leave, new node, broken link--> Suspended --all have confirmed--> Running
///                                                  \--too few nodes, refusal--> Stopping
///
/// A stop or a preemption of suspended workers follows when they have a world again, so that they can save
/// together; its grace runs meanwhile. For the same reason a rank that a signal kills while the workers stop
/// as asked starts again in place, and the stop goes on in the next generation.
struct JobState {
    enum class Phase : std::uint8_t {
        Joining,
        Running,
        Suspended,
        Succeeded,
        Stopping,
        BackingOff,
        Finished
    };
    /// What follows the end of a stopping generation.
    enum class After : std::uint8_t { Finish, Restart, Rejoin };
    struct Node {
        int workers = 0;
        int succeeded = 0;
        bool ended = false;  ///< no worker is left on it
        bool lost = false;
        std::optional<std::uint64_t> leaving =
            {};                    ///< the number of its ddprun, which ends when no worker is left on it
        bool can_recover = false;  ///< all its workers survive the end of a generation
        bool knows = false;        ///< it has been heard of in this generation
        bool suspended = false;    ///< it has confirmed that this generation is over
        bool joined = false;       ///< all its workers are in this generation's world
        bool finished = false;     ///< all its workers have done their work
    };
    struct InPlace {
        TimePoint since{};           ///< the first failure, or the rehearsal's begin
        std::string cause{};         ///< the first failure; "" none: a rehearsal
        bool is_workers = false;     ///< the cause is the end of a worker
        bool is_growth = false;      ///< the cause is that nodes have come: no failure
        int ranks = 0;               ///< of the world at that time
        int lost = 0;                ///< of these: ranks that have failed since, or whose nodes are lost
        std::vector<int> failed{};   ///< ranks that start again, in the numbers of the current world
        TimePoint give_up = kNever;  ///< when the wait for ranks that join, or for nodes that suspend, ends
        TimePoint losses_until{};    ///< Suspended: more nodes may be noticed as lost till then; {}: none
        std::int64_t steps = -1;     ///< the most steps told by suspended nodes
        std::int64_t began_at = -1;  ///< the step with which this generation has begun

        [[nodiscard]] bool is_rehearsal() const { return cause.empty(); }
    };
    /// A stop of all workers.
    struct Stop {
        int signal = 0;
        Duration grace{};
        std::string why;
        TimePoint since{};
        std::optional<Duration> may_save = {};  ///< tell the workers to save within this time
        bool meets = false;  ///< after a death the workers form another generation in place, to save
    };
    /// A change of the world that is due.
    struct Change {
        TimePoint at = kNever;
        std::string why;
    };

    Phase phase = Phase::Joining;
    After after = After::Finish;
    std::uint64_t generation = 0;  ///< the current or last one; 0 none yet
    int restarts_used = 0;
    std::vector<Node> nodes;
    int nodes_there = 0;  ///< the number of `nodes` neither ended nor lost
    int unfinished = 0;   ///< workers that have not succeeded
    RestartHistory history;
    TimePoint generation_started{};
    TimePoint timer = kNever;       ///< when TimerFired is due
    int waiting_nodes = 0;          ///< waiting nodes that a world formed now would take in
    TimePoint grow_at = kNever;     ///< when they are taken in, unless the world changes before
    std::optional<int> stopped_by;  ///< the signal that asked us to stop first
    struct StopSource {
        std::uint64_t source = 0;
        TimePoint since{};  ///< its first request
    };
    std::vector<StopSource> stop_sources;
    TimePoint time_up = kNever;  ///< the walltime notice, or the walltime's end if there is no notice
    bool out_of_time = false;    ///< there was no time left for a restart
    bool preempted = false;
    bool hung = false;  ///< the generation was stopped because it hung
    bool killing = false;
    std::optional<InPlace> in_place;  ///< a recovery that is under way
    struct Failure {
        int rank = 0;
        FailureFacts facts;
        std::string what;
    };
    std::optional<Failure> outlived;     ///< the generation's first failure, where the others go on
    Change leave;                        ///< nodes leave, and the others go on in place
    Change let_go;                       ///< ranks have left the generation by themselves
    std::optional<Stop> held_stop;       ///< follows when the suspended workers have a world again
    std::optional<Stop> stop;            ///< Stopping: workers stop as asked, not for a failure
    bool has_ended_collectives = false;  ///< Stopping: all nodes know that a rank will never answer
    int recoveries = 0;                  ///< failures of the job so far that were recovered in place
    int rehearsals = 0;                  ///< generations in place without a failure
    bool has_run = false;                ///< all nodes of a generation have started their workers
    Duration longest_start{};            ///< until all workers that started together had joined
    LostTime lost;
    std::optional<TimePoint> idle_since;  ///< when the last generation failed or was stopped
    std::string cannot_recover;           ///< the first refusal of a worker; "" none
    bool is_released = false;             ///< ranks that have finished may end
    std::uint64_t hang_ended = 0;         ///< the generation in which a rank was last killed because it hung
    bool is_free = false;                 ///< the next generation uses up no restart
    std::string failure;                  ///< a cause other than a worker: rendezvous, lost node, hang
    std::optional<TimePoint> failure_decided;  ///< when; later ends of workers are its consequences

    /// True when a worker has succeeded: it is not run again for a new node, so this generation runs to its
    /// end.
    [[nodiscard]] bool anybody_succeeded() const;
    /// The workers of the world.
    [[nodiscard]] int ranks() const;
};

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
/// All workers of a node have started, or come to this stage of recovery in place (rdzv::WorkersReady).
struct NodeReady {
    enum class Stage : std::uint8_t {
        Started,
        Announced,
        Joined,
        Finished,
        Suspended,
        LetGo,
        Failing,
        Slow,
        Refused
    };
    int node;
    Stage stage;
    std::string why = {};     ///< of a refusal, or why a worker has let go
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
/// The silent nodes are so many that they may go on without this controller: its workers are killed without a
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

/// The parts of the command line that the decisions need, and one random number per decision.
struct JobPolicy {
    RestartSpec restart;
    RecoverSpec recover;
    Duration shutdown_timeout = std::chrono::seconds(30);
    /// Grace of the survivors of a failure: they have nothing to save, and most hang in a collective.
    Duration failure_grace = std::chrono::seconds(5);
    Duration preempt_grace = std::chrono::seconds(30);
    /// A scheduler's SIGTERM comes by several ways at once (PBS: to every process, and again from pbsdsh or
    /// mpiexec, which got it too): all that the same ddprun gets within this span are one request. Zero:
    /// every signal counts.
    Duration one_stop = Duration::zero();
    Grow grow = Grow::Now;
    double random = 0;
};

/// Pure: changes `state`, returns what to do, in order.
std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now);

}  // namespace ddprun
