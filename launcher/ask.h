#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/control_socket.h"
#include "launcher/job_status.h"
#include "launcher/subcommand.h"

namespace ddprun {

/// Runs a subcommand: `arguments` begin with its name. Returns the exit code: 0, 1 the job cannot or will not do it,
/// 64 wrong usage, 69 there is no such job.
int run_subcommand(const std::vector<std::string>& arguments);

/// The job that `which` means: an id, the beginning of one, a run id; "" the only one that runs.
/// Error: NotFound, InvalidArgument (several fit; they are listed).
Result<RunningJob> choose_job(const std::string& which);
/// The statuses of several with their GPUs, each job once however many of its nodes are on this host; jobs that ended are left out.
struct AskedJobs {
    std::vector<JobStatus> statuses;
    std::vector<Error> failures;
};
AskedJobs ask_all(const std::vector<RunningJob>& jobs);
/// Asks for its status: of the whole job, whichever of its nodes this is. Error: as ask_job.
Result<JobStatus> ask_status(const RunningJob& job);
/// The same with what each node's GPUs are used for.
Result<JobStatus> ask_status_with_gpus(const RunningJob& job);

/// `ddprun top`: until q, Ctrl-C or the end of standard input.
int watch_jobs(const AskOptions& options);
/// `ddprun logs`.
int show_logs(const AskOptions& options);
/// `ddprun env`: takes the options of a job.
int show_environment(const std::vector<std::string>& options);

}  // namespace ddprun
