#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/tools/batch/job_request.h"
#include "pbs/qstat.h"

namespace ddprun {

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

/// True when the error text of qsub or sbatch means that the server did not answer, so that a later try may
/// succeed.
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
