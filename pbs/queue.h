#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/result.h"

namespace ddprun::pbs {

/// What the server tells of a job.
struct QueuedJob {
    std::string id;
    std::string
        state;  ///< one letter: Q queued, H held, W waiting, R running, E exiting, F (Torque: C) finished ...
    std::string queue;
    std::string comment;             ///< why it waits: "Not Running: Insufficient amount of resource: ngpus"
    std::string exec_host;           ///< "node01/0*64+node02/0*64"; "" it has not run
    std::string output;              ///< where its output goes, without the host: "/home/u/train.o12"
    std::optional<int> exit_status;  ///< of a finished job; exit_code_of reads it
    int run_count = 0;
    bool operator==(const QueuedJob&) const = default;
};

/// From what `qstat -f -F json JOB` prints, or `qstat -f JOB` (Torque; and OpenPBS, whose JSON breaks at some
/// names). Error: NotFound (no such job), Protocol.
Result<QueuedJob> parse_job(std::string_view answer);

/// The id that qsub prints, of a job or of an array ("5[].pbs01"). Error: Protocol.
Result<std::string> parse_submitted(std::string_view out);

/// Which of the waiting jobs of its queue it is, in the order in which qstat lists them: an estimate,
/// priorities are the scheduler's own.
struct QueuePlace {
    int place = 0;    ///< from 1 on
    int waiting = 0;  ///< jobs in state Q, this one too
    bool operator==(const QueuePlace&) const = default;
};
/// From what `qstat` prints, one line for each job. nullopt: the job does not wait there.
std::optional<QueuePlace> place_in_queue(std::string_view table, std::string_view job,
                                         std::string_view queue);

/// The hosts of exec_host, in order, each once: "node01, node02".
std::string hosts_of(std::string_view exec_host);

/// As a shell has it: 256 + signal and 128 + signal become 128 + signal. PBS's own negative codes become 1.
int exit_code_of(int exit_status);
/// What a code of its own says: "the walltime was exceeded"; "" for codes of the job.
std::string_view meaning_of(int exit_status);

}  // namespace ddprun::pbs
