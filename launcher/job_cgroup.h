#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Where a process stands in the cgroup v2 hierarchy.
struct OwnCgroup {
    std::string directory;  ///< "/sys/fs/cgroup/user.slice/job_12"; "" none can be used
    std::string why;        ///< "cgroup v2 is not mounted"; "" with a directory
};
/// From the texts of /proc/self/cgroup and /proc/self/mountinfo. A hybrid machine's v2 hierarchy, without
/// controllers, will do; one that is mounted read-only or that shows another part of the tree will not. Pure.
OwnCgroup find_own_cgroup(std::string_view cgroup, std::string_view mountinfo);

/// A cgroup for the workers of one node, below our own: whatever a worker has started, in whatever session and with
/// whatever environment, can be killed at once, also by the warden after our own death.
///
/// No controller is turned on in it (a cgroup with controllers for its children may hold no processes, and ours
/// holds us), so limits and accounting stay those of our own.
class JobCgroup {
  public:
    /// Makes the directory, and tries whether processes can be started in it. Error: System naming it (no delegation,
    /// a kernel without cgroup.kill or clone3); nothing is left.
    static Result<std::unique_ptr<JobCgroup>> create(const std::string& directory);
    /// Kills what is left and removes it.
    ~JobCgroup();
    JobCgroup(const JobCgroup&) = delete;
    JobCgroup& operator=(const JobCgroup&) = delete;

    /// For SpawnSpec::cgroup; -1 after a renew() that failed.
    [[nodiscard]] int descriptor() const { return directory_fd_.get(); }
    /// SIGKILL to every process in it and below.
    void kill();
    /// Before a generation: makes it anew if it has been killed, see os::can_be_born_in. Error: System (a process
    /// that cannot be killed is still in it); workers then start in our own.
    Status renew();

  private:
    explicit JobCgroup(std::string directory) : directory_(std::move(directory)) {}
    Status make();

    std::string directory_;
    UniqueFd directory_fd_;
    bool exists_ = false;
    bool killed_ = false;
};

/// Kills all processes in a cgroup and removes it with those below it. Waits for their end, for a second at most.
/// One that does not exist is done.
void remove_cgroup(const std::string& directory);

}  // namespace ddprun
