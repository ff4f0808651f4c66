#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/ends/report.h"
#include "launcher/head/generation_stop.h"
#include "launcher/head/job_record.h"
#include "launcher/head/job_state.h"
#include "launcher/head/succession.h"
#include "launcher/head/world.h"
#include "launcher/spec/job_spec.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

struct ControllerConfig {
    std::string program;  ///< as shown in the report
    std::string command;  ///< of this node, as in its AgentHello
    /// Chooses MASTER_ADDR/PORT for the generation that is about to start with `first` as its first node.
    /// Called for each generation: a port that the kernel picked must be free again for a new rank 0.
    std::function<Result<MasterAddress>(const rdzv::AgentHello& first)> master;
    /// The `instance` of the agent in this process, without which no world is formed; "" no such agent.
    std::string own_instance;
    std::string own_host;
    std::vector<std::string> hosts;   ///< by node rank; empty when not known
    rdzv::Terms terms;                ///< every node has to agree with them
    std::string fabric;               ///< this node's network and its variables (describe_fabric)
    double random = 0;                ///< in [0, 1), spreads the back-off
    bool in_batch_job = false;        ///< a scheduler may send one stop by several ways at once
    SuccessionState succession = {};  ///< the initial state
};

/// Controls the whole job: hears of nodes, workers and requests, and carries out what job_state and
/// succession decide. World sends the orders, GenerationStop stops the workers, JobRecord keeps the ends of
/// workers.
///
/// The controller runs on the event loop's thread beside the server. It sends to all agents, also to the one
/// in its own process, through `send`. The number of its connection identifies an agent.
class Controller {
  public:
    using Send = World::Send;
    using Done = std::function<void()>;

    /// Borrows `spec` for its whole life.
    Controller(os::EventLoop& loop, os::Log& log, const JobSpec& spec, ControllerConfig config, Send send,
               Done done);
    ~Controller();

    /// Begins to wait for nodes.
    void begin();

    // Messages and events from the server.
    /// Error: why this agent may not join; the agent is told.
    Status agent_joined(rdzv::AgentId peer, const rdzv::AgentHello& hello);
    void agent_message(rdzv::AgentId peer, const rdzv::StopRequest& request);
    void agent_message(rdzv::AgentId peer, const rdzv::RehearsalRequest& request);
    void agent_message(rdzv::AgentId peer, const rdzv::Remark& remark);
    void agent_message(rdzv::AgentId peer, const rdzv::WorkersStarted& started);
    void agent_message(rdzv::AgentId peer, const rdzv::WorkerExited& exited);
    void agent_message(rdzv::AgentId peer, const rdzv::WorkersReady& ready);
    void agent_message(rdzv::AgentId peer, const rdzv::GenerationEnded& ended);
    void agent_message(rdzv::AgentId peer, const rdzv::StepsDone& done);
    void agent_message(rdzv::AgentId peer, const rdzv::StandbyListens& standby);
    void agent_lost(rdzv::AgentId peer, const Error& why);

    /// Begins, instead of begin(), as the controller of a job that has lost its head, with the agents that
    /// have joined its standby. Returns those that cannot take part, and why.
    std::vector<std::pair<rdzv::AgentId, Error>> succeed(
        JobState state, const std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>& agents,
        const std::string& why);

    /// Call it when the job goes on under another controller. True: this one has begun no generation and
    /// decides nothing any more; its agents are told where to go, and this process has to join there. False:
    /// the job ends here, or this controller is the successor itself.
    bool meet_successor(const rdzv::Successor& where, bool can_join) {
        feed(succession_event::SuccessorMet{where, can_join});
        return succession_.is_handed_over;
    }
    void stood_still() { feed(succession_event::StoodStill{}); }

    // Requests of the operator and the host.
    /// Handles a signal to this process. (Agents send theirs as a StopRequest.)
    void stop(int signal) { stop(signal, kThisProcess); }
    /// `left`: the time until the scheduler ends the job itself; nullopt: not known.
    void preempt(int signal, const std::string& why, std::optional<Duration> left = {});
    /// `culprit`: the rank to look at first; -1 none. `was_asked`: by --hang-timeout; else the job is not
    /// ended.
    void hang_found(const std::string& what, int culprit, bool was_asked);
    /// True when a rank that hangs would be killed and started again, and the job would go on.
    [[nodiscard]] bool can_replace_hanging_rank() const;
    /// `time_up`: when the job will be stopped for its walltime.
    void walltime_known(TimePoint time_up);
    /// Ends the job before any worker has started, because required hosts cannot take part.
    void start_failed(const std::string& why) { feed(job_event::JoinFailed{why}); }
    /// Passes a signal on to all workers of all nodes; the job goes on.
    void forward(int signal);

    [[nodiscard]] const JobState& state() const { return state_; }
    /// The nodes of the current or last world; empty before the first one.
    [[nodiscard]] std::vector<WorldNode> world() const { return world_.describe(); }
    /// The host of a connected agent; "" for an unknown one.
    [[nodiscard]] std::string host_of(rdzv::AgentId peer) const;
    /// The node rank that a connected agent asked for, or was given by the head that started it.
    [[nodiscard]] std::optional<int> node_rank_of(rdzv::AgentId peer) const;
    [[nodiscard]] bool finished() const { return state_.phase == JobState::Phase::Finished; }
    /// How the job ended; complete once `done` has been called.
    [[nodiscard]] JobEnd end() const;
    /// The job's time, if the workers that were started last have committed `latest`.
    [[nodiscard]] JobTime time_with(const CommittedTime& latest) const {
        return record_.time_with(latest, state_.end.lost);
    }
    /// Called before a new generation's StartGeneration is sent: fences the store.
    void on_generation(std::function<void(std::uint64_t)> handler) {
        generation_handler_ = std::move(handler);
    }
    /// Called when all ranks have joined a generation in place.
    void on_recovered(std::function<void(const job_action::Recovered&)> handler) {
        recovered_handler_ = std::move(handler);
    }
    /// Called with each event before the controller decides about it.
    void on_event(std::function<void(const JobEvent&)> handler) { event_handler_ = std::move(handler); }

  private:
    static constexpr rdzv::AgentId kThisProcess = 0;  ///< no connection has this number

    void feed(const JobEvent& event);
    void feed(const SuccessionEvent& event);
    void stop(int signal, rdzv::AgentId source);
    void lose_earlier_session(const rdzv::AgentHello& hello);
    void end_kept_workers(rdzv::AgentId peer);
    [[nodiscard]] std::optional<Error> refuse_other_job(const rdzv::AgentHello& hello) const;
    void log_missing_nodes(Duration pause);
    void inform_newcomers();
    [[nodiscard]] Duration others_may_follow(const Error& why) const;
    [[nodiscard]] std::string what_awaits_newcomers() const;
    void perform(const job_action::StartGeneration& action);
    void perform(const job_action::Recover& action);
    void perform(const job_action::Reform& action);
    void perform(const job_action::Recovered& action);
    void perform(const job_action::StopGeneration& action);
    void perform(const job_action::KillGeneration& action);
    void perform(const job_action::NodeLeaves& action);
    void perform(const job_action::Dismiss& action);
    void perform(const job_action::NotifyPreempt& action) { stop_.perform(action); }
    void perform(const job_action::SetTimer& action);
    void perform(const job_action::Say& action);
    void perform(const job_action::Rejoin&) { feed(succession_event::NodesNeeded{membership_.has_enough()}); }
    void perform(const job_action::Finish& action);
    void perform(const auto& message) { world_.perform(message, state_); }

    void without_successor(std::function<void()> then);
    void consider_membership();
    void form_world();
    void log_fabric();
    void log_seating();
    void begin_generation(rdzv::StartGeneration order);
    void worker_exited(int node, const rdzv::WorkerExited& report);
    [[nodiscard]] bool is_own(const rdzv::AgentHello& hello) const {
        return !hello.instance.empty() && hello.instance == config_.own_instance;
    }
    void give_up(const std::string& why);

    os::EventLoop& loop_;
    os::Log& log_;
    const JobSpec& spec_;
    ControllerConfig config_;
    Done done_;
    JobPolicy policy_;
    JobState state_;
    SuccessionState succession_;
    World world_;
    GenerationStop stop_;
    JobRecord record_;
    rdzv::Membership membership_;
    std::vector<rdzv::AgentId> newcomers_;  ///< to be told why they wait
    std::map<rdzv::AgentId, rdzv::AgentHello>
        ending_;                          ///< join when the workers that they have kept in vain have ended
    std::uint64_t first_generation_ = 0;  ///< in which all workers last began together
    std::set<rdzv::AgentId>
        departing_;  ///< not in the world any more; dismissed when their workers have ended
    std::vector<std::function<void()>> held_endings_;  ///< called when no standby can take over
    TimePoint begun_;
    std::string logged_fabric_;
    std::vector<std::string> logged_seating_;
    os::EventLoop::TimerId timer_ = 0;
    os::EventLoop::TimerId join_timer_ = 0;
    os::EventLoop::TimerId waiting_line_ = 0;
    TimePoint waiting_since_{};
    std::function<void(std::uint64_t)> generation_handler_;
    std::function<void(const job_action::Recovered&)> recovered_handler_;
    std::function<void(const JobEvent&)> event_handler_;
};

}  // namespace ddprun
