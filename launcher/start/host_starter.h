#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/job_spec.h"
#include "launcher/start/remote_agents.h"
#include "launcher/start/start_order.h"

namespace ddprun {

/// What the head starts on the other hosts of the job.
struct HostStart {
    std::vector<AllocatedHost> hosts;  ///< by node rank; the first is this one, unless `order.head_is_apart`
    Starter starter = Starter::Ssh;
    std::string job_id;                ///< the scheduler's; "" none
    StartOrder order;
};

/// The secret of a job whose nodes we start ourselves: what follows from the PBS job's cookie where that is the way it travels,
/// else a random one. Error: System (getrandom).
Result<std::string> make_start_token(Starter starter, const std::string& run_id, const EnvironmentLookup& variable);

/// Starts `start.hosts`, but this one; their ddprun finds us at `port`. Error: System (no file for the secret).
Result<std::unique_ptr<RemoteAgents>> start_hosts(RemoteAgents::Parts parts, const HostStart& start, std::uint16_t port,
                                                  const std::string& token, Duration timeout);

/// As one of those: where the head is, by which secret, as what, and what it wants.
struct StartedNode {
    Endpoint head;
    std::string token;
    int node = 0;
    StartOrder order;
};
/// Reads the secret, finds the head and asks for its order. Blocks, for a minute at most.
/// Error: InvalidArgument, Refused, Timeout, NotFound (this host is none of the order's).
Result<StartedNode> ask_head(const AgentCall& call);
/// Tells the head why this host cannot take part.
void tell_head(const StartedNode& started, const std::string& why);

}  // namespace ddprun
