#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/ends/useful_time.h"
#include "launcher/guard/guards.h"
#include "launcher/node/agent_state.h"
#include "launcher/node/gpus.h"
#include "launcher/node/lifelines.h"
#include "launcher/node/scalars.h"
#include "launcher/node/worker_ends.h"
#include "launcher/node/worker_start.h"
#include "launcher/node/workers.h"
#include "launcher/output/output.h"

namespace ddprun {

/// Starts, watches and stops the workers of one node: performs what agent_state decides. WorkerStarter gives
/// workers what they need, Lifelines talk with them, WorkerEnds reports their ends, and LeftProcesses ends
/// what they leave behind.
///
/// Runs on the event loop's thread. Borrows its parts for its whole life. The controller's messages come in
/// through handle(); messages to the controller go out through `send`.
class Agent {
  public:
    Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log,
          AgentConfig config, SendToHead send);
    ~Agent();

    void handle(const rdzv::StartGeneration& order);
    void handle(const rdzv::StopGeneration& order);
    void handle(const rdzv::SuspendGeneration& order);
    void handle(const rdzv::Release& release);
    void handle(const rdzv::Waiting& waiting);
    void handle(const rdzv::ForwardSignal& order);
    void handle(const rdzv::EndCollectives& order);
    void handle(const rdzv::EndJoining& order);
    void handle(const rdzv::KillRank& order);
    void handle(const rdzv::Preempt& order);
    void handle(const rdzv::StopProposal& proposal);
    /// Ends the collectives of the generation; the workers wait for the next one. Call it only where they
    /// can: state().can_recover(). `failed_rank`: whose loss is the cause; -1 none. A worker that has not
    /// left the generation `within` that time is killed.
    void suspend(int failed_rank, const std::string& why, Duration within);
    /// Called when no worker is in the group of a suspended generation any more: they have left it or ended.
    void on_left(std::function<void()> handler) { left_handler_ = std::move(handler); }
    /// Kills all workers without grace: after the second Ctrl-C, or when the controller is lost.
    void kill_all();
    /// Passes a signal on to every worker's group ("forward and carry on"). A signal that comes from both
    /// sides is passed on once.
    void forward_signal(int signal, SignalFrom from);
    /// Sends a signal to the group of one worker. False: that worker does not run.
    bool signal_worker(int local_rank, int signal);
    /// Kills a worker that called MPI_Abort if it has not exited after `failure_grace`.
    void worker_aborted(int local_rank) { ends_.await_exit(local_rank, "called MPI_Abort"); }
    /// Handles SIGCHLD: all children that have ended.
    void on_child_exits();
    /// See reach_by(). Counts for the next generation.
    void reach_others_by(const std::string& address, const std::vector<std::string>& by_name) {
        reach_by(config_.machine.fabric, list_interfaces(), address, by_name);
    }

    /// Returns the stacks that this worker's libddp has sent since the last call.
    [[nodiscard]] std::string take_stacks(int local_rank) { return lifelines_.take_stacks(local_rank); }

    [[nodiscard]] bool idle() const { return state_.phase == AgentState::Phase::Idle; }
    [[nodiscard]] const AgentState& state() const { return state_; }
    /// This generation's segment; null before the first generation.
    [[nodiscard]] const SegmentFile* segment() const { return workers_.segment.get(); }
    /// A worker's line of the segment, which it keeps alive: for a caller that reads it again after a
    /// restart.
    [[nodiscard]] std::shared_ptr<const RankLine> share_line(int local_rank) const {
        return {workers_.segment, &workers_.segment->line(local_rank)};
    }
    [[nodiscard]] int first_rank() const { return workers_.order.first_rank; }
    [[nodiscard]] std::uint64_t generation() const { return workers_.order.generation; }
    /// A variable of the worker's environment at its start, without those that ddprun sets (RANK, ...);
    /// nullopt: not set.
    [[nodiscard]] std::optional<std::string> variable(int local_rank, std::string_view name) const {
        return starter_.variable(local_rank, name);
    }
    /// What this worker's rank has committed; nullopt: nothing.
    [[nodiscard]] std::optional<CommittedTime> committed_time(int local_rank) const {
        return workers_.committed_time(local_rank);
    }
    /// Of the worker that has committed most.
    [[nodiscard]] CommittedTime most_committed() const { return workers_.most_committed(); }
    /// The longest time between two commits of this worker's rank; zero: it has committed nothing.
    [[nodiscard]] Duration slowest_unit(int local_rank) const { return workers_.slowest_unit(local_rank); }
    /// The content of the error file of this node's worker `rank`; "" none, or not this node's worker.
    [[nodiscard]] std::string error_report(int rank) const { return ends_.error_report(rank); }
    /// The first worker of this node that failed by itself in this generation; nullopt: none.
    [[nodiscard]] const std::optional<rdzv::WorkerExited>& first_failure() const {
        return ends_.first_failure();
    }
    /// When this generation's worker was started; TimePoint{}: not yet.
    [[nodiscard]] TimePoint started(int local_rank) const { return workers_.at(local_rank).started; }

  private:
    void feed(const AgentEvent& event);
    void perform(const agent_action::AwaitGpus& action);
    void perform(const agent_action::SpawnNext& action);
    void perform(const agent_action::ReportStarted& action);
    void perform(const agent_action::ReportStage& action);
    void perform(const agent_action::ReportSuspended& action);
    void perform(const agent_action::ReportRefusal& action);
    void perform(const agent_action::ReportLetGo& action);
    void perform(const agent_action::ReportSlow& action);
    void perform(const agent_action::KillLate& action);
    void perform(const agent_action::TellLast& action);
    void perform(const agent_action::TellRelease& action);
    void perform(const agent_action::SignalWorker& action);
    void perform(const agent_action::BuryGroup& action) { left_.bury(action); }
    void perform(const agent_action::ReapStranger& action);
    void perform(const agent_action::ReportExit& action);
    void perform(const agent_action::Sweep& action) { feed(agent_event::Swept{left_.sweep(action.signal)}); }
    void perform(const agent_action::ReportStrays& action);
    void perform(const agent_action::SetDeadline& action);
    void perform(const agent_action::ReportEnded& action);

    void remember_last_workers();
    Status prepare(const rdzv::StartGeneration& order);
    Status make_segment(std::size_t workers);
    Status make_kept_memory(int workers);
    void spawn_slice();
    void fail_start(const std::string& why);
    void recover(const rdzv::StartGeneration& order);
    Status begin_in_place(const rdzv::StartGeneration& order);
    void report_stage(rdzv::WorkerStage stage, std::int64_t steps);
    void begin_rehearsing();
    void ask_for_rehearsal();
    void kill_failed(int local_rank, const std::string& why);
    void begin_stop();
    void end_waiting_for_agreement();
    void restart_warden(pid_t pid);
    void report_stop(const os::ChildStop& stop);
    void note_reported_error(int local_rank);

    os::EventLoop& loop_;
    os::System& system_;
    Output& output_;
    Warden* warden_;
    os::Log& log_;
    AgentConfig config_;
    SendToHead send_;
    std::function<void()> left_handler_ = [] {};

    NodeWorkers workers_;
    AgentState& state_ = workers_.state;
    Lifelines lifelines_;
    WorkerStarter starter_;
    WorkerEnds ends_;
    LeftProcesses left_;
    ScalarSender scalars_;
    std::int64_t rehearse_at_ = 0;  ///< steps of the first worker after which --rehearse asks
    ForwardedSignals forwarded_;
    /// Of the last generation with workers: their GPUs' memory may not be free yet.
    std::vector<pid_t> last_workers_;
    GpuReleaseWait gpu_release_;
    int pending_spawn_ = -1;
    bool slice_posted_ = false;
    os::EventLoop::TimerId rehearsal_timer_ = 0;
    os::EventLoop::TimerId deadline_timer_ = 0;
};

}  // namespace ddprun
