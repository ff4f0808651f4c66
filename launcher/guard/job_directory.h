#pragma once

#include <memory>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// Where directories of jobs are made: memory that all processes of this host see (/dev/shm), else the
/// temporary files'.
std::string place_of_job_directories();
/// "ddprun-job-<id>", the id being 16 hexadecimal digits.
std::string job_directory_name(std::string_view id);

/// A directory of this job on this node for libraries of the workers that keep shared memory and sockets in
/// files: where such files have names, they go with the job. Only this user can enter it.
///
/// While it exists we hold a lock on it (flock), as on the job's cgroup: so another ddprun can tell one that
/// is in use from one that was left when ddprun and its warden were both killed.
class JobDirectory {
  public:
    /// Error: System naming it.
    static Result<std::unique_ptr<JobDirectory>> create(const std::string& path);
    /// Removes it with all that is in it.
    ~JobDirectory();
    JobDirectory(const JobDirectory&) = delete;
    JobDirectory& operator=(const JobDirectory&) = delete;

    [[nodiscard]] const std::string& path() const { return path_; }

  private:
    JobDirectory(std::string path, UniqueFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
    std::string path_;
    UniqueFd lock_;
};

/// A directory with all that is in it, following no link out of it. One that does not exist is done. Touches
/// nothing but this process's memory, so that the warden can use it.
void remove_job_directory(const std::string& path);
/// The names of the directories of this user's jobs that nobody holds the lock of.
std::vector<std::string> abandoned_job_directories(const std::string& place);
/// Removes them, at most so many at once, and tells their names.
std::vector<std::string> remove_abandoned_job_directories(const std::string& place, std::size_t most = 16);

}  // namespace ddprun
