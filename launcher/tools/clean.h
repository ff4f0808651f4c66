#pragma once

#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/guard/job_mark.h"
#include "launcher/talk/control_socket.h"

namespace ddprun {

/// The options of `ddprun clean`.
struct CleanOptions {
    bool dry_run = false;
    std::string user;  ///< --user: a name or number; "" this user
};

/// Removes what this user's ddpruns left on this host when they were killed with their wardens: processes
/// with a job's mark, cgroups, job directories. Prints what it removes. Returns the exit code: 0; 1 when
/// something could not be removed; 64 for wrong usage.
int clean(const CleanOptions& options);

/// The signs of jobs that still run.
struct LiveJobs {
    std::vector<std::string> ids;  ///< jobs with a control socket, or a cgroup in use
    std::vector<pid_t> ddpruns;    ///< processes named ddprun
};
/// The first ancestor of a process that is not of the same job. A living ddprun is that ancestor, because it
/// adopts orphans. 0: outside our pid namespace. Pure.
pid_t adopter_of(const MarkedProcess& process, const std::vector<MarkedProcess>& all);
/// The processes whose job no longer runs; in doubt it runs. Pure.
std::vector<MarkedProcess> abandoned_processes(const std::vector<MarkedProcess>& all, const LiveJobs& live);

}  // namespace ddprun
