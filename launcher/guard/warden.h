#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "launcher/guard/job_mark.h"

namespace ddprun {

/// The last line against orphans: a tiny process of ours that outlives a SIGKILL of ddprun.
///
/// PR_SET_PDEATHSIG ends the workers themselves when ddprun dies, but not what they have started (data
/// loaders, shells). The warden waits on a pipe whose other end only ddprun holds; when that closes without a
/// farewell it kills every worker group in a table that both share, what is in the job's cgroup, then every
/// process that carries the job's mark (those that left their group), removes the job's directory of files
/// and its secret file, and exits. It has its own process group, so a kill of ddprun's group does not hit it,
/// and is named "warden", so `pkill ddprun` does not either.
class Warden {
  public:
    /// Forks. Call it early, while this process is small and single-threaded. `cgroup` is the directory of
    /// the job's cgroup, `files` that of its files (job_directory.h), `secret` a file (host_starter.h): they
    /// need not exist yet, "" none. Error: System (socketpair, mmap, fork).
    static Result<std::unique_ptr<Warden>> start(JobMark mark, std::string cgroup, int max_groups,
                                                 std::string files = {}, std::string secret = {});
    /// Says farewell and waits for the warden's exit (a millisecond). One that was stopped is woken; one that
    /// does not go within kPatience is killed.
    ~Warden();
    static constexpr Duration kPatience = std::chrono::seconds(2);
    Warden(const Warden&) = delete;
    Warden& operator=(const Warden&) = delete;

    [[nodiscard]] pid_t pid() const { return pid_; }
    /// The worker with this local rank leads this group now; 0: it is to be reaped, and its number another's.
    /// One atomic store.
    void set_group(int local_rank, pid_t group);
    [[nodiscard]] pid_t group(int local_rank) const;
    /// Lets a warden go on that somebody has stopped: it could not do its duty. For whenever a child changes
    /// its state.
    void wake_if_stopped() const;
    /// From now on a ddprun that does not note for `limit` that it lives (stopped by a signal, held up by a
    /// file system) loses its workers: other nodes have given it up by then, and may have begun the next
    /// generation.
    void watch_for_stalls(Duration limit);
    /// By any thread. How long ago the last note was.
    Duration note_alive();
    /// The workers of this generation were killed because ddprun stood still.
    [[nodiscard]] bool has_killed() const;
    /// Another generation begins.
    void forget_kill();
    /// Does its duty now, as if we had been killed, and waits for that: for a ddprun that cannot go on and
    /// still has workers.
    void end_all();
    /// The warden has died (somebody killed it, and it has been reaped): start another, with the same table.
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
    void wait_for_its_end();

    JobMark mark_;
    std::string cgroup_;
    std::string files_;
    std::string secret_;
    Table* table_;
    int max_groups_;
    UniqueFd alive_;  ///< our end of a socket pair: its closing is our death, and the other's is the warden's
    pid_t pid_ = 0;
};

}  // namespace ddprun
