#pragma once

#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/job_spec.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun {

/// What this host knows of itself and of the endpoint's name.
struct HostFacts {
    std::string host_name;
    std::vector<std::string> addresses;           ///< numeric, of this host's interfaces
    std::vector<std::string> endpoint_addresses;  ///< numeric, what the endpoint's host name resolves to
    std::string unanswered = {};  ///< of whom the resolver had no answer in time, as a line; "" it had
};

/// Whether the controller lives in this process, where it listens or is reached, and why.
struct HeadChoice {
    bool is_head = true;
    Endpoint endpoint;  ///< head: where to listen (port 0: any); otherwise where the controller is
    std::string why;    ///< "node rank 0", "node07 is not this host"
    /// This host is the head's, but nobody said which process of it: whoever takes the port first is the
    /// head.
    bool contested = false;
};

/// Whether a host's name, or an address, is this host's. Pure.
bool is_this_host(const std::string& name, const HostFacts& facts);

/// Pure. One node is always its own head. With several, by the field's rules: static goes by --node-rank,
/// c10d by whose host the endpoint names (by --node-rank too when that name resolves to nothing here),
/// `is_host` in
/// --rdzv-conf overrides both.
/// Error: InvalidArgument when several nodes are wanted and nothing says where the controller is; as
/// check_found_at.
Result<HeadChoice> choose_head(const JobSpec& spec, const HostFacts& facts);

/// Pure. The other nodes look for a head by `host`, and it listens on one address only: whether that is one
/// of `addresses`, which the name has here. What it has on this host alone (a loopback, as Debian gives a
/// host's own name) tells nothing. Error: Mismatch, with the remedy.
Status check_found_at(const std::string& host, const std::vector<std::string>& addresses,
                      const RendezvousSpec& rendezvous);

/// `local_addr` (--local-addr) is one of this host's `addresses`, or a loopback. A name is not looked up
/// here. Pure. Error: InvalidArgument, with the remedy.
Status check_local_address(const std::string& local_addr, const std::vector<std::string>& addresses);

/// Where this process reaches a server of its own that listens at `port`. Pure.
Endpoint own_endpoint(const RendezvousSpec& rendezvous, std::uint16_t port);

/// The endpoint that all nodes of this job share; nullopt for one node that is its own head.
std::optional<Endpoint> shared_endpoint(const JobSpec& spec);

/// What workers get as MASTER_ADDR: --master-addr, else an address of the node that has rank 0. `first_node`
/// are the addresses it has told us; of ourselves we know better what others reach: --local-addr, else the
/// endpoint that they came by, else (one node) the loopback. Pure.
std::string master_host(const JobSpec& spec, bool first_node_is_here,
                        const std::vector<std::string>& first_node);

/// What workers get as MASTER_ADDR and MASTER_PORT.
struct MasterChoice {
    std::string host;
    int port = 0;  ///< 0: a free one, another for each generation (MasterPort)
};
/// Pure. `serves_torch`: the controller, at `controller_port`, is PyTorch's store. `met_elsewhere`: the nodes
/// met before, as an outer launcher told them, so a given --master-port is not where the controller listens.
/// The rest as master_host.
MasterChoice choose_master(const JobSpec& spec, bool serves_torch, std::uint16_t controller_port,
                           bool met_elsewhere, bool first_node_is_here,
                           const std::vector<std::string>& first_node);

/// Whether the controller's port is PyTorch's store too, and with it what workers get as MASTER_PORT; and
/// why.
struct TorchStoreChoice {
    bool is_served = false;
    std::string why;
};
/// Pure. Python's programs get it, as torchrun gives it to all: its agent, too, listens at MASTER_PORT.
/// Others may know nothing of it, and listen there themselves. Error: InvalidArgument where the user insists
/// on it, and on another MASTER_ADDR or MASTER_PORT than the controller's.
Result<TorchStoreChoice> choose_torch_store(const JobSpec& spec, bool is_python);

/// How often nodes speak, and the silence after which one is lost: --heartbeat-timeout, else what --rdzv-conf
/// says, counted as torchrun does (interval times attempts), else ours. Pure.
rdzv::Heartbeats heartbeats_of(const RendezvousSpec& rendezvous);

/// How long a node and a head that lost each other by silence try to meet again. Pure.
inline Duration return_timeout(const RendezvousSpec& rendezvous) {
    return 10 * heartbeats_of(rendezvous).timeout;
}

/// Thin: the numeric addresses of this host's interfaces.
std::vector<std::string> interface_addresses();
/// Thin: this host's name and addresses, and what `endpoint` resolves to. Blocks for kResolverPatience at
/// most; a signal that stops a job ends the process meanwhile.
HostFacts look_at_host(const std::optional<Endpoint>& endpoint);

/// Keeps a TCP port free for a worker's own server (PyTorch's rank 0 listens on MASTER_PORT).
///
/// The socket is bound and never listens: the kernel gives the port to nobody else, while a server that sets
/// SO_REUSEADDR, as they all do, can still bind it. There is no moment between probing and using.
class MasterPort {
  public:
    /// A port the kernel picks, new for every call; the one before is released. Error: System.
    Result<int> reserve();
    /// Checks that nobody listens on a port the user chose.
    /// Error: System ("--master-port: 29500: Address already in use").
    static Status check(int port);

  private:
    UniqueFd held_;
};

}  // namespace ddprun
