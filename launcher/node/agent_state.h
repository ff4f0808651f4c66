#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/os/system.h"
#include "env/result.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// The states of one worker process, as its agent sees it.
///
///   Running --stop--> Stopping --kill--> Killed --exit--> Ended
///      \________________ exit ______________________________/
///
/// The stop signal is sent once, however often it is requested; a kill may follow a stop, never the other way
/// round.
enum class WorkerState : std::uint8_t { Running, Stopping, Killed, Ended };

enum class WorkerEvent : std::uint8_t { StopRequested, KillRequested, Exited };

enum class WorkerAction : std::uint8_t {
    None,
    SendStop,   ///< the stop signal, to the group
    SendKill,   ///< SIGKILL, to the group
    BuryGroup,  ///< a signal to the rest of the group, then reap its leader
};

struct WorkerStep {
    WorkerState next;
    WorkerAction action;
    bool operator==(const WorkerStep&) const = default;
};

/// Pure. An event that makes no sense in a state (a second exit) changes nothing.
WorkerStep step(WorkerState state, WorkerEvent event);

/// Which process received a signal for the workers: this node's ddprun, or the head's, which tells all nodes.
enum class SignalFrom { Here, Head };

/// Recognises a signal that a scheduler sent to the ddprun of every node: it comes from both sides, and no
/// worker may get it twice. Pure.
class ForwardedSignals {
  public:
    /// The longest time between the two.
    static constexpr Duration kApart = std::chrono::seconds(2);
    /// False: the signal has come from the other side already, and was passed on.
    bool is_new(int signal, SignalFrom from, TimePoint now);

  private:
    struct Passed {
        int signal;
        SignalFrom from;
        TimePoint when;
    };
    std::vector<Passed> unanswered_;  ///< signals that have come from one side only
};

/// The decisions of one node's agent, without acting: which workers get which signal, when the grace is over,
/// when a generation has ended.
///
///   Idle --start--> [AwaitingGpus -->] Starting --spawned--> Running --stop--> Stopping --grace--> Killing
///                                          \________________ last exit _______________________________/
///                                                                |
///   Idle <--swept-- Sweeping <-----------------------------------'
///
/// AwaitingGpus: a restart waits, for a bounded time, until the memory of the last generation's workers is
/// free. Sweeping: all workers have ended; descendants that they left get SIGTERM, then SIGKILL after
/// kStrayGrace, and are waited for, for a bounded time, before the generation counts as ended. Python's
/// resource tracker is such a descendant: it ignores SIGTERM, and removes the worker's shared memory within
/// milliseconds of its end.
///
/// Recovery in place: when all workers have announced that they survive the end of a generation, a failure
/// ends nothing here; the head decides. RecoverRequested begins a new generation: Running goes back to
/// Starting, which starts the workers that have ended. Between the two, Running may become Suspended: the
/// generation is over, and its workers wait until the head knows the next world. Stopping goes back to
/// Starting in the same way when a worker dies before all have saved: the head says whether it does, or that
/// no generation follows (`is_last`).
///
/// Workers that do not leave a generation, or do not come to the next one, are killed when their time is over
/// (limit_of in agent_state.cpp), which the head hears of as of any failure. A worker that has mapped the
/// next generation's segment, or says so, has come: it waits for others, maybe of another node, and only the
/// head gives it up.
struct AgentState {
    enum class Phase : std::uint8_t {
        Idle,
        AwaitingGpus,
        Starting,
        Running,
        Suspended,
        Stopping,
        Killing,
        Sweeping
    };
    /// How far a worker is in recovery in place (env/lifeline.h).
    using Stage = rdzv::WorkerStage;  ///< here up to Finished
    struct Worker {
        pid_t pid = 0;  ///< 0: not spawned
        WorkerState state = WorkerState::Running;
        bool asked_to_stop = false;  ///< we signalled it before it ended, so its end is ours
        Stage stage = Stage::Started;
        bool has_let_go = false;   ///< it has left the group of this generation
        bool has_come = false;     ///< it has said that it waits for the others of this generation
        bool is_new = false;       ///< it replaces another one, and has not joined yet
        bool stop_is_due = false;  ///< it gets the stop signal when it has joined
        std::uint64_t moves = 0;   ///< Progress::moves at the last look
    };
    /// The progress of a worker, as its shared memory shows it.
    struct Progress {
        bool has_mapped = false;  ///< the segment of this generation
        bool is_stopped = false;  ///< by SIGSTOP or a debugger
        std::uint64_t moves =
            0;  ///< its collectives in this generation, and tensors that it gave or received
        Duration slowest_unit = {};  ///< the longest time between two of its commits; zero: not known
    };

    Phase phase = Phase::Idle;
    bool without_grace = false;       ///< KillRequested: processes that workers leave are killed at once
    bool kills_strays = false;        ///< Sweeping: the strays' grace is over
    std::vector<pid_t> asked_strays;  ///< Sweeping: those that the last search found; each has had SIGTERM
    bool told_of_strays = false;
    std::uint64_t generation = 0;
    std::vector<Worker> workers;  ///< by local rank
    int stop_signal = 0;
    TimePoint deadline = kNever;      ///< of the grace, of the sweep, or of a recovery
    Duration recover_within{};        ///< zero: no recovery in place
    Duration start_limit{};           ///< the time that workers which start have to join, where it is longer
    TimePoint waits_since{};          ///< when workers were told to leave a generation, or to join one
    Duration longest_wait{};          ///< since then, for any worker
    Stage reported = Stage::Started;  ///< the stage that all workers have reached, as the head knows
    bool refuses = false;        ///< a worker has reported that it does not survive the end of a generation
    bool is_recovering = false;  ///< a generation in place has begun, and not all have joined it
    bool is_released = false;    ///< workers that have finished may end
    bool awaits_head = false;    ///< a worker has failed, and the head has not said what follows
    bool told_let_go = false;    ///< the head knows that a worker has left this generation by itself
    bool is_last = false;        ///< Stopping: no generation in place follows
    /// A stop that came while workers of a generation in place were being started: they have to meet first.
    struct DueStop {
        int signal = 0;
        TimePoint deadline{};
        bool is_last = true;
    };
    std::optional<DueStop> due_stop;

    [[nodiscard]] int alive() const;
    /// True when some workers have announced that they survive the end of a generation, but not all.
    [[nodiscard]] bool is_announcing() const;
    [[nodiscard]] bool can_recover() const {
        return recover_within > Duration::zero() && reported >= Stage::Announced && !refuses;
    }
    /// True while workers are started, run, or wait for the next generation.
    [[nodiscard]] bool is_under_way() const;
    /// True when the workers may leave this generation before the head begins the next one in place.
    [[nodiscard]] bool may_be_left() const { return is_under_way() && can_recover() && !is_released; }
    /// True when no worker of the suspended generation is in its group any more.
    [[nodiscard]] bool is_left() const;
    /// The local rank of a pid of this generation; -1: not a worker.
    [[nodiscard]] int local_rank_of(pid_t pid) const;
};

namespace agent_event {
struct StartRequested {
    std::uint64_t generation;
    int workers;
    bool await_gpus = false;
    Duration recover_within{};  ///< zero: workers are not asked whether they can recover in place
    bool in_place = false;      ///< the workers join others, which go on
    Duration start_limit{};
};
/// The generation is over, and no worker is stopped: RecoverRequested or StopRequested follows. A worker that
/// has not left the generation `within` that time is killed.
struct SuspendRequested {
    Duration within = Duration::max();
};
/// Starts the workers that have ended again, in a new generation; the others go on.
struct RecoverRequested {
    std::uint64_t generation;
    Duration start_limit{};
};
/// A worker reports its stage. `generation` is the one that it has joined or finished.
struct StageReached {
    int local_rank;
    AgentState::Stage stage;
    std::uint64_t generation = 0;
};
/// A worker reports that it waits for the other ranks of a generation.
struct Came {
    int local_rank;
    std::uint64_t generation;
};
/// The head lets workers that have finished end, now and later.
struct Released {};
struct Refused {
    int local_rank;
    std::string why;
};
/// A worker has reported an error, for which the others leave the generation: its end follows.
struct ErrorReported {};
/// A worker has left the group of a generation.
struct LetGo {
    int local_rank;
    std::uint64_t generation;
    std::string why = {};
};
/// The GPUs' memory is free, or the wait for it is over.
struct GpusFree {};
struct Spawned {
    int local_rank;
    pid_t pid;
};
/// The worker never ran. No more workers are started; the controller decides about the rest.
struct SpawnFailed {
    int local_rank;
    Error why;
};
struct Exited {
    os::ChildExit exit;
};
struct StopRequested {
    int signal;
    Duration grace;
    bool is_last = true;  ///< no generation in place follows, whatever happens to the workers meanwhile
};
/// A worker has died while the workers stop, and none starts again in its place.
struct NoneFollows {};
/// The workers are killed without a grace: after the second Ctrl-C, or when the controller is lost.
struct KillRequested {};
struct DeadlinePassed {
    std::vector<AgentState::Progress> workers = {};  ///< by local rank; empty: not known
};
/// The result of one search for stray descendants.
struct Swept {
    std::vector<pid_t> still_there;
};
}  // namespace agent_event

using AgentEvent =
    std::variant<agent_event::StartRequested, agent_event::SuspendRequested, agent_event::RecoverRequested,
                 agent_event::StageReached, agent_event::Came, agent_event::Released, agent_event::Refused,
                 agent_event::ErrorReported, agent_event::LetGo, agent_event::GpusFree, agent_event::Spawned,
                 agent_event::SpawnFailed, agent_event::Exited, agent_event::StopRequested,
                 agent_event::NoneFollows, agent_event::KillRequested, agent_event::DeadlinePassed,
                 agent_event::Swept>;

namespace agent_action {
/// Feed GpusFree when the GPUs' memory is free, or after a bounded time.
struct AwaitGpus {};
struct SpawnNext {
    int local_rank;
};
struct ReportStarted {};
/// All workers have come to this stage.
struct ReportStage {
    AgentState::Stage stage;
};
struct ReportSuspended {};
struct ReportRefusal {
    int local_rank;
    std::string why;
};
/// A worker has left the generation, which the head has not ended.
struct ReportLetGo {
    int local_rank;
    std::string why;
};
/// Not all workers have joined the generation, but those that are missing may still do so, or receive a
/// state.
struct ReportSlow {};
/// Kill these workers as failed ones: the others wait for them.
struct KillLate {
    std::vector<int> local_ranks;
};
/// Tell a worker that no generation follows the one that it has left.
struct TellLast {
    int local_rank;
};
/// Tell a worker that has finished that it may end.
struct TellRelease {
    int local_rank;
};
/// Signal a worker with its group, or the worker alone: its children may then still end by themselves.
struct SignalWorker {
    pid_t pid;
    int signal;
    bool alone = false;
};
/// Signal the rest of the group (0: it has had the signal), then reap the leader, in this order (see
/// System::next_exit). Kill what is still in the group after kStrayGrace.
struct BuryGroup {
    pid_t pid;
    int signal;
};
/// Reap a process that is no worker: an orphaned grandchild.
struct ReapStranger {
    pid_t pid;
};
struct ReportExit {
    int local_rank;
    os::ChildExit exit;
    bool by_us;
    std::optional<Error> start_failure = {};  ///< nullopt: it ran
};
/// Find descendants, send them the signal, feed Swept. SIGTERM goes only to those that no earlier search has
/// signalled.
struct Sweep {
    int signal;
};
/// Report that these processes, which did not end by themselves, are being killed.
struct ReportStrays {
    std::size_t count;
};
struct SetDeadline {
    TimePoint when;
};
/// All processes are gone; those that outlived a bounded wait are in `unkillable`.
struct ReportEnded {
    std::vector<pid_t> unkillable;
};
}  // namespace agent_action

using AgentAction = std::variant<
    agent_action::AwaitGpus, agent_action::SpawnNext, agent_action::ReportStarted, agent_action::ReportStage,
    agent_action::ReportSuspended, agent_action::ReportRefusal, agent_action::ReportLetGo,
    agent_action::ReportSlow, agent_action::KillLate, agent_action::TellLast, agent_action::TellRelease,
    agent_action::SignalWorker, agent_action::BuryGroup, agent_action::ReapStranger, agent_action::ReportExit,
    agent_action::Sweep, agent_action::ReportStrays, agent_action::SetDeadline, agent_action::ReportEnded>;

/// How long a worker's descendants may go on after SIGTERM.
inline constexpr Duration kStrayGrace = std::chrono::seconds(2);
/// How long processes that got SIGKILL are waited for before they are reported as unkillable.
inline constexpr Duration kKillTimeout = std::chrono::seconds(5);

/// Pure: changes `state`, returns what to do, in order.
std::vector<AgentAction> step(AgentState& state, const AgentEvent& event, TimePoint now);

}  // namespace ddprun
