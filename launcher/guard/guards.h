#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "env/clock.h"
#include "env/io/socket.h"
#include "env/os/log.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/guard/job_cgroup.h"
#include "launcher/guard/job_directory.h"
#include "launcher/guard/job_mark.h"

namespace ddprun {

/// A tiny process of ours that outlives a SIGKILL of ddprun and kills the job's orphans.
///
/// PR_SET_PDEATHSIG ends the workers when ddprun dies, but not their children (data loaders, shells). The
/// warden waits on a socket whose other end only ddprun holds. When that closes without a farewell, it kills
/// every worker group in a table that both share, the processes in the job's cgroup, then every process with
/// the job's mark (those that left their group), removes the job's directory of files and its secret file,
/// and exits. It has its own process group, so a kill of ddprun's group does not hit it, and is named
/// "warden", so `pkill ddprun` does not either.
class Warden {
  public:
    /// Forks. Call it early, while this process is small and single-threaded. `cgroup` is the directory of
    /// the job's cgroup, `files` that of its files (job_directory.h), `secret` its secret file
    /// (host_starter.h); "" none. They need not exist yet. Error: System (socketpair, mmap, fork).
    static Result<std::unique_ptr<Warden>> start(JobMark mark, std::string cgroup, int max_groups,
                                                 std::string files = {}, std::string secret = {});
    /// Writes the farewell and waits for the warden's exit (a millisecond). Wakes a stopped warden, and kills
    /// one that has not exited after kExitTimeout.
    ~Warden();
    /// Tells the warden that no worker is left, and to exit. Does not wait: the destructor does.
    void say_farewell();
    static constexpr Duration kExitTimeout = std::chrono::seconds(2);
    Warden(const Warden&) = delete;
    Warden& operator=(const Warden&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    /// Sets the group that the worker with this local rank leads; 0 before the worker is reaped, because its
    /// number may then be another's. One atomic store.
    void set_group(int local_rank, pid_t group);
    [[nodiscard]] pid_t group(int local_rank) const;
    /// Continues a stopped warden. Call it whenever a child changes its state.
    void wake_if_stopped() const;
    /// From now on the warden kills the workers when ddprun has not called note_alive() for `limit` (stopped
    /// by a signal, held up by a file system): other nodes have then given it up, and may have begun the next
    /// generation.
    void watch_for_stalls(Duration limit);
    /// Returns the time since the last call. Any thread may call it.
    Duration note_alive();
    /// True when the warden has killed the workers of this generation after a stall.
    [[nodiscard]] bool has_killed() const;
    /// Call it when another generation begins.
    void forget_kill();
    /// Makes the warden act as if we had been killed, and waits for its exit: for a ddprun that cannot go on
    /// and still has workers.
    void end_all();
    /// Starts another warden with the same table, after the last one was killed and reaped.
    Status restart();

  private:
    struct Table;
    Warden(JobMark mark, std::string cgroup, std::string files, std::string secret, Table* table,
           int max_groups)
        : mark_(std::move(mark)),
          cgroup_(std::move(cgroup)),
          files_(std::move(files)),
          secret_(std::move(secret)),
          table_(table),
          max_groups_(max_groups) {}
    Status fork_child();
    void await_end() const;
    void kill_workers() const;
    void ask_to_exit() const;
    void wait_for_exit();

    JobMark mark_;
    std::string cgroup_;
    std::string files_;
    std::string secret_;
    Table* table_;
    int max_groups_;
    UniqueFd alive_;  ///< our end of a socket pair: each side sees the other's death by its closing
    pid_t pid_ = 0;
};

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
