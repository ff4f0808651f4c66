#pragma once

#include <string>

#include "env/nodes/batch_job.h"
#include "launcher/batch/job_request.h"

namespace ddprun {

/// What `ddprun pbs` and `ddprun slurm` do. Each returns the exit code: 64 wrong usage, or the scheduler
/// refused the request; 69 there is no scheduler, or no such job; 130 after Ctrl-C; following a job to its
/// end, the job's own.

/// Prints the script, or writes it to request.script where `to_file`.
int print_job_script(Scheduler scheduler, JobRequest request, bool to_file);
/// Writes the script, submits it and follows the job; with `follow` false only prints its id.
int submit_job(Scheduler scheduler, JobRequest request, bool follow);
/// Follows the job to its end: its state and place in the queue as they change, and its output as it appears.
/// Ctrl-C leaves the job as it is. With `follow` false one look.
int show_job(Scheduler scheduler, const std::string& job, bool follow);

}  // namespace ddprun
