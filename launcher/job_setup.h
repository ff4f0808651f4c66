#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/io/socket.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/gather/job_meeting.h"
#include "launcher/gather/outer_task.h"
#include "launcher/head/control/job_token.h"
#include "launcher/head/start/host_starter.h"
#include "launcher/job_spec.h"
#include "launcher/node/guard/descriptors.h"
#include "launcher/node/plan/head_choice.h"
#include "launcher/node/plan/machine.h"
#include "launcher/node/plan/program.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// A checked command line and what this node adds to it.
struct JobSetup {
    JobSpec spec;
    ResolvedProgram program;
    Machine machine;
    int workers = 1;                       ///< of this node; 0: a head that is none
    std::vector<std::string> environment;  ///< "NAME=value": what workers inherit
    std::string log_level;                 ///< LOGLEVEL; "" default
    DescriptorLimit descriptors;           ///< of which workers get the one before back

    // What was settled before; none: the command line says it.
    std::optional<HeadChoice> head;
    std::vector<Endpoint> head_elsewhere;  ///< where the controller may be reached besides, if it has told
    std::optional<JobToken> token;
    std::optional<JobMeeting> meeting;  ///< of the several nodes of an outer launcher

    // How this ddprun stands to those of other hosts, where they are not each started by somebody else.
    std::optional<HostStart> start;      ///< it starts them
    std::optional<StartedNode> started;  ///< it has been started by the head
    std::optional<OuterTask> task;       ///< mpiexec, srun or their like has started them all

    /// The end of standard input is the end of what started us.
    [[nodiscard]] bool has_lifeline() const {
        return started && started->call.secret.kind == SecretWay::Stdin;
    }
    /// This node's lines go to the head by the session.
    [[nodiscard]] bool sends_output() const { return started && started->order.sends_output; }
};

os::LogOptions log_options(const JobSetup& setup);
/// What this node says of itself when it joins as `instance`, to a job of this secret. Its terms are what all
/// nodes have to agree on.
rdzv::AgentHello hello_of(const JobSetup& setup, const std::string& instance, std::string_view token,
                          bool has_pmix);

}  // namespace ddprun
