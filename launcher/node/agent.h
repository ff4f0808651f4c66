#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/ends/explain.h"
#include "launcher/ends/useful_time.h"
#include "launcher/guard/guards.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/machine/machine.h"
#include "launcher/node/agent_state.h"
#include "launcher/node/file_watch.h"
#include "launcher/node/gpus.h"
#include "launcher/node/nccl_words.h"
#include "launcher/node/pmix/server.h"
#include "launcher/node/worker_memory.h"
#include "launcher/output/output.h"
#include "launcher/output/pipes.h"
#include "launcher/plan/plan.h"
#include "launcher/plan/program.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// What this node's agent needs to know for the whole job.
struct AgentConfig {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    std::string host;
    int store = -1;  ///< descriptor of the socket over which workers reach the store (listen_unix), borrowed
    std::string error_files;  ///< where the paths of error reports begin when there is no log directory
    std::string token;
    JobMark mark;                          ///< the mark that every worker carries
    std::vector<std::string> environment;  ///< "NAME=value": what the workers inherit
    std::uint64_t open_files = 0;          ///< soft limit on descriptors that workers get; 0 inherits ours
    std::optional<int> passed_descriptor;  ///< workers get this descriptor of ours under the same number
    JobCgroup* cgroup = nullptr;           ///< the workers' cgroup; null: there is none
    PmixServer* pmix = nullptr;            ///< the server of the workers' MPI; null: there is none
};

/// Starts, watches and stops the workers of one node: performs what agent_state decides.
///
/// Runs on the event loop's thread. Borrows its parts for its whole life. The controller's messages come in
/// through handle(); messages to the controller go out through `send`.
class Agent {
  public:
    using Send = std::function<void(rdzv::FromAgent)>;

    Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log,
          AgentConfig config, Send send);
    ~Agent();

    void handle(const rdzv::StartGeneration& order);
    void handle(const rdzv::StopGeneration& order);
    void handle(const rdzv::SuspendGeneration& order);
    void handle(const rdzv::Release& release);
    void handle(const rdzv::Notice& notice);
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
    void worker_aborted(int local_rank) { await_exit(local_rank, "called MPI_Abort"); }
    /// Handles SIGCHLD: all children that have ended.
    void on_child_exits();
    /// See reach_by(). Counts for the next generation.
    void reach_others_by(const std::string& address, const std::vector<std::string>& by_name) {
        reach_by(config_.machine.fabric, list_interfaces(), address, by_name);
    }

    /// Returns the stacks that this worker's libddp has sent since the last call.
    [[nodiscard]] std::string take_stacks(int local_rank);

    [[nodiscard]] bool idle() const { return state_.phase == AgentState::Phase::Idle; }
    [[nodiscard]] const AgentState& state() const { return state_; }
    /// This generation's segment; null before the first generation.
    [[nodiscard]] const SegmentFile* segment() const { return segment_.get(); }
    /// A worker's line of the segment, which it keeps alive: for a caller that reads it again after a
    /// restart.
    [[nodiscard]] std::shared_ptr<const RankLine> share_line(int local_rank) const {
        return {segment_, &segment_->line(local_rank)};
    }
    [[nodiscard]] int first_rank() const { return order_.first_rank; }
    [[nodiscard]] std::uint64_t generation() const { return order_.generation; }
    /// A variable of the worker's environment at its start, without those that ddprun sets (RANK, ...);
    /// nullopt: not set.
    [[nodiscard]] std::optional<std::string> variable(int local_rank, std::string_view name) const;
    /// What this worker's rank has committed; nullopt: nothing.
    [[nodiscard]] std::optional<CommittedTime> committed_time(int local_rank) const;
    /// Of the worker that has committed most.
    [[nodiscard]] CommittedTime most_committed() const;
    /// The longest time between two commits of this worker's rank; zero: it has committed nothing.
    [[nodiscard]] Duration slowest_unit(int local_rank) const;
    /// The content of the error file of this node's worker `rank`; "" none, or not this node's worker.
    [[nodiscard]] std::string error_report(int rank) const;
    /// The first worker of this node that failed by itself in this generation; nullopt: none.
    [[nodiscard]] const std::optional<rdzv::WorkerExited>& first_failure() const { return first_failure_; }
    /// When this generation's worker was started; TimePoint{}: not yet.
    [[nodiscard]] TimePoint started(int local_rank) const {
        return workers_[static_cast<std::size_t>(local_rank)].started;
    }

  private:
    struct Worker {
        WorkerPlan plan;
        TimePoint started{};
        TimePoint stop_asked = kNever;  ///< when we began to stop this node's workers
        bool is_awaited = false;        ///< the worker has reported its error, and should exit
        bool killed_failing = false;    ///< we killed it, because it had failed and did not exit
        UniqueFd lifeline;
        std::string error_path;
        std::string stacks;          ///< the stacks that the worker has sent
        std::string kill_why = {};   ///< why we killed it as a failed one; "" we did not
        std::int64_t began_at = -1;  ///< the steps with which it began its generation; -1: it did not say
    };

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
    void perform(const agent_action::BuryGroup& action);
    void perform(const agent_action::ReapStranger& action);
    void perform(const agent_action::ReportExit& action);
    void perform(const agent_action::Sweep& action);
    void perform(const agent_action::ReportStrays& action);
    void perform(const agent_action::SetDeadline& action);
    void perform(const agent_action::ReportEnded& action);

    void remember_last_workers();
    Status prepare(const rdzv::StartGeneration& order);
    [[nodiscard]] Result<std::unique_ptr<SegmentFile>> make_segment(std::size_t workers) const;
    Status make_kept_memory(int workers);
    void recover(const rdzv::StartGeneration& order);
    Status begin_in_place(const rdzv::StartGeneration& order);
    void replace(Worker& worker, WorkerPlan plan);
    [[nodiscard]] std::int64_t steps_of(int local_rank) const;
    [[nodiscard]] bool has_never_joined(int local_rank) const;
    void end_joining(int absent_rank);
    [[nodiscard]] bool tells_by_letters(int local_rank) const;
    [[nodiscard]] std::int64_t most_steps() const;
    void report_stage(const char* stage, std::int64_t steps);
    [[nodiscard]] std::vector<AgentState::Progress> progress() const;
    void send_generation(int local_rank);
    void begin_rehearsing();
    void ask_for_rehearsal();
    void kill_failed(std::string_view rank_and_why);
    void kill_failed(int local_rank, const std::string& why);
    void spawn_slice();
    Result<pid_t> spawn(int local_rank);
    Status place_error_file(Worker& worker, int local_rank) const;
    Status connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status give_descriptors(Worker& worker, WorkerEnv& env, os::SpawnSpec& spec,
                            std::vector<UniqueFd>& childs);
    void complete(const Worker& worker, WorkerEnv& env) const;
    std::vector<std::string> environment_of(const Worker& worker, const WorkerEnv& env) const;
    void add_pmix_variables(int local_index, std::vector<std::string>& environment) const;
    [[nodiscard]] StreamOwner owner_of(int local_rank) const;
    void listen_to_lifeline(int local_rank);
    void listen_to_nccl(WorkerPlan& plan);
    void tell(int local_rank, std::string_view packet) const;
    void read_lifeline(int local_rank);
    void hear(int local_rank, char letter, std::string_view text);
    bool hear_of_recovery(int local_rank, char letter, std::string_view text);
    bool hear_ready(int local_rank, std::string_view text);
    void hear_let_go(int local_rank, std::string_view text);
    void fail_start(const std::string& why);
    [[nodiscard]] bool reads_scalars() const;
    void send_scalars_later();
    void send_scalars();
    void end_scalars();
    void stop_begins();
    void end_waiting_for_agreement();
    [[nodiscard]] int missing_at_start() const;
    void kill_rest_of_group(pid_t group, int rank);
    void end_rest_of(const WorkerMark& worker, int rank, int signal);
    [[nodiscard]] std::vector<pid_t> strays();
    [[nodiscard]] std::string read_error_file(const Worker& worker) const;
    [[nodiscard]] Duration lead_of_error_files();
    void send_exits();
    void report_stop(const os::ChildStop& stop);
    void watch_error_files();
    void error_file_written(int local_rank);
    void await_exit(int local_rank, const std::string& what_it_did);
    void kill_failing(int local_rank, pid_t pid, const std::string& what_it_did);

    os::EventLoop& loop_;
    os::System& system_;
    Output& output_;
    Warden* warden_;
    os::Log& log_;
    AgentConfig config_;
    Send send_;
    std::function<void()> left_handler_ = [] {};

    AgentState state_;
    rdzv::StartGeneration order_;
    int first_logged_rank_ = 0;  ///< of the first worker when all of this node last started together
    std::vector<Worker> workers_;
    std::shared_ptr<SegmentFile> segment_;
    std::unique_ptr<KeptFile> kept_;          ///< null: no recovery in place
    TimePoint end_seen_{}, abort_set_{};      ///< of the last recovery, for the log
    std::unique_ptr<FileWatch> error_files_;  ///< null: error files are not watched
    std::int64_t rehearse_at_ = 0;            ///< steps of the first worker after which --rehearse asks
    os::EventLoop::TimerId rehearsal_timer_ = 0;
    os::EventLoop::TimerId watch_timer_ = 0;
    os::EventLoop::TimerId scalars_timer_ = 0;
    std::unique_ptr<NcclWords> nccl_words_;  ///< NCCL's lines of the first worker; null: not read
    UniqueFd null_;
    std::unique_ptr<StdinRelay> stdin_relay_;  ///< while a worker reads our terminal
    ForwardedSignals forwarded_;
    std::vector<pid_t>
        last_workers_;  ///< of the last generation with workers: their GPUs' memory may not be free yet
    GpuReleaseWait gpu_release_;
    int pending_spawn_ = -1;
    bool slice_posted_ = false;
    DeathWitness witness_;
    int absent_rank_ = -1;  ///< it ended with 0 before it had joined this generation; -1: none
    std::optional<rdzv::WorkerExited> first_failure_;
    std::optional<Duration> error_clock_lead_;  ///< lead of the error files' clock; nullopt: not measured
    std::vector<rdzv::WorkerExited> exits_;     ///< not sent yet; sent in the order of their likely causes
    os::EventLoop::TimerId deadline_timer_ = 0;
};

}  // namespace ddprun
