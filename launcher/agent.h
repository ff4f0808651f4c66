#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "env/event_loop.h"
#include "env/log.h"
#include "env/system.h"
#include "launcher/agent_state.h"
#include "launcher/death_facts.h"
#include "launcher/discover.h"
#include "launcher/gpu_release.h"
#include "launcher/job_cgroup.h"
#include "launcher/output.h"
#include "launcher/plan.h"
#include "launcher/segment_file.h"
#include "launcher/stdin_relay.h"
#include "launcher/warden.h"
#include "rendezvous/message.h"

namespace ddprun {

/// What the agent of this node needs to know for the whole job.
struct AgentConfig {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    std::string host;
    std::string store;       ///< "tcp:host:port", for the workers
    std::string token;
    std::string job_marker;  ///< "DDPRUN_JOB=..." in every worker's environment
    std::vector<std::string> environment;  ///< "NAME=value": what the workers inherit
    std::uint64_t open_files = 0;  ///< soft limit on descriptors that workers get; 0 inherits ours
    JobCgroup* cgroup = nullptr;  ///< where the workers live; null: there is none
};

/// Starts, watches and stops the workers of one node: performs what agent_state decides.
///
/// Lives on the event loop's thread. Borrows its parts for its whole life. Everything the controller wants comes
/// in through handle(); everything it has to know goes out through `send`.
class Agent {
  public:
    using Send = std::function<void(const rdzv::Message&)>;

    Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log, AgentConfig config,
          Send send);
    ~Agent();

    void handle(const rdzv::StartGeneration& order);
    void handle(const rdzv::StopGeneration& order);
    void handle(const rdzv::Notice& notice);
    /// No grace: the second Ctrl-C, or the controller is gone.
    void kill_all();
    /// Passes a signal on to every worker's group ("forward and carry on").
    void forward_signal(int signal);
    /// The same for one of them. False: it does not run.
    bool signal_worker(int local_rank, int signal);
    /// Some child has ended (SIGCHLD): sees to all that have.
    void on_child_exits();

    /// The stacks that libddp of this worker has sent since the last call.
    [[nodiscard]] std::string take_stacks(int local_rank);

    [[nodiscard]] bool idle() const { return state_.phase == AgentState::Phase::Idle; }
    [[nodiscard]] const AgentState& state() const { return state_; }
    /// This generation's segment; null before the first.
    [[nodiscard]] const SegmentFile* segment() const { return segment_.get(); }
    [[nodiscard]] int first_rank() const { return order_.first_rank; }
    /// A variable of the worker's environment as it was started; nullopt: not set. Ours (RANK, ...) are not among them.
    [[nodiscard]] std::optional<std::string> variable(int local_rank, std::string_view name) const;
    /// When this generation's worker was started; TimePoint{}: not yet.
    [[nodiscard]] TimePoint started(int local_rank) const { return workers_[static_cast<std::size_t>(local_rank)].started; }

  private:
    struct Worker {
        WorkerPlan plan;
        TimePoint started{};
        TimePoint stop_asked = kNever;  ///< when we first signalled it to stop
        UniqueFd lifeline;
        UniqueFd error_file;  ///< a memfd when there is no log directory
        std::string error_path;
        std::string stacks;   ///< that it has sent
    };

    void feed(const AgentEvent& event);
    void perform(const agent_action::AwaitGpus& action);
    void perform(const agent_action::SpawnNext& action);
    void perform(const agent_action::ReportStarted& action);
    void perform(const agent_action::SignalGroup& action);
    void perform(const agent_action::BuryGroup& action);
    void perform(const agent_action::ReapStranger& action);
    void perform(const agent_action::ReportExit& action);
    void perform(const agent_action::Sweep& action);
    void perform(const agent_action::SetDeadline& action);
    void perform(const agent_action::ReportDrained& action);

    Status prepare(const rdzv::StartGeneration& order);
    void spawn_slice();
    Result<pid_t> spawn(int local_rank);
    Status connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    Status give_descriptors(Worker& worker, WorkerEnv& env, os::SpawnSpec& spec, std::vector<UniqueFd>& childs);
    std::vector<std::string> environment_of(const Worker& worker, const WorkerEnv& env) const;
    [[nodiscard]] StreamOwner owner_of(int local_rank) const;
    void listen_to_lifeline(int local_rank);
    void read_lifeline(int local_rank);
    void fail_start(const std::string& why);
    [[nodiscard]] std::string read_error_file(const Worker& worker) const;
    void send_exits();

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
    std::unique_ptr<SegmentFile> segment_;
    UniqueFd null_;
    std::unique_ptr<StdinRelay> stdin_relay_;  ///< while a worker reads our terminal
    std::vector<pid_t> last_workers_;  ///< of the generation before this one
    GpuReleaseWait gpu_release_;
    int pending_spawn_ = -1;
    bool slice_posted_ = false;
    DeathWitness witness_;
    std::vector<rdzv::WorkerExited> exits_;  ///< of the current sweep, sent in the order of their likely causes
    os::EventLoop::TimerId deadline_timer_ = 0;
};

}  // namespace ddprun
