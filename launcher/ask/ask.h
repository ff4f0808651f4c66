#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/ask/control_socket.h"
#include "launcher/ask/job_status.h"

namespace ddprun {

/// What was said behind the subcommand's name.
struct AskOptions {
    std::string job;                 ///< --job; "" the only one
    std::optional<int> rank;         ///< -r, --rank
    bool follow = false;             ///< -f, --follow
    bool json = false;               ///< --json
    bool help = false;               ///< -h, --help
    std::vector<std::string> words;  ///< the others
};

/// `ddprun ps` and its like, after their names. Each returns the exit code: 0, 1 the job cannot or will not
/// do it, 64 wrong usage, 69 there is no such job.
int show_jobs(const AskOptions& options);
int show_gpus(const AskOptions& options);
int send_signal(const AskOptions& options);
int show_stacks(const AskOptions& options);
int drain(const AskOptions& options);
int show_logs(const AskOptions& options);
/// `ddprun top`: until q, Ctrl-C or the end of standard input.
int watch_jobs(const AskOptions& options);
/// Says what is wrong with a question, and returns the exit code.
int complain(const std::string& command, const Error& error);

/// The job that `which` means: an id, the beginning of one, a run id; "" the only one that runs.
/// Error: NotFound, InvalidArgument (several fit; they are listed).
Result<RunningJob> choose_job(const std::string& which);
/// The statuses of several with their GPUs, each job once however many of its nodes are on this host; jobs
/// that ended are left out.
struct AskedJobs {
    std::vector<JobStatus> statuses;
    std::vector<Error> failures;
};
AskedJobs ask_all(const std::vector<RunningJob>& jobs);
/// Asks for its status: of the whole job, whichever of its nodes this is. Error: as ask_job.
Result<JobStatus> ask_status(const RunningJob& job);

}  // namespace ddprun
