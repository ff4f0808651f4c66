#pragma once

#include "env/result.h"
#include "launcher/job/job_setup.h"

namespace ddprun {

/// Prints what --dry-run shows: what this run would decide, without doing it. Error: why the run would be
/// refused.
Status show_plan(const JobSetup& setup, bool workers_are_given);

}  // namespace ddprun
