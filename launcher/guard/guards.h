#pragma once

#include <memory>
#include <string>

#include "env/io/socket.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_directory.h"
#include "launcher/guard/job_mark.h"
#include "launcher/guard/warden.h"

namespace ddprun {

/// Ensures that nothing of the job is left on this node, however its ddprun ends.
struct Guards {
    /// Sets up the guards of `workers` workers, with a cgroup where one can be had (`use_cgroup`). The warden
    /// also removes `secret_file` ("" none). Ends what killed ddpruns have left on this host, and logs it.
    /// Call it early: it forks the warden. Error: System.
    static Result<Guards> set_up(int workers, bool use_cgroup, const std::string& secret_file, os::Log& log);

    std::string id;  ///< this ddprun's; random
    JobMark mark;
    std::unique_ptr<Warden> warden;
    std::unique_ptr<JobCgroup>
        cgroup;  ///< null: not available. Destroyed before the warden, which watches over it
    std::unique_ptr<JobDirectory> files;  ///< error reports of the workers, and the files of their MPI
    UnixListener store;                   ///< this host's workers reach the store here

    /// Removes what only workers need and sends the warden away, which exits while the rest of the node is
    /// destroyed. Call it when no worker is left.
    void begin_end();

  private:
    Status open_store();
};

}  // namespace ddprun
