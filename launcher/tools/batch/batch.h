#pragma once

#include <string>

#include "env/nodes/batch_job.h"
#include "launcher/tools/batch/job_request.h"

namespace ddprun {

/// The commands of `ddprun pbs` and `ddprun slurm`. Each returns the exit code: 64 for wrong usage or a
/// refused request; 69 for no scheduler or no such job; 130 after Ctrl-C; the job's own after following it to
/// its end.

/// Prints the script, or writes it to request.script if `to_file`.
int print_job_script(Scheduler scheduler, JobRequest request, bool to_file);
/// Writes the script, submits it and follows the job; with `follow` false only prints its id.
int submit_job(Scheduler scheduler, JobRequest request, bool follow);
/// Follows the job to its end: shows its state and place in the queue as they change, and its output as it
/// appears. Ctrl-C leaves the job as it is. With `follow` false shows its state once.
int show_job(Scheduler scheduler, const std::string& job, bool follow);

}  // namespace ddprun
