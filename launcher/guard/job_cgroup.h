#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

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

/// The same for this process, now.
OwnCgroup look_for_own_cgroup();

/// "ddprun-job-<id>", the id being 16 hexadecimal digits.
std::string job_cgroup_name(std::string_view id);

/// A cgroup beside those of our jobs.
struct SiblingCgroup {
    std::string name;
    uid_t owner = 0;
};
/// Those that can be the cgroup of a job of this user; whether its ddprun is gone, its lock tells. Pure.
std::vector<std::string> cgroups_of_jobs(const std::vector<SiblingCgroup>& siblings, uid_t user);
/// What ddprun and its warden leave when both are killed: kills and removes each such cgroup below `parent`
/// that nobody holds the lock of (see JobCgroup), and tells which are gone. At most kMaxAbandoned at once,
/// the rest the next time.
std::vector<std::string> remove_abandoned_cgroups(const std::string& parent);
inline constexpr std::size_t kMaxAbandoned = 16;

/// Where cgroup version 2 is mounted and can be written, from the text of /proc/self/mountinfo. Pure.
std::vector<std::string> cgroup2_mounts(std::string_view mountinfo);
/// The cgroups of this user's jobs below a directory, at any depth, those in use too; outer ones first.
std::vector<std::string> find_job_cgroups(const std::string& root);
/// Nobody holds its lock.
bool is_abandoned_cgroup(const std::string& path);
/// Kills what is in it and removes it, if nobody holds its lock. True: it is gone.
bool remove_abandoned_cgroup(const std::string& path);

/// A cgroup for the workers of one node, below our own: whatever a worker has started, in whatever session
/// and with whatever environment, can be killed at once, also by the warden after our own death.
///
/// No controller is turned on in it (a cgroup with controllers for its children may hold no processes, and
/// ours holds us), so limits and accounting stay those of our own.
///
/// While it exists we hold a lock on its directory (flock). The kernel drops it with our last descriptor,
/// however we end, so that another ddprun can tell a cgroup that is in use from one that was left behind; a
/// process id would not do: it is used again, and counts from 1 in a container that shows the same cgroups.
class JobCgroup {
  public:
    /// Makes the directory, and tries whether processes can be started in it. Error: System naming it (no
    /// delegation, a kernel without cgroup.kill or clone3); nothing is left.
    static Result<std::unique_ptr<JobCgroup>> create(const std::string& directory);
    /// Kills what is left and removes it.
    ~JobCgroup();
    JobCgroup(const JobCgroup&) = delete;
    JobCgroup& operator=(const JobCgroup&) = delete;

    /// For SpawnSpec::cgroup; -1 after a renew() that failed.
    [[nodiscard]] int descriptor() const { return directory_fd_.get(); }
    /// SIGKILL to every process in it and below; nothing when there is none.
    void kill();
    /// The warden has killed it: renew() makes it anew.
    void was_killed() { killed_ = true; }
    /// Before a generation: makes it anew if it has been killed, see os::can_be_born_in. Error: System (a
    /// process that cannot be killed is still in it); workers then start in our own.
    Status renew();

  private:
    explicit JobCgroup(std::string directory) : directory_(std::move(directory)) {}
    Status make();
    Status make_locked();

    std::string directory_;
    UniqueFd directory_fd_;
    bool exists_ = false;
    bool killed_ = false;
};

/// SIGKILL to every process in a cgroup and below.
void kill_cgroup(const std::string& directory);
/// Kills all processes in a cgroup and removes it with those below it. Waits for their end, for a second at
/// most. One that does not exist is done.
void remove_cgroup(const std::string& directory);

}  // namespace ddprun
