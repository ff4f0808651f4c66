#pragma once

#include "env/result.h"
#include "launcher/job_setup.h"

namespace ddprun {

/// Prints what --dry-run shows: the run's own decisions, taken and not carried out. Error: what the run would
/// be refused for.
Status show_plan(const JobSetup& setup, bool workers_are_given);

}  // namespace ddprun
