#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "env/event_loop.h"
#include "env/result.h"
#include "launcher/control_message.h"
#include "launcher/request_server.h"

namespace ddprun {

/// The answer to one request: lines of JSON (control_text, control_error, or any other), then finish().
using ControlReply = RequestReply;

/// Where a running ddprun can be asked: a Unix stream socket in the abstract namespace, so nothing is left behind
/// whoever is killed. One request per connection. Only the user who runs the job, and root, are answered.
///
/// The abstract namespace belongs to the network namespace: from inside another container the job is not seen.
class ControlSocket {
  public:
    /// Answers with lines, at once or later (it may keep the reply); must not block.
    using Handler = std::function<void(const ControlRequest& request, ControlReply reply)>;

    /// Error: System.
    static Result<std::unique_ptr<ControlSocket>> create(os::EventLoop& loop, const std::string& job);

    /// What is done for requests of this name.
    void on(const std::string& request, Handler handler) { handlers_[request] = std::move(handler); }

  private:
    ControlSocket() = default;
    void handle(const std::string& line, const ControlReply& reply) const;

    std::map<std::string, Handler> handlers_;
    std::unique_ptr<RequestServer> server_;
};

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
/// The jobs of this user that listen now; of all users for root.
std::vector<RunningJob> running_jobs();

/// Asks a job and waits for the first line of its answer, without newline. Blocks until `deadline`.
/// Error: NotFound (no such job), Refused (the socket belongs to another user), Timeout, Closed, System.
Result<std::string> ask_job(const RunningJob& job, const ControlRequest& request, TimePoint deadline);
/// The same for an answer of many lines, up to `max_bytes` until the job closes.
Result<std::string> ask_job_all(const RunningJob& job, const ControlRequest& request, TimePoint deadline,
                                std::size_t max_bytes);

}  // namespace ddprun
