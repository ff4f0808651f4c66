#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The common part of one cluster's job scripts. Texts that are "" and numbers that are 0 are left out.
struct SiteProfile {
    std::string name = "generic";
    std::optional<Scheduler> scheduler = {};  ///< of a built-in site's machine; none: any
    int cpus_per_node = 0;
    int gpus_per_node = 0;
    std::string memory = {};       ///< of a node: "480GB"
    std::string queue = {};        ///< PBS queue, Slurm partition
    std::string place = {};        ///< PBS: -l place=
    std::string select = {};       ///< PBS: further resources of each chunk
    std::string filesystems = {};  ///< PBS: -l filesystems=
    std::string keep = "doe";      ///< PBS: -k
    std::string gpu_type = {};     ///< Slurm: --gpus-per-node=TYPE:N
    std::vector<std::string> modules = {};
    std::vector<std::pair<std::string, std::string>> environment = {};
    std::vector<std::string> setup = {};       ///< lines of the script, before the modules
    std::vector<std::string> directives = {};  ///< without "#PBS" or "#SBATCH"
    bool operator==(const SiteProfile&) const = default;
};

/// True for text without blanks, '#' and quotes, which schedulers treat specially in a directive.
bool is_directive_word(std::string_view text);
/// True for a name that a shell takes for a variable.
bool is_variable_name(std::string_view name);

/// "generic", "derecho", "polaris".
const std::vector<SiteProfile>& built_in_sites();

/// Parses a profile: a JSON object with the fields' names. Other fields are as in "generic", or as in the
/// profile that "like" names. Error: InvalidArgument naming the field.
Result<SiteProfile> parse_site(std::string_view json);

/// Finds a built-in profile by its name, or reads a file: a word with a '/' or that ends in ".json". Error:
/// InvalidArgument, System.
Result<SiteProfile> find_site(const std::string& word);

/// What `--site` is where it is not given: DDPRUN_SITE, else the first of `files` that exists, else
/// "generic".
std::string default_site(const std::optional<std::string>& ddprun_site,
                         const std::vector<std::string>& files);

/// A user's request to a scheduler, in the same terms for PBS and Slurm. The site gives the defaults.
struct JobRequest {
    SiteProfile site;
    std::string name;  ///< "" the program's name
    int nodes = 1;
    std::optional<int> cpus_per_node, gpus_per_node;
    std::string memory;   ///< of a node
    Duration walltime{};  ///< zero: the queue's default
    std::string queue;    ///< Slurm: the partition
    std::string account, filesystems;
    std::string output;                ///< file; "" the scheduler's default, or NAME-ID.log under Slurm
    std::vector<std::string> modules;  ///< besides the site's
    std::vector<std::pair<std::string, std::string>> environment;
    std::vector<std::string> setup;       ///< lines of the script, after the modules
    std::vector<std::string> directives;  ///< without "#PBS" or "#SBATCH"
    std::optional<RequeueSpec::Mode> requeue;
    std::string script;               ///< path of the script, which a requeue submits again to PBS
    std::string path;                 ///< ddprun's directory, to put before PATH; "" not needed
    std::vector<std::string> ddprun;  ///< the words after `ddprun`: options, program, arguments
    ProgramSpec program;              ///< the program among `ddprun`
    bool counts_workers = false;      ///< `ddprun` has --nproc-per-node
    WorkerCount workers;              ///< of `ddprun`
    bool is_elastic = false;          ///< `ddprun` goes on without some of its nodes: --nnodes=MIN:MAX
};

inline bool wants_requeue(const JobRequest& request) {
    return request.requeue && *request.requeue != RequeueSpec::Mode::No;
}
/// ddprun's subcommand for a scheduler.
inline std::string_view subcommand_of(Scheduler scheduler) {
    return scheduler == Scheduler::Pbs ? "pbs" : "slurm";
}

/// Fills in the name, and refuses values that no script can hold: a name with a blank, a value with a line
/// end. Error: InvalidArgument naming the option and the value. Pure.
Status settle(JobRequest& request);

/// The whole script of a settled request. Its last line is `exec ddprun ...`, so that the scheduler's signals
/// reach ddprun. Pure.
std::string render_job_script(Scheduler scheduler, const JobRequest& request);

/// A line for a request of GPUs or workers that names no CPUs; "" none is needed. Pure.
std::string remark_on_cpus(Scheduler scheduler, const JobRequest& request);

/// Looks for the program as the job will, where no module and no line of the script's setup can change what
/// the job finds. Error: as resolve_program.
Status check_program(const JobRequest& request);

/// "01:30:00".
std::string walltime_text(Duration walltime);

}  // namespace ddprun
