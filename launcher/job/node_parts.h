#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/line_budget.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/guard/guards.h"
#include "launcher/job/job_setup.h"
#include "launcher/node/agent.h"
#include "launcher/node/pmix/server.h"
#include "launcher/output/output.h"
#include "launcher/output/output_sender.h"
#include "launcher/questions/inquiry.h"
#include "launcher/questions/job_questions.h"
#include "launcher/questions/observation.h"
#include "rendezvous/wire/tls.h"

namespace ddprun {

/// Writes warnings about connections. Anyone who reaches the port can cause them, so only some of many are
/// written, with a count of all. Borrows its parts for its whole life.
class ConnectionLog {
  public:
    ConnectionLog(os::EventLoop& loop, os::Log& log) : loop_(loop), log_(log) {}
    ConnectionLog(const ConnectionLog&) = delete;
    ConnectionLog& operator=(const ConnectionLog&) = delete;

    void warn(const std::string& line) {
        write(budget_.take(line, loop_.now()));
        if (sum_is_due_ || budget_.due() == kNever) return;
        sum_is_due_ = true;
        loop_.call_at(budget_.due(), [this] {
            sum_is_due_ = false;
            write(budget_.sum_up(loop_.now()));
        });
    }
    /// Writes how many warnings there were, if not all were written.
    void sum_up() { write(budget_.total()); }

  private:
    void write(const std::optional<std::string>& line) {
        if (line) log_.warning("{}", *line);
    }

    os::EventLoop& loop_;
    os::Log& log_;
    LineBudget budget_{"connections"};
    bool sum_is_due_ = false;
};

/// The time limit for sending the last messages to other nodes.
inline constexpr Duration kFarewell = std::chrono::seconds(10);

/// The parts of every node, head or not. The pointers are null until the parts are built, in this order and
/// before the loop runs. Each part borrows those before it; a node's link and head borrow all.
struct NodeParts {
    explicit NodeParts(JobSetup& of) : setup(of), log({host, "agent", std::nullopt}, log_options(of)) {}
    Status build_guards(bool is_head);
    /// Error: there is no PMIx server, and the user requires one.
    Status build_pmix();
    /// `is_apart`: this host is none of the job's nodes.
    Status build_output(bool is_apart);
    void build_agent(SendToHead says);
    /// Builds what answers questions to the running job. `add_job` as in Observation::Parts.
    Status build_observation(std::function<void(JobStatus&)> add_job);
    Status build_hello(bool is_head);

    JobSetup& setup;
    std::string host = host_name();
    os::Log log;
    JobToken token;
    std::shared_ptr<const rdzv::TlsContext> tls;  ///< a client's; null without --tls
    os::LinuxSystem system;
    std::function<bool(rdzv::FromAgent)> send;  ///< sends to the head; false: there is no session
    PmixWish pmix_wish;
    Guards guards;
    std::unique_ptr<os::EventLoop> loop;
    std::unique_ptr<ConnectionLog> connections;
    std::unique_ptr<PmixServer> pmix;      ///< null: the workers have no PMIx
    std::unique_ptr<OutputSender> sender;  ///< null: output goes to our own stdout and stderr
    std::unique_ptr<Output> output;
    std::unique_ptr<Agent> agent;
    std::unique_ptr<Observation> observation;
    std::unique_ptr<Inquiry> inquiry;
    std::unique_ptr<NodeQuestions> questions;
    rdzv::AgentHello hello;  ///< what this node sends when it joins
};

}  // namespace ddprun
