#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/os/log.h"
#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/ends/report.h"

namespace ddprun {

/// The content of a worker's error report, at most its first 4 MiB; "" when there is none.
std::string read_error_report(const std::string& path);

/// A worker's error report as people read it. torch's error.json becomes the message and, below it, the trace
/// with readable C++ names; any other text stays as it is. Of more than 64 KiB the middle is left out, which
/// a line says. Never fails: a worker may write anything.
std::string readable_error_file(std::string_view content);

/// Every mangled C++ name in the text, in its readable form: a signal handler cannot do that itself.
std::string with_readable_names(std::string_view text);

/// The first failure of a job, for the launcher that started this one. As torchrun does, we write it to the
/// file that our own TORCHELASTIC_ERROR_FILE names, in the form of a worker's report.
struct LauncherFailure {
    std::string report = {};   ///< the worker's error file as it wrote it; "" none, or not on this node
    std::string message = {};  ///< one line, used when `report` is empty
    std::string trace = {};    ///< follows `message`; "" none
    int error_code = 0;        ///< of the worker, -N for a signal as Python says it; else ddprun's exit code
    std::int64_t unix_seconds = 0;
};

/// {"message": {"message": ..., "errorCode": ..., "extraInfo": {"py_callstack": ..., "timestamp": "..."}}}:
/// the worker's own report with the code added, or one made of the rest.
std::string render_launcher_error_file(const LauncherFailure& failure);

/// Writes TORCHELASTIC_ERROR_FILE, in place: the path may be a descriptor of the launcher above us. Does
/// nothing when the variable is unset. Error: System, naming the file.
Status leave_error_file(const EnvironmentLookup& env, const LauncherFailure& failure);
/// The same for a job that ended with `code`, of the worker whose failure was the `cause` (null: none was)
/// what is known of it. A file that cannot be written is a warning.
void tell_launcher_above(os::Log& log, LauncherFailure failure, const WorkerEnd* cause, int code);

/// How far the clock that stamps files in `directory` (an NFS server's may differ) is ahead of this host's.
/// Makes a file there and removes it. Zero when that fails.
Duration clock_lead_of(const std::string& directory);
/// The time of an error report, on this host's monotonic clock, at most now; TimePoint{} when there is no
/// file. It is that of the file's last write, moved into the second that torch's timestamp in `content`
/// names: the report of an earlier error may take longer to be written. A timestamp before `started`, the
/// start of the worker, is ignored. `lead` is the clock_lead_of the file's directory.
TimePoint time_of_report(const std::string& path, std::string_view content, Duration lead, TimePoint started);

}  // namespace ddprun
