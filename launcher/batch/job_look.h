#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "pbs/queue.h"

namespace ddprun {

/// What a scheduler tells of a job, in words that all of them share.
struct JobLook {
    enum class Phase : std::uint8_t { Waiting, Running, Ended } phase = Phase::Waiting;
    std::string state;  ///< "queued", "held", "running", "ended"; Slurm's own words where they say more:
                        ///< "ended (PREEMPTED)"
    std::string queue;
    std::string reason;            ///< why it waits
    std::string hosts;             ///< where it runs, or ran
    std::string log;               ///< where its output goes; "" not told
    std::optional<int> exit_code;  ///< of an ended job, as a shell has it
    std::string meaning;           ///< of an exit code that is the scheduler's own
    std::optional<pbs::QueuePlace> place;
    bool operator==(const JobLook&) const = default;
};

/// Pure: what qstat says of a job, and what `scontrol show job` prints. Error: NotFound (no such job),
/// Protocol.
JobLook look_of(const pbs::QueuedJob& job);
Result<JobLook> parse_scontrol_job(std::string_view answer);
/// The id that `sbatch --parsable` prints: "17", or "17;cluster". Error: Protocol.
Result<std::string> parse_sbatch(std::string_view out);
/// From `squeue -h -t PD -p PARTITION --sort=-p,i -o %i`: ids, the next one first.
std::optional<pbs::QueuePlace> place_in_squeue(std::string_view ids, std::string_view job);
/// "slurm 25.11.0" and later know --requeue=expedite.
bool can_expedite(std::string_view sbatch_version);

/// One line about a job: "12.pbs01: queued in main, 3rd of 7: Not Running: ...". What is unchanged is not
/// said again.
std::string describe_look(const std::string& job, const JobLook& look);

/// Whether the words of a qsub or sbatch that refused mean that nobody was there to ask, so that it may do
/// later.
bool is_unreachable(std::string_view words);

}  // namespace ddprun
