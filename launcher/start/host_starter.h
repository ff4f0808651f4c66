#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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
    std::vector<AllocatedHost> hosts;  ///< by node rank
    NodeRange nodes;                   ///< those of them that are to be started
    Starter starter = Starter::Ssh;
    std::vector<std::string> endpoints;  ///< of the head
    bool tls = false;                    ///< as it wants to be spoken to
    std::string salt;                    ///< of the secret, where it follows from the PBS job's cookie
    std::string secret_file;  ///< where it lies until all have joined, if a file is its way; "" none
    StartOrder order;
};

/// Makes the secret of a job whose nodes we start ourselves, new in each call: what follows from the PBS
/// job's cookie and a new `start.salt` where that is the way it travels, else a random one; and chooses
/// `start.secret_file` in the order's directory where it travels by a file, which is not written yet. Error:
/// System (getrandom).
Result<std::string> make_start_token(HostStart& start, const EnvironmentLookup& variable);

/// Where the ddprun of other hosts find the head: "host:port" by its name and its addresses, or by the one on
/// which alone it listens.
std::vector<std::string> endpoints_of_head(const std::string& own_name, const std::string& listens_on,
                                           std::uint16_t port);
/// Begins to start `start.nodes`. Error: System (no file for the secret).
Result<std::unique_ptr<RemoteAgents>> start_hosts(RemoteAgents::Parts parts, const HostStart& start,
                                                  const std::string& token, Duration timeout);

/// As one of those: where the head is, by which secret, as what, and what it wants.
struct StartedNode {
    Endpoint head;
    std::vector<Endpoint> elsewhere;  ///< by which others of its addresses it may be reached
    std::string token;
    int node = 0;
    AgentCall call;
    StartOrder order;
};
/// Reads the secret, finds the head and asks for its order. Blocks, for a minute at most.
/// Error: InvalidArgument, Refused, Timeout, NotFound (this host is none of the order's).
Result<StartedNode> ask_head(const AgentCall& call);
/// Tells the head why this host cannot take part.
void tell_head(const StartedNode& started, const std::string& why);

}  // namespace ddprun
