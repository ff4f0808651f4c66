#pragma once

#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/guard/job_mark.h"
#include "launcher/talk/control.h"
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
/// Asks a job, by any of its nodes, for the status of the whole job. Error: as ask_job.
Result<JobStatus> ask_status(const RunningJob& job);

/// The options of `ddprun clean`.
struct CleanOptions {
    bool dry_run = false;
    std::string user;  ///< --user: a name or number; "" this user
};

/// Removes what this user's ddpruns left on this host when they were killed with their wardens: processes
/// with a job's mark, cgroups, job directories. Prints what it removes. Returns the exit code: 0; 1 when
/// something could not be removed; 64 for wrong usage.
int clean(const CleanOptions& options);

/// The signs of jobs that still run.
struct LiveJobs {
    std::vector<std::string> ids;  ///< jobs with a control socket, or a cgroup in use
    std::vector<pid_t> ddpruns;    ///< processes named ddprun
};
/// The first ancestor of a process that is not of the same job. A living ddprun is that ancestor, because it
/// adopts orphans. 0: outside our pid namespace. Pure.
pid_t adopter_of(const MarkedProcess& process, const std::vector<MarkedProcess>& all);
/// The processes whose job no longer runs; in doubt it runs. Pure.
std::vector<MarkedProcess> abandoned_processes(const std::vector<MarkedProcess>& all, const LiveJobs& live);

}  // namespace ddprun
