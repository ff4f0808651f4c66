#pragma once

#include "env/log.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// Makes this run's own directory "<--log-dir>/<run id>_<random>", or a temporary one when streams go to files and
/// no --log-dir says where, and returns the output part of `spec` with it. A directory that cannot be made costs
/// the files, not the job: it is said once, and the streams come to the console.
OutputSpec prepare_log_directory(const JobSpec& spec, os::Log& log);

}  // namespace ddprun
