#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"

namespace ddprun::pbs {

/// A job as the server shows it.
struct QueuedJob {
    std::string id;
    /// One letter: Q queued, H held, W waiting, R running, E exiting, F (Torque: C) finished ...
    std::string state;
    std::string queue;
    std::string comment;             ///< why it waits: "Not Running: Insufficient amount of resource: ngpus"
    std::string exec_host;           ///< "node01/0*64+node02/0*64"; "" before it runs
    std::string output;              ///< path of its output, without the host: "/home/u/train.o12"
    std::optional<int> exit_status;  ///< of a finished job; exit_code_of reads it
    int run_count = 0;
    bool operator==(const QueuedJob&) const = default;
};

/// Parses the output of `qstat -f -F json JOB` or `qstat -f JOB` (Torque; and OpenPBS, whose JSON breaks at
/// some names). Error: NotFound (no such job), Protocol.
Result<QueuedJob> parse_job(std::string_view answer);

/// The id that qsub prints, of a job or of an array ("5[].pbs01"). Error: Protocol.
Result<std::string> parse_submitted(std::string_view out);

/// A job's place among the waiting jobs of its queue, in qstat's order: an estimate, because the scheduler
/// has its own priorities.
struct QueuePlace {
    int place = 0;    ///< from 1 on
    int waiting = 0;  ///< jobs in state Q, including this one
    bool operator==(const QueuePlace&) const = default;
};
/// The place in the output of `qstat`, one line for each job. nullopt: the job does not wait in the queue.
std::optional<QueuePlace> place_in_queue(std::string_view table, std::string_view job,
                                         std::string_view queue);

/// The hosts of exec_host, in order, each once: "node01, node02".
std::string hosts_of(std::string_view exec_host);

/// The exit code as in a shell: 256 + signal and 128 + signal become 128 + signal; PBS's negative codes 1.
int exit_code_of(int exit_status);
/// The meaning of one of PBS's own codes: "the walltime was exceeded"; "" for codes of the job.
std::string_view meaning_of(int exit_status);

/// The walltime of a job, and the time that it has run.
struct JobTime {
    Duration limit{};
    Duration elapsed{};
};

/// Parses the output of `qstat -f -F json JOB` (OpenPBS). The start is text in the server's time zone: when
/// the elapsed time differs from `age` (the job's age by this host) or from resources_used.walltime by whole
/// quarters of an hour, the zones differ and it is corrected. Reads TZ. Error: Protocol (no JSON, no such
/// job), NotFound (the job has no walltime, or has not started).
Result<JobTime> parse_qstat(std::string_view json, std::optional<Duration> age = std::nullopt);

/// "01:30:00", "90:00" (minutes), "5400" (seconds), "2:01:30:00" (days). Error: InvalidArgument.
Result<Duration> parse_walltime(std::string_view text);

}  // namespace ddprun::pbs
