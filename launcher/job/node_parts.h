#pragma once

#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/os/system.h"
#include "launcher/guard/guards.h"
#include "launcher/job/job_setup.h"
#include "launcher/node/agent.h"
#include "launcher/node/pmix/server.h"
#include "launcher/output/connection_log.h"
#include "launcher/output/output.h"
#include "launcher/output/output_sender.h"
#include "launcher/questions/inquiry.h"
#include "launcher/questions/job_questions.h"
#include "launcher/questions/observation.h"
#include "rendezvous/wire/tls.h"

namespace ddprun {

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
    void build_agent(Agent::Send says);
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
