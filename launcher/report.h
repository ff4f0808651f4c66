#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "launcher/output.h"

namespace ddprun {

/// How one worker ended, and all that is known about why.
struct WorkerEnd {
    int rank = 0;
    int local_rank = 0;
    int node = 0;
    std::string host;
    int pid = 0;
    bool signaled = false;
    int status = 0;              ///< exit code, or the signal when `signaled`
    bool dumped_core = false;
    bool by_us = false;          ///< we stopped it: never a cause
    bool stopped_failing = false;  ///< we stopped it after it had reported its error: its end is its own failure
    TimePoint ended{};             ///< when the controller heard of it
    std::optional<TimePoint> error_reported;  ///< when its error report was written, on the controller's clock
    Duration after_start{};      ///< how long it had run
    std::uint64_t order = 0;     ///< the controller's own order of events
    std::string exec_failure;    ///< "exec ./trian: No such file or directory"; it never ran
    std::vector<std::string> last_stderr;
    std::string error_file;      ///< message and trace the worker left, as text; "" none
    std::string meaning;         ///< what we think it means; "" nothing to add
    std::string last_collective; ///< "in all_reduce #812 (25 MiB)"; "" not known
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
    bool hung = false;                     ///< stopped by us because nothing went on
    std::string failure;                   ///< a failure that is no worker's: rendezvous, store; "" none
    std::vector<WorkerEnd> workers;        ///< of the last generation
    std::vector<std::string> notes;        ///< "2 processes could not be killed: ..."
    OutputLoss loss;
    std::string log_directory;
};

/// The worker whose failure caused the job's end: the first that failed by itself. A failure is as old as the
/// error report that the worker wrote: Python takes its time to exit, and peers that only lost their connection
/// are often gone before the worker that broke it.
const WorkerEnd* root_cause(std::span<const WorkerEnd> workers);
/// What ddprun exits with (exit_codes.h).
int exit_code(const JobEnd& end);

/// "signal 9 (SIGKILL)", "exit code 3", "exec ./trian: No such file or directory".
std::string describe_end(const WorkerEnd& end);
/// What the end of a worker probably means, from what can be known without asking anybody: code, signal and
/// the last lines of stderr. "" when nothing is to be added. Facts from the system (cgroup events, kernel log)
/// are added by the caller.
std::string explain_end(const WorkerEnd& end);

/// Where the core of a process that dumped one is, as /proc/sys/kernel/core_pattern says: "core file: /tmp/core.4171"
/// or "core handed to /usr/lib/systemd/systemd-coredump (coredumpctl info 4171)". `directory` is the process's own.
std::string core_location(std::string_view core_pattern, const WorkerEnd& end, std::string_view directory);

/// The one table printed at the end of a failed job; `width` is the terminal's. Ends with a newline.
/// A successful job gives "".
std::string render_report(const JobEnd& end, int width);
/// The same as JSON for --report, one object, documented in docs/report.md.
std::string render_report_json(const JobEnd& end);

/// "SIGKILL"; "signal 77" for a number without a name.
std::string signal_name(int signal);

}  // namespace ddprun
