#pragma once

#include "env/result.h"
#include "launcher/job_spec.h"
#include "launcher/start/start_plan.h"

namespace ddprun {

/// What there is to decide on: the allocation around us or the hosts that the user names, and what can start
/// something there. Thin; its functions ask the resolver and PATH later. Error: as find_allocation.
Result<StartFacts> look_for_hosts(const StartSpec& asked);

}  // namespace ddprun
