#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/spec/job_spec.h"
#include "pbs/qstat.h"

namespace ddprun {

/// The common part of one cluster's job scripts. Scripts leave out a text that is "" and a number that is 0.
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

/// The default of --site: DDPRUN_SITE, else the first of `files` that exists, else "generic".
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

/// Fills in the name. Refuses a value that no script can hold: a name with a blank, a value with a line end.
/// Error: InvalidArgument naming the option and the value. Pure.
Status settle(JobRequest& request);

/// The whole script of a settled request. Its last line is `exec ddprun ...`, so that the scheduler's signals
/// reach ddprun. Pure.
std::string render_job_script(Scheduler scheduler, const JobRequest& request);

/// A warning for a request of GPUs or workers that names no CPUs; "" when none is needed. Pure.
std::string remark_on_cpus(Scheduler scheduler, const JobRequest& request);

/// Looks for the program as the job will. It checks nothing if a module or a line of the script's setup could
/// change what the job finds. Error: as resolve_program.
Status check_program(const JobRequest& request);

/// "01:30:00".
std::string walltime_text(Duration walltime);

/// The status of a job by its scheduler, in the same terms for all schedulers.
struct BatchStatus {
    enum class Phase : std::uint8_t { Waiting, Running, Ended } phase = Phase::Waiting;
    std::string state;  ///< "queued", "held", "running", "ended", with Slurm's own: "ended (PREEMPTED)"
    std::string queue;
    std::string reason;            ///< why it waits
    std::string hosts;             ///< on which it runs, or ran
    std::string log;               ///< path of its output; "" not known
    std::optional<int> exit_code;  ///< of an ended job, as in a shell
    std::string meaning;           ///< of the scheduler's own exit code
    std::optional<pbs::QueuePlace> place;
    bool operator==(const BatchStatus&) const = default;
};

/// The status from qstat's job, or from the output of `scontrol show job`. Pure. Error: NotFound (no such
/// job), Protocol.
BatchStatus to_batch_status(const pbs::QueuedJob& job);
Result<BatchStatus> parse_scontrol_job(std::string_view answer);
/// The id that `sbatch --parsable` prints: "17", or "17;cluster". Error: Protocol.
Result<std::string> parse_sbatch(std::string_view out);
/// The place in the ids of `squeue -h -t PD -p PARTITION --sort=-p,i -o %i`, the next job first.
std::optional<pbs::QueuePlace> place_in_squeue(std::string_view ids, std::string_view job);
/// True for "slurm 25.11.0" and later, which know --requeue=expedite.
bool can_expedite(std::string_view sbatch_version);

/// One line about a job: "12.pbs01: queued in main, 3rd of 7: Not Running: ...".
std::string describe_status(const std::string& job, const BatchStatus& status);

/// True when the error text of qsub or sbatch means that the server did not answer. A later try may succeed.
bool is_unreachable(std::string_view words);

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
