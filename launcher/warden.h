#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun {

/// The last line against orphans: a tiny process of ours that outlives a SIGKILL of ddprun.
///
/// PR_SET_PDEATHSIG ends the workers themselves when ddprun dies, but not what they have started (data loaders,
/// shells). The warden waits on a pipe whose other end only ddprun holds; when that closes without a farewell it
/// kills every worker group in a table that both share, what is in the job's cgroup, then every process whose
/// environment carries the job's marker (those that left their group), and exits. It has its own process group, so a kill of ddprun's group
/// does not hit it, and is named "warden", so `pkill ddprun` does not either.
class Warden {
  public:
    /// Forks. Call it early, while this process is small and single-threaded. `marker` is the whole
    /// "NAME=value" that every worker's environment holds; `cgroup` the directory of the job's cgroup, which need
    /// not exist yet, "" none. Error: System (pipe2, mmap, fork).
    static Result<std::unique_ptr<Warden>> start(std::string marker, std::string cgroup, int max_groups);
    /// Says farewell and waits for the warden's exit (a millisecond).
    ~Warden();
    Warden(const Warden&) = delete;
    Warden& operator=(const Warden&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    /// The worker with this local rank leads this group now; 0: it is buried. One atomic store.
    void set_group(int local_rank, pid_t group);
    /// The warden has died (somebody killed it, and it has been reaped): start another, with the same table.
    Status restart();

  private:
    struct Table;
    Warden(std::string marker, std::string cgroup, Table* table, int max_groups)
        : marker_(std::move(marker)), cgroup_(std::move(cgroup)), table_(table), max_groups_(max_groups) {}
    Status fork_child();

    std::string marker_;
    std::string cgroup_;
    Table* table_;
    int max_groups_;
    UniqueFd alive_;  ///< write end; its closing is our death
    pid_t pid_ = 0;
};

/// Sends SIGKILL to every process of this user whose environment holds `marker` ("NAME=value"), except
/// ourselves; returns how many were found. Reads /proc.
int kill_marked_processes(const std::string& marker);

}  // namespace ddprun
