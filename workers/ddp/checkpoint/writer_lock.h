#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "env/unique_fd.h"

namespace ddprun {
struct WorkerEnv;
}

namespace ddp {

/// Tells the runs of different jobs apart, also across restarts of a job. The run id alone does not: it is
/// "none" unless the user names the job; the token differs for every job (its hash is returned). "" without
/// either.
std::string run_identity(const ddprun::WorkerEnv& env);

/// Lets one run at a time save into a directory. Its file `.writer` names the process that saves, which holds
/// a lock on it: the kernel, or the file server, frees the lock when that process ends in whatever way. The
/// file is removed with this object.
///
/// The lock is fcntl's: unlike flock's it is not inherited by forked children, which may outlive their rank,
/// and it works across hosts on NFS and GPFS. Where the file system has no locks (Lustre without the mount
/// option flock), the name in the file decides for processes of this host, and a writer on another host
/// cannot be seen: is_left_over() then spares what may be its.
class WriterLock {
  public:
    /// Touches nothing yet.
    explicit WriterLock(const std::string& directory);
    ~WriterLock();
    WriterLock(const WriterLock&) = delete;
    WriterLock& operator=(const WriterLock&) = delete;

    /// Takes the lock, or keeps it. A lock that a process of the same run on another host still has is no
    /// obstacle: that host was lost, or the process is no longer the one that saves. For one of this host it
    /// waits, 10 s at most. Throws FileError naming the other run.
    void hold();
    /// After hold(): whether no living writer but this process can have made the unfinished file or
    /// directory.
    [[nodiscard]] bool is_left_over(const std::string& path) const;

  private:
    enum class Lock { Taken, Refused, Unsupported };
    struct Writer;
    Lock open_and_lock();
    std::pair<Lock, Writer> try_lock(const Writer& self);
    [[noreturn]] void refuse(const Writer& other) const;
    void warn_once(const Writer& other);

    const std::string directory_, path_;
    ddprun::UniqueFd fd_;
    bool sees_all_ = true;  ///< no other run can be writing
    bool has_warned_ = false;
};

}  // namespace ddp
