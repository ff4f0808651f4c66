#pragma once

#include <signal.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "env/line_budget.h"
#include "env/os/event_loop.h"
#include "env/os/keepalive.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "env/result.h"
#include "launcher/ask/hang_watch.h"
#include "launcher/ask/inquiry.h"
#include "launcher/ask/job_questions.h"
#include "launcher/ask/observation.h"
#include "launcher/batch/requeue_run.h"
#include "launcher/gather/job_meeting.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_directory.h"
#include "launcher/guard/warden.h"
#include "launcher/job_spec.h"
#include "launcher/output/output.h"
#include "launcher/output/output_sender.h"
#include "launcher/plan/head_choice.h"
#include "launcher/plan/machine.h"
#include "launcher/plan/program.h"
#include "launcher/pmix/exchange.h"
#include "launcher/pmix/server.h"
#include "launcher/pmix/wish.h"
#include "launcher/report/error_file.h"
#include "launcher/report/report.h"
#include "launcher/report/walltime_watch.h"
#include "launcher/start/host_starter.h"
#include "launcher/supervise/agent.h"
#include "launcher/supervise/controller.h"
#include "launcher/supervise/heir.h"
#include "launcher/supervise/herald.h"
#include "launcher/supervise/job_token.h"
#include "rendezvous/agent/agent_link.h"
#include "rendezvous/agent/store_relay.h"
#include "rendezvous/server/server.h"

namespace ddprun {

/// A checked command line and what this node adds to it.
struct JobSetup {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    int workers = 1;                       ///< of this node; 0: a head that is none
    std::vector<std::string> environment;  ///< "NAME=value": what workers inherit
    std::string log_level;                 ///< LOGLEVEL; "" default
    std::vector<Endpoint> head_elsewhere;  ///< where the controller may be reached besides, if it has told
    std::string token;  ///< the job's secret, where the head has told it; "" as job_token.h finds it
    std::vector<Endpoint>
        job_at;  ///< where the job goes on, by its head's word; empty: the command line says it
    std::uint64_t open_files = 0;    ///< the soft limit that workers get back; 0: the one there is
    std::optional<HostStart> start;  ///< what the head starts; nullopt elsewhere, and where others do
    bool is_started = false;         ///< by a head, on another host
    bool sends_output = false;       ///< this node's lines go to the head by the session
    bool has_lifeline = false;       ///< the end of standard input is the end of what started us
    /// Where several nodes meet, when it was settled before; none: the command line says it.
    std::optional<JobMeeting> meeting;
};

/// How long the last messages may take to reach other nodes.
inline constexpr Duration kFarewell = std::chrono::seconds(10);

/// What all nodes have to agree on. Programs are compared by their names: they may lie elsewhere on each
/// node; and per role.
rdzv::Terms terms_of(const JobSetup& setup, bool has_pmix);
/// The program's name and a digest of its arguments, to be compared: other nodes hear it, and arguments can
/// hold secrets.
std::string command_of(const ResolvedProgram& program, std::string_view token);

/// This node's part of one job: the parts, and the way from each to the others. Decides nothing.
///
/// Its subjects have a file each: job.cpp builds the node and hears the user and the controller, job_head.cpp
/// has what only the head does, job_start.cpp the start of other nodes, job_heir.cpp what follows the head's
/// end, job_end.cpp the job's. Every signal that ddprun handles must be blocked already.
class Job final : public rdzv::ServerHandler, public rdzv::AgentLinkHandler {
  public:
    explicit Job(JobSetup setup)
        : setup_(std::move(setup)),
          host_(host_name()),
          log_({host_, "agent", std::nullopt}, log_options(setup_)) {}

    ~Job() override {
        if (loop_) loop_->set_keepalive(nullptr);
        keepalive_.reset();
        pmix_.reset();  // it speaks with the agent and the link to its last moment
        log_.write_through(nullptr);
    }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    /// Runs the job on this node to its end: the controller too, when this node is the head. Blocks.
    /// Returns the exit code. Error: what kept the job from beginning (a port in use, no descriptors).
    /// Where moved_to() has a value the code means nothing.
    Result<int> run();
    /// This process was to be a head, and has heard before any worker was started that the job goes on under
    /// another one: what the Job that joins there is made of.
    [[nodiscard]] std::optional<JobSetup> moved_to() const;

  private:
    static os::LogOptions log_options(const JobSetup& setup);

    // job.cpp
    Status build();
    Status build_guards();
    Status open_way_to_store();
    Status build_pmix();
    void look_for_mpi(std::size_t nth);
    Status build_relay();
    Status build_agent(const Endpoint& controller);
    Status build_observation();
    void build_questions();
    void begin_asking_nodes();
    [[nodiscard]] std::optional<Endpoint> ras_address() const;
    Status watch_starter();
    void keep_alive();
    void note_alive();
    /// Becomes part of the job at its controller, the first one or another, by whichever of these answers.
    void join(std::vector<Endpoint> controllers, TimePoint by);
    [[nodiscard]] bool can_rejoin(const Error& why) const;
    void rejoin(const Error& why);
    void join_again();
    void on_signal(const signalfd_siginfo& info);
    void act_on(int signal, SignalAction action);
    void ask_to_end(const char* how, int signal);
    void suspend();

    // job_head.cpp
    /// This is the head, and no node: its agent has no workers and joins nothing.
    [[nodiscard]] bool is_apart() const { return controller_ && setup_.spec.rendezvous.head_is_apart; }
    /// With several nodes a given --master-port is where the controller itself listens, unless they met
    /// elsewhere.
    [[nodiscard]] bool listens_at_master_port() const {
        return shared_endpoint(setup_.spec).has_value() && !setup_.meeting;
    }
    Status contend_for_head(const HeadChoice& choice);
    Status build_head(const HeadChoice& choice);
    Status choose_store();
    [[nodiscard]] rdzv::ServerOptions server_options() const;
    Status listen(rdzv::ServerOptions options);
    void build_controller();
    void begin_control();
    void walltime_is_known(TimePoint end);
    void walltime_is_unknown(const std::string& why);

    // job_start.cpp
    Status build_start();

    // job_heir.cpp
    void build_heir();
    Result<std::uint16_t> listen_as_standby();
    std::string listen_for_late_comers();
    [[nodiscard]] bool head_is_dead() const;
    void lose_head(const Error& why);
    void take_over(JobState state, const std::string& why);
    void give_up_without_head(const std::string& why);
    void begin_herald();
    void on_job_moved(const rdzv::JobMoved& moved) override;

    // job_end.cpp
    Status begin_run(RequeueRun::Head head);
    void end_run();
    void agent_says(rdzv::FromAgent message);
    void controller_done();
    void leave(int code);
    void stop_after_others(Duration patience);
    void stop_after_senders(Duration patience);
    void send_last_output();
    int say_how_it_ended();
    void tell_launcher_above(LauncherFailure failure, const WorkerEnd* cause, int code);
    void flush_output();

    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override;
    void on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) override;
    void hear(rdzv::AgentId agent, const rdzv::WorkersStarted& started) {
        controller_->agent_message(agent, started);
    }
    void hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited);
    void hear(rdzv::AgentId agent, const rdzv::GenerationEnded& ended);
    void hear(rdzv::AgentId agent, const rdzv::StandbyListens& listens) {
        controller_->agent_message(agent, listens);
    }
    void hear(rdzv::AgentId agent, const rdzv::Notice& notice) { controller_->agent_message(agent, notice); }
    void hear(rdzv::AgentId agent, const rdzv::Question& question) { inquiry_->from_agent(agent, question); }
    void hear(rdzv::AgentId agent, const rdzv::Answer& answer) { inquiry_->from_agent(agent, answer); }
    void hear(rdzv::AgentId agent, const rdzv::OutputPiece& piece) {
        output_->show_sent(agent, piece.stream == 2 ? Output::Stream::Err : Output::Stream::Out,
                           piece.bytes.view());
    }
    void hear(rdzv::AgentId agent, const rdzv::FenceEntered& fence) {
        pass_on(exchange_.entered(agent, fence));
    }
    void hear(rdzv::AgentId agent, const rdzv::ModexRequest& request) {
        pass_on(exchange_.asked(agent, request));
    }
    void hear(rdzv::AgentId agent, const rdzv::ModexReply& reply) {
        pass_on(exchange_.answered(agent, reply));
    }
    void pass_on(const PmixExchange::Messages& messages);
    void on_agent_lost(rdzv::AgentId agent, const Error& why) override;
    void on_log(const std::string& line) override;
    void say_of_connections(const std::optional<std::string>& line);

    void on_detail(const std::string& line) override { log_.debug("{}", line); }
    void on_connected() override;
    void on_message(const rdzv::ToAgent& message) override;
    void obey(const rdzv::StartGeneration& start);
    void observe(const rdzv::StartGeneration& start);
    void obey(const rdzv::StopGeneration& stop) { agent_->handle(stop); }
    void obey(const rdzv::Shutdown& shutdown);
    void obey(const rdzv::Notice& notice) { agent_->handle(notice); }
    void obey(const rdzv::Legacy& legacy) {
        if (heir_) heir_->obey(legacy);
    }
    void obey(const rdzv::Successor& successor) {
        if (heir_) heir_->obey(successor);
    }
    void obey(const rdzv::Question& question) { inquiry_->from_controller(question); }
    void obey(const rdzv::Answer& answer) { inquiry_->from_controller(answer); }
    void obey(const rdzv::OutputShown& shown) {
        if (sender_) sender_->shown(shown.bytes);
    }
    template <class OfPmix>
    void obey(const OfPmix& message) {
        if (pmix_) pmix_->handle(message);
    }
    void on_lost(const Error& why) override;
    void on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply) override {
        relay_->on_store_reply(number, reply);
    }
    void on_acknowledged() override {
        if (relay_) relay_->on_acknowledged();
    }

    JobSetup setup_;
    std::string host_;
    os::Log log_;
    std::optional<os::Log> job_log_;
    JobToken token_;
    std::uint64_t open_files_ = 0;  ///< the soft limit that workers get back
    std::string id_;
    JobMark mark_;
    os::LinuxSystem system_;
    std::unique_ptr<Warden> warden_;
    std::unique_ptr<JobCgroup>
        cgroup_;  ///< null: none can be had. Goes before the warden, which watches over it
    PmixWish pmix_wish_;
    std::unique_ptr<JobDirectory> files_;  ///< null: the workers have no PMIx server
    std::unique_ptr<os::EventLoop> loop_;
    std::unique_ptr<PmixServer> pmix_;  ///< null as well
    PmixExchange exchange_;             ///< on the head, of all nodes' PMIx servers
    MasterPort master_port_;
    std::unique_ptr<rdzv::Server> server_;    ///< on the head, and on the standby
    std::unique_ptr<Controller> controller_;  ///< on the head only
    std::unique_ptr<Herald> herald_;          ///< on a head that was the standby
    std::optional<rdzv::JobMoved> moved_;     ///< away from this head
    std::unique_ptr<Heir> heir_;              ///< elsewhere; null: this node ends with the head
    std::map<rdzv::AgentId, rdzv::AgentHello>
        early_;                    ///< have come to the standby, which is not the head yet
    Endpoint head_;                ///< where the controller is, for agents, as it was named
    Endpoint head_address_;        ///< the same, numeric: names may be unknown when the head is lost
    std::size_t head_places_ = 1;  ///< by which it was looked for
    Endpoint lost_head_;           ///< of the generation before, while this node goes to the standby
    bool has_joined_ = false;      ///< by the link there is
    bool rejoins_ = false;         ///< when the workers of this node have ended
    int joins_ = 1;                ///< so many times this node has joined its controller
    std::shared_ptr<const rdzv::TlsContext> tls_;  ///< of the agent, with --tls
    rdzv::AgentHello hello_;                       ///< what this node says of itself
    bool has_succeeded_ = false;                   ///< this head was the standby
    bool has_asked_to_end_ = false;                ///< its controller, which may not have heard it
    bool serves_torch_ = false;                    ///< on the head
    std::unique_ptr<OutputSender> sender_;         ///< null: the consoles are our own
    std::unique_ptr<Output> output_;
    std::unique_ptr<Agent> agent_;
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null: a head that is no node
    UnixListener store_way_;                   ///< by which this host's workers come to the store
    std::unique_ptr<rdzv::StoreRelay> relay_;  ///< null: to the server, in this process
    std::unique_ptr<Observation> observation_;
    os::EventLoop::TimerId notice_timer_ = 0;  ///< of --walltime-notice
    std::unique_ptr<WalltimeWatch>
        walltime_;                   ///< on the head only: one question to the scheduler, not one per node
    std::optional<RequeueRun> run_;  ///< on the head, where the job is put back into its queue
    std::optional<JobEnd> ended_;    ///< of the job, on the head
    std::unique_ptr<Inquiry> inquiry_;
    std::unique_ptr<JobQuestions> questions_;
    std::unique_ptr<HangWatch> hang_watch_;  ///< on the head, with --hang-timeout
    std::unique_ptr<RemoteAgents> others_;   ///< on a head that starts the other hosts
    std::set<rdzv::AgentId> senders_;  ///< on the head: joined agents whose lines come by their sessions
    bool waits_for_senders_ = false;   ///< the job is over, and their last lines come
    std::optional<int>
        exit_code_;  ///< of a node that leaves before, or without, a controller that is its own
    std::string failure_;
    bool is_failure_said_ = false;                ///< the log has it already
    std::unique_ptr<os::Keepalive> keepalive_;    ///< null: one node, whom nobody waits for
    LineBudget connection_lines_{"connections"};  ///< whoever reaches the port can cause them
    bool sum_is_due_ = false;
};

}  // namespace ddprun
