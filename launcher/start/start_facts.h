#pragma once

#include <string>
#include <vector>

#include "env/nodes/allocation.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"
#include "launcher/start/start_plan.h"

namespace ddprun {

/// Collects the facts for plan_start(): the allocation around us or the hosts that the user names. Thin; the
/// functions in the result ask the resolver and PATH later. Error: as find_allocation.
Result<StartFacts> look_for_hosts(const StartSpec& asked);
/// The names of a job's hosts by node rank, for those who are missing: of those that we `start` (null: none),
/// or of the allocation where our own rank goes by it; empty: not known.
std::vector<std::string> hosts_by_rank(const JobSpec& spec, const std::vector<AllocatedHost>* start,
                                       const std::string& own_name);

}  // namespace ddprun
