#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "env/io/background_call.h"
#include "env/io/resolve.h"
#include "env/os/keepalive.h"
#include "env/result.h"
#include "launcher/job/head.h"
#include "launcher/job/head_link.h"
#include "launcher/job/node_parts.h"
#include "launcher/spec/exit_codes.h"
#include "rendezvous/client/agent_link.h"

namespace ddprun {

/// This process's part of one job: the parts that every node has, and the job's head where this node is the
/// head. Builds the parts and connects them; decides nothing. Every signal that ddprun handles must be
/// blocked already.
class Node final : public rdzv::AgentLinkHandler {
  public:
    /// `setup` is borrowed.
    explicit Node(JobSetup& setup) : setup_(setup), spec_(setup.spec), parts_(setup) {}
    ~Node() override;
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

    /// Runs the job on this node, and its head when this node is the head, to the end. Blocks. Returns the
    /// exit code; nullopt: this process was to be a head, and learnt before it started any worker that the
    /// job goes on under another head. Then the setup has that head's addresses, for a new Node to join.
    /// Error: why the job could not begin (a port in use, no descriptors).
    Result<std::optional<int>> run();

  private:
    Status build();
    Status choose_token();
    Status build_loop();
    Status build_node(bool is_head);
    Status begin_as_head(Standby& listening, const std::string& why, std::optional<RequeueRun> run);
    Status follow(const Endpoint& head);
    Result<HeadChoice> choose_head();
    Result<std::unique_ptr<Standby>> listen_if_head(HeadChoice& choice);
    Result<std::optional<RequeueRun>> begin_run(RequeueRun::Head head);
    void take_over(Standby& standby, const std::string& why, Inheritance inherited);
    Status watch_starter();
    void keep_alive();
    void note_alive();

    void on_signal(const signalfd_siginfo& info);
    void act_on(int signal, SignalAction action);
    void suspend();
    void agent_says(rdzv::FromAgent message);
    void look_for_mpi_of_workers();

    void on_connected() override;
    void on_message(const rdzv::ToAgent& message) override {
        std::visit([this](const auto& one) { obey(one); }, message);
    }
    void on_lost(const Error& why) override;
    void on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply) override {
        link_->on_store_reply(number, reply);
    }
    void on_acknowledged() override { link_->on_acknowledged(); }
    void on_log(const std::string& line) override { parts_.connections->warn(line); }
    void on_detail(const std::string& line) override { parts_.log.debug("{}", line); }
    void obey(const rdzv::StartGeneration& start);
    void name_network();
    void obey(const rdzv::Shutdown& shutdown) { link_->obey(shutdown); }
    void obey(const rdzv::JobSnapshot& snapshot) { link_->obey(snapshot); }
    void obey(const rdzv::Successor& successor) { link_->obey(successor); }
    void obey(const rdzv::Question& question) { parts_.inquiry->from_head(question); }
    void obey(const rdzv::Answer& answer) { parts_.inquiry->from_head(answer); }
    void obey(const rdzv::OutputShown& shown) {
        if (parts_.sender) parts_.sender->shown(shown.bytes);
    }
    void obey(const auto& message) {
        if constexpr (requires { parts_.agent->handle(message); }) parts_.agent->handle(message);
        else if (parts_.pmix) parts_.pmix->handle(message);
    }

    void end(const rdzv::Shutdown& shutdown);
    void lose_controller(const Error& why, ExitCode code);
    void leave(ExitCode code);
    void stop();
    int report_end();
    void flush_output();

    JobSetup& setup_;
    const JobSpec& spec_;
    NodeParts parts_;
    std::unique_ptr<HeadLink> link_;
    std::unique_ptr<Head> head_;                ///< null: another process is the head
    std::unique_ptr<os::Keepalive> keepalive_;  ///< null: the job has one node
    /// Looks this host's name up, as gloo does; none: the job has one node.
    std::optional<BackgroundCall<Result<SocketAddresses>>> own_name_;
    std::vector<std::string> own_name_at_;  ///< the answer, once it is there
    std::optional<int> exit_code_;          ///< of a node that ends before, or without, a head of its own
    std::string failure_;
    bool is_failure_said_ = false;  ///< the log has `failure_` already
};

}  // namespace ddprun
