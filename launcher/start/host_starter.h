#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"
#include "launcher/start/remote_agents.h"
#include "launcher/start/start_order.h"

namespace ddprun {

/// The start of ddprun on the other hosts of the job.
struct HostStart {
    std::vector<AllocatedHost> hosts;  ///< by node rank
    NodeRange nodes;                   ///< the hosts to start
    Starter starter = Starter::Ssh;
    AgentCall call;  ///< of each; start_hosts() adds program and job
    StartOrder order;
};

/// Makes a new secret for a job whose nodes we start ourselves: from the PBS job's cookie and a new salt if
/// the starter's secret_way is Cookie, else a random one. Sets `start.call.secret`: its file, if the way is
/// File, lies in the order's directory and is not written yet. Error: System (getrandom).
Result<std::string> make_start_token(HostStart& start, const EnvironmentLookup& variable);

/// The endpoints at which other hosts reach the head: "host:port" by its name and addresses, or by the only
/// address that it listens on.
std::vector<std::string> endpoints_of_head(const std::string& own_name, const std::string& listens_on,
                                           std::uint16_t port);
/// Begins to start `start.nodes`. Error: System (no file for the secret).
Result<std::unique_ptr<RemoteAgents>> start_hosts(RemoteAgents::Parts parts, const HostStart& start,
                                                  const std::string& token, Duration timeout);

/// A host that the head has started: its way to the head, its secret, its node rank and its order.
struct StartedNode {
    Endpoint head;
    std::vector<Endpoint> elsewhere;  ///< the head's other endpoints
    std::string token;
    int node = 0;
    AgentCall call;
    StartOrder order;
};
/// Reads the secret, connects to the head and asks for its order. Blocks, for a minute at most.
/// Error: InvalidArgument, Refused, Timeout, NotFound (this host is not in the order).
Result<StartedNode> ask_head(const AgentCall& call);
/// Tells the head why this host cannot take part.
void tell_head(const StartedNode& started, const std::string& why);

}  // namespace ddprun
