#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/machine/machine.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The CPUs that one worker may run on, and the NUMA nodes it may take memory from.
struct Binding {
    std::vector<int> cpus;          ///< empty: anywhere
    std::vector<int> memory_nodes;  ///< empty: anywhere
    int cores = 1;  ///< physical cores of this worker alone: its share of `cpus`, or of the machine
};

struct Bindings {
    std::vector<Binding> workers;  ///< by local rank
    std::string why;               ///< "by NUMA node of its GPU", "none: one NUMA node"
};

/// Decides the binding of a node's workers. The policies have torchrun's meanings: node is the NUMA node of
/// the worker's GPU, socket all nodes of its package, exclusive an own share of the node's physical cores,
/// core-complex one group of cores of the node that share a cache. Without GPUs the workers are spread over
/// the nodes in blocks. Auto is node where that is unambiguous, else none, and leaves no core idle: a NUMA
/// node without a GPU goes to the nearest worker of the socket, and without GPUs each worker gets a block of
/// nodes when there are more nodes than workers.
///
/// Auto binds no worker when the batch system gave us a part of the host and nothing confines us to it: the
/// part is not known, and other jobs use the rest. `cores` are then shares of that part.
/// Error: InvalidArgument when there are fewer cores than `exclusive` needs.
Result<Bindings> bind_workers(NumaBinding policy, const Machine& machine, int workers);

/// The place of each worker of this node, by local rank: "CPUs 48-63, NUMA 3, GPU 0". Empty when no worker is
/// bound, for one node outside an allocation, for ranks that an outer launcher placed, and for more than 256
/// workers.
std::vector<std::string> seats_of(const JobSpec& spec, const Machine& machine, int workers);

struct NodeSeats {
    std::string host;
    int first_rank = 0;
    std::vector<std::string> seats;  ///< by local rank
};
/// The lines of the table for the whole job; nodes that are alike share theirs. Empty when no node sent
/// seats.
std::vector<std::string> render_seating(const std::vector<NodeSeats>& nodes);

}  // namespace ddprun
