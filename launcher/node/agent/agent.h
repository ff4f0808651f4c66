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
#include "launcher/head/report/explain.h"
#include "launcher/node/agent/agent_state.h"
#include "launcher/node/agent/file_watch.h"
#include "launcher/node/agent/segment_file.h"
#include "launcher/node/fabric/nccl_words.h"
#include "launcher/node/gpu/gpu_release.h"
#include "launcher/node/guard/job_cgroup.h"
#include "launcher/node/guard/warden.h"
#include "launcher/node/output/output.h"
#include "launcher/node/output/stdin_relay.h"
#include "launcher/node/plan/machine.h"
#include "launcher/node/plan/plan.h"
#include "launcher/node/plan/program.h"
#include "launcher/node/pmix/server.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// What the agent of this node needs to know for the whole job.
struct AgentConfig {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    std::string host;
    int store = -1;  ///< descriptor of the socket by which workers reach the store (listen_unix), borrowed
    std::string token;
    JobMark mark;                          ///< that every worker carries
    std::vector<std::string> environment;  ///< "NAME=value": what the workers inherit
    std::uint64_t open_files = 0;          ///< soft limit on descriptors that workers get; 0 inherits ours
    std::optional<int> passed_descriptor;  ///< of ours, that workers get under the same number
    JobCgroup* cgroup = nullptr;           ///< where the workers live; null: there is none
    PmixServer* pmix = nullptr;            ///< that the workers' MPI finds; null: there is none
};

/// Starts, watches and stops the workers of one node: performs what agent_state decides.
///
/// Lives on the event loop's thread. Borrows its parts for its whole life. Everything the controller wants
/// comes in through handle(); everything it has to know goes out through `send`.
class Agent {
  public:
    using Send = std::function<void(rdzv::FromAgent)>;

    Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log,
          AgentConfig config, Send send);
    ~Agent();

    void handle(const rdzv::StartGeneration& order);
    void handle(const rdzv::StopGeneration& order);
    void handle(const rdzv::Notice& notice);
    /// No grace: the second Ctrl-C, or the controller is gone.
    void kill_all();
    /// Passes a signal on to every worker's group ("forward and carry on"); once, when it comes from both.
    void forward_signal(int signal, SignalFrom from);
    /// The same for one of them. False: it does not run.
    bool signal_worker(int local_rank, int signal);
    /// It has called MPI_Abort, and is killed if it goes on for longer than survivors of a failure may.
    void worker_aborted(int local_rank) { await_exit(local_rank, "called MPI_Abort"); }
    /// Some child has ended (SIGCHLD): sees to all that have.
    void on_child_exits();

    /// The stacks that libddp of this worker has sent since the last call.
    [[nodiscard]] std::string take_stacks(int local_rank);

    [[nodiscard]] bool idle() const { return state_.phase == AgentState::Phase::Idle; }
    [[nodiscard]] const AgentState& state() const { return state_; }
    /// This generation's segment; null before the first.
    [[nodiscard]] const SegmentFile* segment() const { return segment_.get(); }
    /// A worker's line of it, with a share of the segment: for whoever looks again after a restart.
    [[nodiscard]] std::shared_ptr<const RankLine> share_line(int local_rank) const {
        return {segment_, &segment_->line(local_rank)};
    }
    [[nodiscard]] int first_rank() const { return order_.first_rank; }
    [[nodiscard]] std::uint64_t generation() const { return order_.generation; }
    /// A variable of the worker's environment as it was started; nullopt: not set. Ours (RANK, ...) are not
    /// among them.
    [[nodiscard]] std::optional<std::string> variable(int local_rank, std::string_view name) const;
    /// What this node's worker of that rank has left in its error file; "" nothing, or it is none of ours.
    [[nodiscard]] std::string error_report(int rank) const;
    /// The first worker of this node that failed by itself in this generation; nullopt: none has.
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
        bool is_awaited = false;        ///< it has reported its error, and should exit
        bool killed_failing = false;    ///< it had failed, and did not
        UniqueFd lifeline;
        UniqueFd error_file;  ///< a memfd when there is no log directory
        std::string error_path;
        std::string stacks;  ///< that it has sent
    };

    void feed(const AgentEvent& event);
    void perform(const agent_action::AwaitGpus& action);
    void perform(const agent_action::SpawnNext& action);
    void perform(const agent_action::ReportStarted& action);
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
    void spawn_slice();
    Result<pid_t> spawn(int local_rank);
    Status connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status give_descriptors(Worker& worker, WorkerEnv& env, os::SpawnSpec& spec,
                            std::vector<UniqueFd>& childs);
    std::vector<std::string> environment_of(const Worker& worker, const WorkerEnv& env) const;
    void add_pmix_variables(int local_index, std::vector<std::string>& environment) const;
    [[nodiscard]] StreamOwner owner_of(int local_rank) const;
    void listen_to_lifeline(int local_rank);
    void listen_to_nccl(WorkerPlan& plan);
    void read_lifeline(int local_rank);
    void fail_start(const std::string& why);
    void stop_begins();
    void kill_rest_of_group(pid_t group, int rank);
    [[nodiscard]] std::vector<pid_t> strays();
    [[nodiscard]] std::string read_error_file(const Worker& worker) const;
    [[nodiscard]] Duration lead_of_error_files();
    void send_exits();
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

    AgentState state_;
    rdzv::StartGeneration order_;
    std::vector<Worker> workers_;
    std::shared_ptr<SegmentFile> segment_;
    std::unique_ptr<FileWatch> error_files_;  ///< null: nobody tells when one is written
    os::EventLoop::TimerId watch_timer_ = 0;
    std::unique_ptr<NcclWords> nccl_words_;  ///< of the first worker; null: nobody asks
    UniqueFd null_;
    std::unique_ptr<StdinRelay> stdin_relay_;  ///< while a worker reads our terminal
    ForwardedSignals forwarded_;
    std::vector<pid_t>
        last_workers_;  ///< of the last generation that had any: their GPUs' memory may not be free yet
    GpuReleaseWait gpu_release_;
    int pending_spawn_ = -1;
    bool slice_posted_ = false;
    DeathWitness witness_;
    std::optional<rdzv::WorkerExited> first_failure_;
    std::optional<Duration>
        error_clock_lead_;  ///< of this generation's error files; nullopt: no worker has left one
    std::vector<rdzv::WorkerExited>
        exits_;  ///< of the current sweep, sent in the order of their likely causes
    os::EventLoop::TimerId deadline_timer_ = 0;
};

}  // namespace ddprun
