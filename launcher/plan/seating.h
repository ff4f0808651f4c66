#pragma once

#include <string>
#include <vector>

#include "launcher/machine/machine.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

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
