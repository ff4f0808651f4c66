#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "launcher/ask/control_message.h"
#include "launcher/ask/request_server.h"

namespace ddprun {

/// Answers a request with lines of JSON (control_text, control_error, or any other) and finish(), at once or
/// later (it may keep the reply). Must not block.
using ControlHandler = std::function<void(const ControlRequest& request, const RequestReply& reply)>;

/// Opens the socket for questions to a running ddprun: a Unix stream socket in the abstract namespace, of
/// which no kill leaves a file. One request per connection. Only the job's user and root get answers.
///
/// The abstract namespace belongs to the network namespace, so other containers do not see the job. Error:
/// System.
Result<std::unique_ptr<RequestServer>> open_control_socket(os::EventLoop& loop, const std::string& job,
                                                           ControlHandler handler);

/// "ddprun/1000/<job>": the socket's name without the leading zero byte.
std::string control_socket_name(unsigned uid, const std::string& job);

/// A job that runs on this host.
struct RunningJob {
    unsigned uid = 0;
    std::string id;  ///< the job's DDPRUN_JOB
    bool operator==(const RunningJob&) const = default;
};
/// The jobs in the text of /proc/net/unix, each once, sorted. Pure.
std::vector<RunningJob> jobs_in(std::string_view proc_net_unix);
/// This user's jobs that listen now; for root those of all users. Leaves out sockets that another user opened
/// under such a name, and those that accept no connection within a second.
std::vector<RunningJob> running_jobs();

/// Asks a job and returns the first line of its answer, without newline. Blocks until `deadline` at most.
/// Error: NotFound (no such job), Refused (the socket belongs to another user), Timeout, Closed, System.
Result<std::string> ask_job(const RunningJob& job, const ControlRequest& request, TimePoint deadline);

}  // namespace ddprun
