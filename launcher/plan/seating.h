#pragma once

#include <string>
#include <vector>

#include "launcher/job_spec.h"
#include "launcher/plan/machine.h"

namespace ddprun {

/// Where each worker of this node will sit, by local rank: "CPUs 48-63, NUMA 3, GPU 0". Empty where that is
/// not worth saying: nobody is bound, or one node outside an allocation, or each process was placed by an
/// outer launcher; and where there are too many.
std::vector<std::string> seats_of(const JobSpec& spec, const Machine& machine, int workers);

struct NodeSeats {
    std::string host;
    int first_rank = 0;
    std::vector<std::string> seats;  ///< by local rank
};
/// The table of the whole job, a line each; nodes that are alike share theirs, however many they are. Empty:
/// no node has said anything.
std::vector<std::string> render_seating(const std::vector<NodeSeats>& nodes);

}  // namespace ddprun
