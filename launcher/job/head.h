#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launcher/ends/report.h"
#include "launcher/head/controller.h"
#include "launcher/head/succession.h"
#include "launcher/job/node_parts.h"
#include "launcher/job/requeue.h"
#include "launcher/job/walltime_watch.h"
#include "launcher/node/pmix/exchange.h"
#include "launcher/questions/hang_watch.h"
#include "launcher/questions/inquiry.h"
#include "launcher/questions/job_curves.h"
#include "launcher/questions/job_questions.h"
#include "rendezvous/serve/server.h"

namespace ddprun {

class MovedNotifier;

/// The server of a process that is the head, or may become it.
struct JobServer {
    std::unique_ptr<rdzv::Server> server;  ///< null: a head has taken it
    bool serves_torch = false;             ///< PyTorch's workers get their store from `server`
};

/// What a successor knows from the lost head.
struct Inheritance {
    JobState state;
    std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>> nodes;  ///< connected, in the order of places
    std::vector<std::string> addresses;  ///< of this node, as the other nodes reach it
};

/// The parts of ddprun that exist once per job: the controller, which decides, the server to which all nodes
/// connect, and what else concerns the job as a whole. The head passes the nodes' messages to the controller
/// and its decisions to the nodes; it decides nothing itself. It runs on its node's event loop thread.
class Head final : public rdzv::ServerHandler {
  public:
    /// Takes the server from `from` and begins as the head of the nodes that connect there. `why` tells
    /// why this node is the head; `inherited` comes from the lost head, nullopt for the first one.
    Head(NodeParts& node, JobServer& from, const std::string& why, std::optional<RequeueRun> run,
         std::optional<Inheritance> inherited);
    ~Head() override;
    Head(const Head&) = delete;
    Head& operator=(const Head&) = delete;

    /// Begins to start the other nodes if the setup names them. Error: as start_hosts.
    Status start_others();

    [[nodiscard]] Controller& controller() { return controller_; }
    [[nodiscard]] bool finished() const { return controller_.finished(); }
    /// Where the job goes on without this head, which has started no worker: the loop is about to end.
    [[nodiscard]] const std::optional<rdzv::JobMoved>& moved() const { return moved_; }
    /// See rdzv::Server::when_written.
    void when_written(Duration timeout, os::EventLoop::Handler handler) {
        server_->when_written(timeout, std::move(handler));
    }
    /// See rdzv::AgentSessions::reached_at.
    [[nodiscard]] const std::string& reached_at() const { return server_->reached_at(); }
    void keep_alive() { server_->keep_alive(); }
    /// Call it for each SIGCHLD, before children are reaped.
    void children_ended() {
        if (others_) others_->children_ended();
    }
    /// Stops the loop when the agents that we started on other hosts have ended and sent their last lines.
    void stop(Duration timeout);

    /// Reports how the job ended and returns its exit code.
    int report_end();
    /// Puts the job back into its queue if `run` wants that. Call it last: the scheduler may kill us for it.
    void put_back();

  private:
    [[nodiscard]] bool is_apart() const { return spec_.rendezvous.head_is_apart; }
    ControllerConfig controller_config();
    Result<MasterAddress> master_for(const rdzv::AgentHello& first);
    void refuse(rdzv::AgentId agent, const Error& why);
    void send(rdzv::AgentId agent, const rdzv::ToAgent& message);
    void send(const PmixExchange::Messages& messages) {
        for (const PmixExchange::Outgoing& one : messages) server_->send(one.agent, one.message);
    }
    void begin_generation(std::uint64_t generation);
    void watch_for_hangs();
    void write_curves();
    std::string listen_for_late_comers(const std::vector<std::string>& own_addresses);
    void tell_lost_head(std::vector<std::string> own_addresses);
    [[nodiscard]] std::string note_of_walltime(const JobEnd& end) const;

    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override;
    void on_agent_message(rdzv::AgentId agent, const rdzv::FromAgent& message) override;
    void on_agent_lost(rdzv::AgentId agent, const Error& why) override;
    void on_job_moved(const rdzv::JobMoved& moved) override;
    void on_log(const std::string& line) override { node_.connections->warn(line); }
    void on_detail(const std::string& line) override { node_.log.debug("{}", line); }
    void hear(rdzv::AgentId agent, const auto& message) { controller_.agent_message(agent, message); }
    void hear(rdzv::AgentId agent, const rdzv::WorkerExited& exited);
    void hear(rdzv::AgentId agent, const rdzv::GenerationEnded& ended);
    void hear(rdzv::AgentId agent, const rdzv::Question& question) { survey_.from_agent(agent, question); }
    void hear(rdzv::AgentId agent, const rdzv::Answer& answer) { survey_.from_agent(agent, answer); }
    void hear(rdzv::AgentId agent, const rdzv::OutputPiece& piece) {
        node_.output->show_sent(agent, piece.stream == 2 ? Output::Stream::Err : Output::Stream::Out,
                                piece.bytes.view());
    }
    void hear(rdzv::AgentId /*agent*/, const rdzv::WorkerScalars& scalars) {
        if (curves_) curves_->told(scalars.generation, scalars.lines.view());
    }
    void hear(rdzv::AgentId agent, const rdzv::FenceEntered& fence) { send(exchange_.entered(agent, fence)); }
    void hear(rdzv::AgentId agent, const rdzv::ModexRequest& request) {
        send(exchange_.asked(agent, request));
    }
    void hear(rdzv::AgentId agent, const rdzv::ModexReply& reply) { send(exchange_.answered(agent, reply)); }

    NodeParts& node_;
    const JobSpec& spec_;
    os::Log log_;  ///< with the component "job"
    std::unique_ptr<rdzv::Server> server_;
    bool serves_torch_, has_succeeded_;
    MasterPort master_port_;
    Controller controller_;
    Survey survey_;
    JobQuestions questions_;
    PmixExchange exchange_;                  ///< of all nodes' PMIx servers
    WalltimeWatch walltime_;                 ///< on the head alone: one query to the scheduler
    std::unique_ptr<HangWatch> hang_watch_;  ///< null unless --hang-timeout
    std::unique_ptr<JobCurves> curves_;      ///< null unless --tensorboard
    std::unique_ptr<RemoteAgents> others_;   ///< null unless we start the other hosts
    std::set<rdzv::AgentId> senders_;        ///< joined agents that send their output by their sessions
    bool waits_for_senders_ = false;         ///< the job is over, and `senders_` send their last lines
    std::unique_ptr<MovedNotifier>
        notifier_;  ///< null unless a successor whose lost head other processes may dial
    std::optional<rdzv::JobMoved> moved_;
    std::optional<RequeueRun> run_;  ///< nullopt: the job is not requeued
    std::optional<JobEnd> end_;
};

}  // namespace ddprun
