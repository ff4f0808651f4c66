#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/talk/control_socket.h"
#include "launcher/talk/job_status.h"

namespace ddprun {

/// The options of the subcommands that ask a running job.
struct AskOptions {
    std::string job;                 ///< --job; "" the only one
    std::optional<int> rank;         ///< -r, --rank
    bool follow = false;             ///< -f, --follow
    bool json = false;               ///< --json
    std::vector<std::string> words;  ///< the other arguments
};

/// `ddprun ps` and the other subcommands. Each returns the exit code: 0; 1 when the job refuses or fails; 64
/// for wrong usage; 69 for no such job.
int show_jobs(const AskOptions& options);
int show_gpus(const AskOptions& options);
int send_signal(const AskOptions& options);
int show_stacks(const AskOptions& options);
int drain(const AskOptions& options);
int show_logs(const AskOptions& options);
/// `ddprun top`: runs until q, Ctrl-C or the end of standard input.
int watch_jobs(const AskOptions& options);
/// Prints an error and returns its exit code.
int complain(const std::string& command, const Error& error);

/// The job that `which` names: an id, the beginning of one, or a run id; "" the only one that runs.
/// Error: NotFound, InvalidArgument (several match; they are listed).
Result<RunningJob> choose_job(const std::string& which);
/// The statuses of several jobs with their GPUs: each job once, even if several of its nodes are on this
/// host, and without jobs that have ended.
struct AskedJobs {
    std::vector<JobStatus> statuses;
    std::vector<Error> failures;
};
AskedJobs ask_all(const std::vector<RunningJob>& jobs);
/// Asks a job, by any of its nodes, for the status of the whole job. Error: as ask_job.
Result<JobStatus> ask_status(const RunningJob& job);

}  // namespace ddprun
