#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/plan/machine.h"

namespace ddprun {

/// Where one worker may run and take memory from.
struct Binding {
    std::vector<int> cpus;          ///< empty: anywhere
    std::vector<int> memory_nodes;  ///< empty: anywhere
    int cores = 1;  ///< physical cores for this worker alone: its share of `cpus`, or of the machine
};

struct Bindings {
    std::vector<Binding> workers;  ///< by local rank
    std::string why;               ///< "by NUMA node of its GPU", "none: one NUMA node"
};

/// Decides the binding of a node's workers. torchrun's meanings: node is the NUMA node of the worker's GPU,
/// socket all nodes of its package, exclusive an own share of the node's physical cores, core-complex one
/// group of cores of the node that share a cache. Without GPUs the workers are spread over the nodes in
/// blocks. Auto is node where that is unambiguous, else none; and no core is left idle by it: a NUMA node of
/// the same socket that no GPU is at goes to the nearest worker's, and where there are more nodes than
/// workers without GPUs each has a block of nodes.
///
/// Auto binds nobody where the batch system has given a part of the host and nothing confines us to it: which
/// part that is nobody knows, and other jobs would be in the way. `cores` are then shares of what was given.
/// Error: InvalidArgument when there are fewer cores than `exclusive` needs.
Result<Bindings> bind_workers(NumaBinding policy, const Machine& machine, int workers);

}  // namespace ddprun
