#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/ask/control_socket.h"
#include "launcher/guard/job_mark.h"

namespace ddprun {

/// What was said behind `ddprun clean`.
struct CleanOptions {
    bool dry_run = false;
    bool help = false;
    std::string user;  ///< --user: a name or number; "" this user
};

/// Ends what ddpruns of this user that were killed with their wardens have left on this host: processes that
/// carry a job's mark, cgroups, job directories. Prints what it ended. Returns the exit code: 0, 1 something
/// could not be ended, 64 wrong usage.
int clean(const CleanOptions& options);

/// What tells that jobs still run.
struct LiveJobs {
    std::vector<std::string> ids;  ///< jobs with a control socket, or a cgroup in use
    std::vector<pid_t> ddpruns;    ///< processes that look like a ddprun
};
/// The first ancestor of a process that is not of the same job: a ddprun that lives is that, as it adopts
/// orphans. 0: it is outside of our pid namespace. Pure.
pid_t adopter_of(const MarkedProcess& process, const std::vector<MarkedProcess>& all);
/// The processes whose job does not run any more. In doubt it runs. Pure.
std::vector<MarkedProcess> abandoned_processes(const std::vector<MarkedProcess>& all, const LiveJobs& live);

}  // namespace ddprun
