#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// A process's cgroup in the v2 hierarchy.
struct OwnCgroup {
    std::string directory;  ///< "/sys/fs/cgroup/user.slice/job_12"; "" cannot be used
    std::string why;        ///< "cgroup v2 is not mounted"; "" with a directory
};
/// Finds our cgroup from the texts of /proc/self/cgroup and /proc/self/mountinfo. A hybrid machine's v2
/// hierarchy, without controllers, can be used; one that is mounted read-only or that shows another part of
/// the tree cannot. Pure.
OwnCgroup find_own_cgroup(std::string_view cgroup, std::string_view mountinfo);

/// Reads both files and calls find_own_cgroup().
OwnCgroup look_for_own_cgroup();

/// "ddprun-job-<id>", the id being 16 hexadecimal digits.
std::string job_cgroup_name(std::string_view id);

/// A cgroup beside those of our jobs.
struct SiblingCgroup {
    std::string name;
    uid_t owner = 0;
};
/// The siblings that can be the cgroup of a job of this user. (The lock shows whether it is in use.) Pure.
std::vector<std::string> cgroups_of_jobs(const std::vector<SiblingCgroup>& siblings, uid_t user);
/// Kills and removes the cgroups of jobs below `parent` that no process holds the lock of (see JobCgroup), as
/// ddprun and its warden leave when both are killed. Returns those that are gone. At most kMaxAbandoned at
/// once, the rest the next time.
std::vector<std::string> remove_abandoned_cgroups(const std::string& parent);
inline constexpr std::size_t kMaxAbandoned = 16;

/// The writable mount points of cgroup version 2, from the text of /proc/self/mountinfo. Pure.
std::vector<std::string> cgroup2_mounts(std::string_view mountinfo);
/// The cgroups of this user's jobs below a directory, at any depth, those in use too; outer ones first.
std::vector<std::string> find_job_cgroups(const std::string& root);
/// True when no process holds its lock.
bool is_abandoned_cgroup(const std::string& path);
/// Kills its processes and removes it, if no process holds its lock. True: it is gone.
bool remove_abandoned_cgroup(const std::string& path);

/// A cgroup for the workers of one node, below our own. All that a worker has started, in any session and
/// with any environment, can be killed at once, also by the warden after our own death.
///
/// No controller is turned on in it (a cgroup with controllers for its children may hold no processes, and
/// ours holds us), so limits and accounting stay those of our own.
///
/// While it exists we hold a lock on its directory (flock). The kernel drops it with our last descriptor,
/// however we end, so that another ddprun can tell a cgroup that is in use from one that was left behind. (A
/// process id is used again, and counts from 1 in a container that shows the same cgroups.)
class JobCgroup {
  public:
    /// Makes the directory and checks that processes can be started in it. Error: System naming it (no
    /// delegation, a kernel without cgroup.kill or clone3); nothing is left.
    static Result<std::unique_ptr<JobCgroup>> create(const std::string& directory);
    /// Kills the processes that are left and removes the directory.
    ~JobCgroup();
    JobCgroup(const JobCgroup&) = delete;
    JobCgroup& operator=(const JobCgroup&) = delete;

    /// For SpawnSpec::cgroup; -1 after a renew() that failed.
    [[nodiscard]] int descriptor() const { return directory_fd_.get(); }
    /// Sends SIGKILL to every process in it and below, if there is one.
    void kill();
    /// Call it when the warden has killed the cgroup: renew() then makes it anew.
    void was_killed() { killed_ = true; }
    /// Call it before a generation: makes the cgroup anew if it has been killed (os::can_be_born_in). Error:
    /// System (a process that cannot be killed is still in it); workers then start in our own.
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

/// Sends SIGKILL to every process in a cgroup and below.
void kill_cgroup(const std::string& directory);
/// Kills all processes in a cgroup and removes it with those below it. Waits for their end, for a second at
/// most. Does nothing when the cgroup does not exist.
void remove_cgroup(const std::string& directory);

}  // namespace ddprun
