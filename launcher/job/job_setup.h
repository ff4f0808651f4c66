#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/io/socket.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/guard/descriptors.h"
#include "launcher/machine/machine.h"
#include "launcher/plan/head_choice.h"
#include "launcher/plan/program.h"
#include "launcher/spec/job_spec.h"
#include "launcher/start/host_starter.h"
#include "launcher/start/job_token.h"
#include "launcher/start/meet.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// A checked command line and what this node adds to it.
struct JobSetup {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    int workers = 1;                       ///< of this node; 0: a head without workers
    std::vector<std::string> environment;  ///< "NAME=value": what workers inherit
    std::string log_level;                 ///< LOGLEVEL; "" default
    DescriptorLimit descriptors;           ///< workers get the limit `before` back

    // Decisions that were made before; none: the command line decides.
    std::optional<HeadChoice> head;
    std::vector<Endpoint> head_elsewhere;  ///< other addresses of the controller, if it has sent them
    std::optional<JobToken> token;
    std::optional<JobMeeting> meeting;  ///< where an outer launcher started several nodes

    // How this ddprun relates to those of other hosts.
    std::optional<HostStart> start;      ///< this ddprun starts the others
    std::optional<StartedNode> started;  ///< the head has started this ddprun
    std::optional<OuterTask> task;       ///< mpiexec, srun or another launcher has started all of them

    /// True when the end of standard input means that our starter has ended.
    [[nodiscard]] bool has_lifeline() const {
        return started && started->call.secret.kind == SecretWay::Stdin;
    }
    /// True when this node sends its output to the head over the session.
    [[nodiscard]] bool sends_output() const { return started && started->order.sends_output; }
};

os::LogOptions log_options(const JobSetup& setup);
/// The Hello with which this node joins as `instance`, to the job with the secret `token`. Its terms are what
/// all nodes have to agree on.
rdzv::AgentHello hello_of(const JobSetup& setup, const std::string& instance, std::string_view token,
                          bool has_pmix);

}  // namespace ddprun
