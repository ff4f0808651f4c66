#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/talk/control_message.h"

namespace ddprun {

/// Listens for questions to a running ddprun: a non-blocking Unix stream socket in the abstract namespace, of
/// which no kill leaves a file. The abstract namespace belongs to the network namespace, so other containers
/// do not see the job. Error: System.
Result<UniqueFd> listen_for_questions(const std::string& job);
/// "" when the peer of a connection is the job's user or root, else the answer that refuses it.
std::string refuse_other_users(int fd);

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
