#pragma once

#include <memory>
#include <string>

#include "env/io/socket.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/node/guard/job_cgroup.h"
#include "launcher/node/guard/job_directory.h"
#include "launcher/node/guard/job_mark.h"
#include "launcher/node/guard/warden.h"

namespace ddprun {

/// What sees to it that nothing of the job is left on this node, however its ddprun ends.
struct Guards {
    /// For so many `workers`, with a cgroup where one can be had (`use_cgroup`), and a directory for the
    /// files of their MPI (`keeps_files`); a `secret_file` goes with us ("" none). Ends what a ddprun that
    /// was killed has left on this host, too, and tells `log`. Call it early: it forks the warden. Error:
    /// System.
    static Result<Guards> set_up(int workers, bool use_cgroup, bool keeps_files,
                                 const std::string& secret_file, os::Log& log);

    std::string id;  ///< of this ddprun; random
    JobMark mark;
    std::unique_ptr<Warden> warden;
    std::unique_ptr<JobCgroup>
        cgroup;  ///< null: none can be had. Goes before the warden, which watches over it
    std::unique_ptr<JobDirectory> files;  ///< null: the workers' MPI has none
    UnixListener store;                   ///< by which this host's workers come to the store

  private:
    Status open_store(bool keeps_files, os::Log& log);
};

}  // namespace ddprun
