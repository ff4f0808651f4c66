#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "launcher/job_spec.h"
#include "launcher/output/log_files.h"
#include "rendezvous/agent_message.h"

namespace ddprun {

/// How one worker ended: what its agent has told, and what the controller knows besides.
struct WorkerEnd : rdzv::WorkerExited {
    int node = 0;
    std::string host;
    TimePoint ended{};  ///< when the controller heard of it
    std::optional<TimePoint>
        error_reported;       ///< when its error report was written, on the controller's clock
    std::uint64_t order = 0;  ///< the controller's own order of events
};

/// How one job ended.
struct JobEnd {
    std::string run_id;
    std::string program;
    int generation = 0;
    int restarts_used = 0;
    int max_restarts = 0;
    int world_size = 0;
    Duration wall{};
    std::optional<int> stopped_by_signal;  ///< the signal that ended ddprun, if that is why
    bool preempted = false;
    bool out_of_time = false;  ///< a restart was left, but no time for it before the walltime ends
    bool hung = false;         ///< stopped by us because nothing went on
    std::string failure;       ///< a failure that is no worker's: rendezvous, lost node, hang; "" none
    std::optional<TimePoint> failure_decided;  ///< when; nullopt: there is none
    std::vector<WorkerEnd> workers;            ///< of the last generation
    std::int64_t steps = -1;         ///< the furthest that a worker of any generation told; -1: none did
    std::vector<std::string> notes;  ///< "2 processes could not be killed: ..."
    OutputLoss loss;
    std::string log_directory;
};

/// The worker whose failure caused the job's end: the first that failed by itself. A failure is as old as the
/// error report that the worker wrote: Python takes its time to exit, and peers that only lost their
/// connection are often gone before the worker that broke it. What failed after `decided` (on a failure that
/// is no worker's) failed because of what we did then: its collectives were ended, its peers stopped.
const WorkerEnd* root_cause(std::span<const WorkerEnd> workers,
                            std::optional<TimePoint> decided = std::nullopt);
const WorkerEnd* root_cause(const JobEnd& end);
/// Whether both wrote the same error report, but for ranks and other numbers: the second tells nothing new.
bool failed_alike(const WorkerEnd& one, const WorkerEnd& other);
/// What ddprun exits with (exit_codes.h).
int exit_code(const JobEnd& end);

/// "signal 9 (SIGKILL)", "exit code 3", "exec ./trian: No such file or directory".
std::string describe_end(const WorkerEnd& end);

/// How the job ended, in one line: "train failed: rank 1 on node02: exit code 3".
std::string headline(const JobEnd& end);
/// The one table printed at the end of a failed job; ends with a newline. `width` is the terminal's, in
/// columns: longer rows are wrapped. Without one (a file, a pipe) each row is one line, which `grep` finds. A
/// successful job gives "".
std::string render_report(const JobEnd& end, std::optional<int> width);
/// Whether --report can be written where it says. Error: InvalidArgument, with the remedy.
Status check_report_file(const JobSpec& spec);
/// The same as JSON for --report, one object, documented in docs/report.md.
std::string render_report_json(const JobEnd& end);

}  // namespace ddprun
