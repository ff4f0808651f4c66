#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "launcher/ends/useful_time.h"
#include "launcher/output/lines.h"
#include "launcher/spec/job_spec.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// How one worker ended: its agent's message, and what the controller adds.
struct WorkerEnd : rdzv::WorkerExited {
    int node = 0;
    std::string host;
    TimePoint ended{};  ///< when the controller heard of it
    std::optional<TimePoint>
        error_reported;       ///< when its error report was written, by the controller's clock
    std::uint64_t order = 0;  ///< the controller's own order of events
};

/// How one job ended.
struct JobEnd {
    std::string run_id;
    std::string program;
    int generation = 0;
    int restarts_used = 0;
    int max_restarts = 0;
    int recoveries = 0;  ///< in place
    JobTime time;
    int world_size = 0;
    Duration wall{};
    std::optional<int> stopped_by_signal;  ///< the signal that ended ddprun, if that is why
    bool preempted = false;
    bool out_of_time = false;  ///< a restart was left, but no time for it before the walltime ends
    bool hung = false;         ///< stopped by us because no rank made progress
    std::string failure;       ///< a failure that is no worker's: rendezvous, lost node, hang; "" none
    std::optional<TimePoint> failure_decided;  ///< when `failure` was found; nullopt: no failure
    std::vector<WorkerEnd> workers;            ///< of the last generation
    std::int64_t steps = -1;                   ///< the highest step reported in any generation; -1: none
    std::vector<std::string> notes;            ///< "2 processes could not be killed: ..."
    std::vector<std::string> lost_hosts;       ///< before the job was stopped
    OutputLoss loss;
    std::string log_directory;
};

/// A note for a job in PBS that got SIGTERM after the loss of a host: PBS ends a job when its lost host comes
/// back. "" there is none. Pure.
std::string note_of_returned_host(const JobEnd& end);

/// The worker whose failure caused the job's end: the first that failed by itself. A failure is as old as its
/// error report: Python exits late, and peers that only lost their connection often exit before the worker
/// that broke it. Failures after `decided` (when a failure that is no worker's was found) do not count: we
/// had then ended collectives and stopped peers.
const WorkerEnd* root_cause(std::span<const WorkerEnd> workers,
                            std::optional<TimePoint> decided = std::nullopt);
const WorkerEnd* root_cause(const JobEnd& end);
/// True when both wrote the same error report, apart from ranks and other numbers.
bool failed_alike(const WorkerEnd& one, const WorkerEnd& other);
/// ddprun's exit code (exit_codes.h).
int exit_code(const JobEnd& end);

/// "signal 9 (SIGKILL)", "exit code 3", "exec ./trian: No such file or directory".
std::string describe_end(const WorkerEnd& end);

/// The job's end in one line: "train failed: rank 1 on node02: exit code 3".
std::string headline(const JobEnd& end);
/// The table printed at the end of a failed job, with a final newline; "" for a successful job. Rows longer
/// than `width` columns are wrapped; nullopt (no terminal): each row is one line, so that `grep` finds it.
std::string render_report(const JobEnd& end, std::optional<int> width);
/// Checks that --report, --log-dir and --tensorboard can be written. Error: InvalidArgument, with the remedy.
Status check_places(const JobSpec& spec);
/// The report as one JSON object for --report (docs/report.md).
std::string render_report_json(const JobEnd& end);

}  // namespace ddprun
