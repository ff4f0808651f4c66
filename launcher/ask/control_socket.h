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
/// later (it may keep the reply); must not block.
using ControlHandler = std::function<void(const ControlRequest& request, const RequestReply& reply)>;

/// Where a running ddprun can be asked: a Unix stream socket in the abstract namespace, so nothing is left
/// behind whoever is killed. One request per connection. Only the user who runs the job, and root, are
/// answered.
///
/// The abstract namespace belongs to the network namespace: from inside another container the job is not
/// seen. Error: System.
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
/// The jobs of this user that listen now; of all users for root. Sockets that somebody else opened under such
/// a name are left out, and so are those that let nobody connect for a second.
std::vector<RunningJob> running_jobs();

/// Asks a job and waits for the first line of its answer, without newline. Blocks until `deadline`.
/// Error: NotFound (no such job), Refused (the socket belongs to another user), Timeout, Closed, System.
Result<std::string> ask_job(const RunningJob& job, const ControlRequest& request, TimePoint deadline);

}  // namespace ddprun
