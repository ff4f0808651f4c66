#pragma once

#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/spec/job_spec.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun {

/// What this host knows about itself and about the endpoint's name.
struct HostFacts {
    std::string host_name;
    std::vector<std::string> addresses;           ///< numeric, of this host's interfaces
    std::vector<std::string> endpoint_addresses;  ///< numeric, what the endpoint's host name resolves to
    std::string unanswered = {};  ///< a line about a name that the resolver did not answer in time; "" none
};

/// Whether the controller runs in this process, where it listens or is reached, and why.
struct HeadChoice {
    bool is_head = true;
    Endpoint endpoint;  ///< head: where to listen (port 0: any); otherwise where the controller is
    std::string why;    ///< "node rank 0", "node07 is not this host"
    /// The head is on this host, but the user did not say in which process: the first one to take the port is
    /// the head.
    bool contested = false;
};

/// True when a host's name, or an address, is this host's. Pure.
bool is_this_host(const std::string& name, const HostFacts& facts);

/// Pure. One node is always its own head. With several, torchrun's rules decide: static goes by --node-rank;
/// c10d by whether the endpoint names this host (by --node-rank too when that name resolves to nothing here);
/// `is_host` in --rdzv-conf overrides both.
/// Error: InvalidArgument when several nodes are wanted and no option says where the controller is; as
/// check_found_at.
Result<HeadChoice> choose_head(const JobSpec& spec, const HostFacts& facts);

/// Pure. Checks that the address on which the head listens is one of `addresses`, to which `host`, the name
/// that the other nodes use, resolves here. A name that has only loopback addresses (as Debian gives a host's
/// own name) passes. Error: Mismatch, with the remedy.
Status check_found_at(const std::string& host, const std::vector<std::string>& addresses,
                      const RendezvousSpec& rendezvous);

/// Checks that `local_addr` (--local-addr) is one of this host's `addresses`, or a loopback. A name is not
/// looked up. Pure. Error: InvalidArgument, with the remedy.
Status check_local_address(const std::string& local_addr, const std::vector<std::string>& addresses);

/// The address at which this process reaches its own server on `port`. Pure.
Endpoint own_endpoint(const RendezvousSpec& rendezvous, std::uint16_t port);

/// The endpoint that all nodes of this job share; nullopt for one node that is its own head.
std::optional<Endpoint> shared_endpoint(const JobSpec& spec);

/// MASTER_ADDR of the workers: --master-addr, else an address of the node that has rank 0. Of another node:
/// the first of the addresses that it has sent (`first_node`). Of this node: --local-addr, else the
/// endpoint's host, else (one node) the loopback. Pure.
std::string master_host(const JobSpec& spec, bool first_node_is_here,
                        const std::vector<std::string>& first_node);

/// MASTER_ADDR and MASTER_PORT of the workers.
struct MasterChoice {
    std::string host;
    int port = 0;  ///< 0: a free port, a new one for each generation (MasterPort)
};
/// Pure. `serves_torch`: the controller, at `controller_port`, is PyTorch's store. `met_elsewhere`: the nodes
/// met through an outer launcher, so the controller does not listen at a given --master-port. The rest as
/// master_host.
MasterChoice choose_master(const JobSpec& spec, bool serves_torch, std::uint16_t controller_port,
                           bool met_elsewhere, bool first_node_is_here,
                           const std::vector<std::string>& first_node);

/// Whether the controller's port is also PyTorch's store, and so MASTER_PORT of the workers; and why.
struct TorchStoreChoice {
    bool is_served = false;
    std::string why;
};
/// Pure. Programs run by Python get the store, as torchrun's agent also listens at MASTER_PORT. Other
/// programs may not know it, and listen there themselves. Error: InvalidArgument where the user asks for a
/// store that cannot be served (--tls, another MASTER_ADDR or MASTER_PORT than the controller's).
Result<TorchStoreChoice> choose_torch_store(const JobSpec& spec, bool is_python);

/// The heartbeat interval, and the silence after which a node is lost: --heartbeat-timeout, else --rdzv-conf,
/// counted as in torchrun (interval times attempts), else our default. Pure.
rdzv::Heartbeats heartbeats_of(const RendezvousSpec& rendezvous);

/// How long a node and a head that lost each other by silence try to meet again. Pure.
inline Duration return_timeout(const RendezvousSpec& rendezvous) {
    return 10 * heartbeats_of(rendezvous).timeout;
}

/// Thin: the numeric addresses of this host's interfaces.
std::vector<std::string> interface_addresses();
/// Thin: this host's name and addresses, and what `endpoint` resolves to. Blocks for at most
/// kResolverPatience; meanwhile a stop signal ends the process.
HostFacts detect_host(const std::optional<Endpoint>& endpoint);

/// Keeps a TCP port free for a worker's own server (PyTorch's rank 0 listens on MASTER_PORT).
///
/// The socket is bound and never listens: the kernel gives the port to no other socket, but a server that
/// sets SO_REUSEADDR, as they all do, can still bind it. There is no moment between probing and using.
class MasterPort {
  public:
    /// Reserves a port that the kernel picks, new for every call, and releases the last one. Error: System.
    Result<int> reserve();
    /// Checks that no server listens on a port that the user chose.
    /// Error: System ("--master-port: 29500: Address already in use").
    static Status check(int port);

  private:
    UniqueFd held_;
};

}  // namespace ddprun
