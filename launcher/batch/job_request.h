#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/nodes/batch_job.h"
#include "launcher/batch/site.h"
#include "launcher/job_spec.h"

namespace ddprun {

/// What a user asks a scheduler for, in the words that PBS and Slurm share. What is not said comes from the
/// site.
struct JobRequest {
    SiteProfile site;
    std::string name;  ///< "": the program's
    int nodes = 1;
    std::optional<int> cpus_per_node, gpus_per_node;
    std::string memory;   ///< of a node
    Duration walltime{};  ///< zero: the queue's default
    std::string queue;    ///< Slurm: the partition
    std::string account, filesystems;
    std::string
        output;  ///< of ddprun and the workers; "" the scheduler's default, or NAME-ID.log under Slurm
    std::vector<std::string> modules;  ///< besides the site's
    std::vector<std::pair<std::string, std::string>> environment;
    std::vector<std::string> setup;       ///< lines of the script, behind the modules
    std::vector<std::string> directives;  ///< as they stand behind #PBS or #SBATCH
    std::optional<RequeueSpec::Mode> requeue;
    std::string script;               ///< where the script will lie: PBS is given it again
    std::string path;                 ///< a directory to put before PATH, where ddprun is; "" none
    std::vector<std::string> ddprun;  ///< the words behind `ddprun`: options, program, arguments
    std::string program;              ///< of these
    bool counts_workers = false;      ///< they have --nproc-per-node
};

/// Fills in what follows from the rest (the name), and finds what no script can hold: a name with a blank, a
/// value with a line end. Error: InvalidArgument naming the option and the value. Pure.
Status settle(JobRequest& request);

/// The whole script, its last line `exec ddprun ...`: so signals of the scheduler reach ddprun. Of a settled
/// request. Pure.
std::string render_job_script(Scheduler scheduler, const JobRequest& request);

/// "01:30:00".
std::string walltime_text(Duration walltime);

}  // namespace ddprun
