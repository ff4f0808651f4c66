#pragma once

#include <memory>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// The directory in which directories of jobs are made: /dev/shm (memory of this host), else that of
/// temporary files.
std::string place_of_job_directories();
/// "ddprun-job-<id>", the id being 16 hexadecimal digits.
std::string job_directory_name(std::string_view id);

/// A directory of this job on this node, for the workers' error reports, and for libraries of the workers
/// that keep shared memory and sockets in named files: these are removed with the job. Only this user can
/// enter it. Root's may be entered, but not listed, by everyone: root's workers can change their user, and
/// then still write a report whose name they know.
///
/// While it exists we hold a lock on it (flock), as on the job's cgroup, so that another ddprun can tell a
/// directory in use from one that was left when ddprun and its warden were both killed.
class JobDirectory {
  public:
    /// Error: System naming it.
    static Result<std::unique_ptr<JobDirectory>> create(const std::string& path);
    /// Removes the directory with its content.
    ~JobDirectory();
    JobDirectory(const JobDirectory&) = delete;
    JobDirectory& operator=(const JobDirectory&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    JobDirectory(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
    std::string path_;
    UniqueFd lock_;
};

/// Removes a directory with its content, following no link out of it; does nothing when it does not exist.
/// Uses only this process's memory, so that the warden can call it.
void remove_job_directory(const std::string& path);
/// The names of the directories of this user's jobs that no process holds the lock of.
std::vector<std::string> abandoned_job_directories(const std::string& place);
/// Removes at most `most` of them and returns their names.
std::vector<std::string> remove_abandoned_job_directories(const std::string& place, std::size_t most = 16);

}  // namespace ddprun
