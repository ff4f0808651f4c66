#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "launcher/ends/useful_time.h"
#include "launcher/head/job_event.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// How long the head waits after the agents' own limit (--recover-within) for all ranks to join a generation
/// in place.
inline constexpr Duration kJoinTimeout = std::chrono::seconds(10);

/// How long the head waits for the report of a worker's end when workers have left their generation although
/// nobody has ended.
inline constexpr Duration kEndReportTimeout = std::chrono::milliseconds(100);

/// The pause before a worker is started again in place that could not be started at all: processes or memory
/// may be short for a moment.
inline constexpr Duration kSpawnPause = std::chrono::seconds(1);

/// Nodes that come or leave within this span cause one new generation.
inline constexpr Duration kOneChange = std::chrono::seconds(1);

/// The first story: how a generation ends, and what follows (generation.cpp).
///
/// A failure stops the other workers. When all nodes have ended, the same nodes begin another generation, if
/// the budget of restarts, the walltime and the failure itself allow it; a back-off may come before it. The
/// first failure decides; later ends in the same generation are its consequences.
///
/// SIGTERM at the ddprun of one node means that the node leaves if the others are enough without it, else
/// that the job stops. When every node gets SIGTERM (scancel, mpirun, qdel), the first signal does not tell
/// which of the two is meant. So both begin alike: all workers get a notice, SIGTERM and the whole grace.
/// Each further signalled node leaves too. When too few nodes would remain, or the head itself is signalled,
/// the job stops instead; the grace already running is kept. A generation that began in between is stopped
/// with a whole grace as well.
///
/// With --recover=program a worker's failure stops nobody. When all have ended, the job is over if one has
/// succeeded; else the first failure is handled like any other.
struct GenerationEnd {
    /// What follows the end of a stopping generation.
    enum class After : std::uint8_t { Finish, Restart, Rejoin };
    /// A stop of all workers.
    struct Stop {
        int signal = 0;
        Duration grace{};
        std::string why;
        TimePoint since{};
        std::optional<Duration> may_save = {};  ///< tell the workers to save within this time
        bool saves_in_place = false;  ///< after a death the workers form another generation in place, to save
    };
    struct StopSource {
        std::uint64_t source = 0;
        TimePoint since{};  ///< its first request
    };
    struct Failure {
        int rank = 0;
        FailureFacts facts;
        std::string what;
    };

    After after = After::Finish;
    bool is_free = false;                      ///< the next generation uses up no restart
    std::optional<Stop> stop;                  ///< Stopping: workers stop as asked, not for a failure
    bool has_ended_collectives = false;        ///< Stopping: all nodes know that a rank will never answer
    bool killing = false;                      ///< all workers have been killed
    bool hung = false;                         ///< the generation was stopped because it hung
    std::string failure;                       ///< a cause other than a worker: rendezvous, lost node, hang
    std::optional<TimePoint> failure_decided;  ///< when; later ends of workers are its consequences
    std::optional<Failure> outlived;           ///< the first failure, where the others go on
    // Of the whole job.
    std::optional<int> stopped_by;  ///< the signal that asked us to stop first
    std::vector<StopSource> stop_sources;
    bool preempted = false;
    bool out_of_time = false;             ///< there was no time left for a restart
    std::optional<TimePoint> idle_since;  ///< when the last generation failed or was stopped
    LostTime lost;
};

/// The second story: how a failure is recovered in place (recovery.cpp).
///
/// When all workers have announced that they survive the end of a generation, a failure begins the next
/// generation at once, in which only the failed ranks start again. The phase stays Running, and no restart is
/// used up. `in_place` is set until all ranks have joined. A rank that has ended before its node knew of the
/// new generation (`is_late`) starts again with the others of that node. Ranks that have finished wait for
/// `is_released`, so that a failure before it can be recovered.
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
struct Recovery {
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
        std::int64_t steps = -1;     ///< the most steps reported by suspended nodes
        std::int64_t began_at = -1;  ///< the step with which this generation has begun

        [[nodiscard]] bool is_rehearsal() const { return cause.empty(); }
        [[nodiscard]] int first_failed() const { return failed.empty() ? -1 : failed.front(); }
        void add_failed(const std::vector<int>& more);
    };
    /// A change of the world that is due.
    struct Change {
        TimePoint at = kNever;
        std::string why;
    };

    std::optional<InPlace> in_place;               ///< a recovery that is under way
    Change let_go;                                 ///< ranks have left the generation by themselves
    std::optional<GenerationEnd::Stop> held_stop;  ///< follows when the suspended workers have a world again
    std::string cannot_recover;                    ///< the first refusal of a worker; "" none
    bool is_released = false;                      ///< ranks that have finished may end
    // Of the whole job.
    std::uint64_t hang_ended = 0;  ///< the generation in which a rank was last killed because it hung
    int recoveries = 0;            ///< failures that were recovered in place
    int rehearsals = 0;            ///< generations in place without a failure
    Duration longest_start{};      ///< until all workers that started together had joined
};

/// The third story: how the nodes of the world change (world_change.cpp).
///
/// When the nodes of a generation change, the job goes back to Joining, so that a spare or a returning node
/// can take a free place. With enough nodes this is no restart: it uses up none and does not back off. With
/// too few it is a restart like any other, also when nodes become too few while the generation stops. Several
/// changes are taken as one: the next generation waits for kOneChange after a node has come or asked to
/// leave, and after a lost node for as long as others may follow.
///
/// Workers that recover in place are suspended instead. A node that leaves goes on for kOneChange, in which
/// the leave may become a stop of all; then the others go on without it, and its workers are stopped.
struct WorldChange {
    int waiting_nodes = 0;       ///< waiting nodes that a world formed now would take in
    TimePoint grow_at = kNever;  ///< when they are taken in, unless the world changes before
    Recovery::Change leave;      ///< nodes leave, and the others go on in place
};

/// What the controller decides for the whole job, without acting.
///
///   Joining --world formed--> Running --failure, signal, loss--> Stopping --all ended--> BackingOff
///      ^                        |  \--all exited 0--> Succeeded       |                        |
///      |                        |                        |            +--> Finished            |
///      +------------------------+------------------------+--- Finished        new generation <-+
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
    struct Node {
        int workers = 0;
        int succeeded = 0;
        bool ended = false;  ///< no worker is left on it
        bool lost = false;
        /// The number of its ddprun, which ends when no worker is left on it.
        std::optional<std::uint64_t> leaving = {};
        bool can_recover = false;  ///< all its workers survive the end of a generation
        bool knows = false;        ///< it has been heard of in this generation
        bool suspended = false;    ///< it has confirmed that this generation is over
        bool joined = false;       ///< all its workers are in this generation's world
        bool finished = false;     ///< all its workers have done their work

        [[nodiscard]] bool has_finished() const { return ended && succeeded == workers; }
        [[nodiscard]] bool is_there() const { return !ended && !lost; }
    };

    Phase phase = Phase::Joining;
    std::uint64_t generation = 0;  ///< the current or last one; 0 none yet
    std::vector<Node> nodes;
    int nodes_there = 0;  ///< the number of `nodes` neither ended nor lost, because large jobs ask often
    int unfinished = 0;   ///< workers that have not succeeded
    TimePoint generation_started{};
    TimePoint timer = kNever;    ///< when TimerFired is due
    TimePoint time_up = kNever;  ///< the walltime notice, or the walltime's end if there is no notice
    int restarts_used = 0;
    RestartHistory history;
    bool has_run = false;  ///< all nodes of a generation have started their workers
    GenerationEnd end;
    Recovery recovery;
    WorldChange change;

    /// True when a worker has succeeded: it is not run again for a new node, so this generation runs to its
    /// end.
    [[nodiscard]] bool anybody_succeeded() const;
    /// True while workers go on, or wait to go on.
    [[nodiscard]] bool is_under_way() const { return phase == Phase::Running || phase == Phase::Suspended; }
    [[nodiscard]] bool nobody_runs() const { return phase == Phase::Joining || phase == Phase::BackingOff; }
    [[nodiscard]] bool is_over() const { return phase == Phase::Finished || phase == Phase::Succeeded; }
    /// True when all workers have announced that they survive the end of a generation.
    [[nodiscard]] bool all_can_recover() const;
    /// True when the workers of a node have announced it.
    [[nodiscard]] bool can_recover_somewhere() const;
    /// The workers of the world.
    [[nodiscard]] int ranks() const;
    [[nodiscard]] int first_rank_of(int node) const;
    [[nodiscard]] std::vector<int> ranks_of(std::size_t node) const;
    /// "4 workers": the number that may be alive.
    [[nodiscard]] std::string describe_alive() const;
};

/// What the decisions need beside the state.
struct JobPolicy {
    const JobSpec& spec;  ///< borrowed
    /// A scheduler's SIGTERM comes by several ways at once (PBS: to every process, and again from pbsdsh or
    /// mpiexec, which got it too): all that the same ddprun gets within this span are one request. Zero:
    /// every signal counts.
    Duration one_stop = Duration::zero();
    double random = 0;  ///< in [0, 1), spreads the back-off

    /// Grace of the survivors of a failure: they have nothing to save, and most hang in a collective.
    [[nodiscard]] Duration failure_grace() const {
        return std::min(spec.failure_grace, spec.shutdown_timeout);
    }
};

/// Pure: changes `state`, returns what to do, in order.
std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now);

struct InPlaceDecision {
    bool in_place = false;
    std::string why;  ///< why not; "" where nobody expects it, or where the decision on a restart says it
};

/// Decides whether a rank that hangs is killed, to start again in place. Pure.
InPlaceDecision decide_on_hang(const JobState& state, const JobPolicy& policy, TimePoint now);

/// A few words for people: whether this job recovers in place, or why not.
std::string describe_recovery(const JobState& state, RecoverSpec::Mode mode);

/// One line at the end of a job with --rehearse; "" where none is needed.
std::string describe_rehearsals(const JobState& state, const RecoverSpec& spec);

}  // namespace ddprun
