#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun::os {

/// A descriptor of ours that the child sees under another number (0-2, or above).
struct FdMapping {
    int ours;
    int childs;
};

/// Everything needed to start one process. Prepared before fork; nothing is allocated between fork and exec.
struct SpawnSpec {
    std::string program;                   ///< a path, relative to `directory`; not searched in PATH
    std::vector<std::string> arguments;    ///< argv, including argv[0]
    std::vector<std::string> environment;  ///< "NAME=value"
    std::string directory;                 ///< "" stays where we are
    std::vector<FdMapping> descriptors;    ///< 0-2 are inherited unless named; all others are closed
    std::vector<int> cpus;                 ///< affinity; empty inherits
    std::vector<int> memory_nodes;         ///< NUMA nodes preferred for memory, where allowed; empty inherits
    /// A cgroup v2 directory to start in; -1: ours. When the kernel refuses it (clone3 needs Linux 5.7, and
    /// many containers deny it), the child starts in ours.
    int cgroup = -1;
    std::uint64_t open_files = 0;  ///< soft limit on descriptors (RLIMIT_NOFILE); 0 inherits
    /// Soft limit on file locks (RLIMIT_LOCKS), a mark that descendants inherit and the kernel ignores; 0:
    /// ours.
    std::uint64_t lock_limit = 0;
    bool is_tool = false;              ///< ours, not the job's: descendants() leaves it and its children out
    bool foreground_terminal = false;  ///< give the child's group the terminal on fd 0 (for --attach)
};

/// "NAME=value" of this process, as a child would inherit it.
std::vector<std::string> own_environment();

/// A child's end, as waitid(2) reports it.
struct ChildExit {
    pid_t pid = 0;
    bool signaled = false;
    int status = 0;  ///< exit code, or the signal when `signaled`
    bool dumped_core = false;
    bool operator==(const ChildExit&) const = default;
};

/// A signal that stopped a child (state T).
struct ChildStop {
    pid_t pid = 0;
    int signal = 0;
};

/// The operating system's calls that the agent uses, so that tests can fake them and fail any call.
class System {
  public:
    virtual ~System() = default;

    /// Starts one process in its own process group (setpgid), with PR_SET_PDEATHSIG=SIGKILL against this
    /// thread. Its signals have default dispositions, but HUP, INT, QUIT, USR1, USR2 and TSTP stay ignored
    /// where we ignore them, and TTIN and TTOU are ignored unless it has the terminal. vfork class: returns
    /// after the child's exec or failure.
    /// A script without "#!" runs under /bin/sh.
    /// Error: Refused, with its errno, when exec fails ("exec ./trian: No such file or directory"); System
    /// before that ("start ./train: chdir /data: Permission denied"); InvalidArgument for two descriptors
    /// under one number. Nothing is left behind: a child that failed has been reaped.
    [[nodiscard]] virtual Result<pid_t> spawn(const SpawnSpec& spec) = 0;

    /// kill(-group). ESRCH (no process left) is success. Error: System.
    virtual Status signal_group(pid_t group, int signal) = 0;
    virtual Status signal_process(pid_t pid, int signal) = 0;

    /// True when a process, dead or alive, is in the group and has not been reaped.
    [[nodiscard]] virtual bool group_exists(pid_t group) = 0;
    /// The process group of a process; -1: it has ended.
    [[nodiscard]] virtual pid_t group_of(pid_t pid) = 0;

    /// The next child that has ended, without reaping it: it stays a zombie and its pid cannot be reused.
    /// The caller must reap it before the next call. nullopt: no child has ended.
    [[nodiscard]] virtual std::optional<ChildExit> next_exit() = 0;
    virtual void reap(pid_t pid) = 0;
    /// The next child that has been stopped since the last call. nullopt: none has.
    [[nodiscard]] virtual std::optional<ChildStop> next_stop() = 0;

    /// Every living descendant of this process, from /proc, children first; without its tools, the children
    /// that it had before this object was made, and their descendants. One that is just being forked can be
    /// missed: call it until it returns none.
    [[nodiscard]] virtual std::vector<pid_t> descendants() = 0;

    /// CLOEXEC pipe: {read end (non-blocking), write end}. A user's limit may prevent `buffer_bytes`.
    struct Pipe {
        UniqueFd read;
        UniqueFd write;
    };
    [[nodiscard]] virtual Result<Pipe> make_pipe(std::size_t buffer_bytes) = 0;
    /// Unix sockets with packets (SOCK_SEQPACKET), CLOEXEC, non-blocking on our side only: {ours, the
    /// child's}.
    struct SocketPair {
        UniqueFd ours;
        UniqueFd theirs;
    };
    [[nodiscard]] virtual Result<SocketPair> make_socket_pair() = 0;
    /// A nameless shared-memory file of that (sparse) size, CLOEXEC. Its size is sealed.
    [[nodiscard]] virtual Result<UniqueFd> make_segment(std::uint64_t bytes) = 0;
};

class SpawnSlots;

/// The real system. `become_subreaper` must have been called once in this process.
class LinuxSystem final : public System {
  public:
    LinuxSystem();
    ~LinuxSystem() override;
    Result<pid_t> spawn(const SpawnSpec& spec) override;
    Status signal_group(pid_t group, int signal) override;
    Status signal_process(pid_t pid, int signal) override;
    bool group_exists(pid_t group) override;
    pid_t group_of(pid_t pid) override;
    std::optional<ChildExit> next_exit() override;
    void reap(pid_t pid) override;
    std::optional<ChildStop> next_stop() override;
    std::vector<pid_t> descendants() override;
    Result<Pipe> make_pipe(std::size_t buffer_bytes) override;
    Result<SocketPair> make_socket_pair() override;
    Result<UniqueFd> make_segment(std::uint64_t bytes) override;

  private:
    [[nodiscard]] std::vector<pid_t> spared() const;  ///< other_children_ and their descendants, in order
    std::unique_ptr<SpawnSlots> slots_;
    std::vector<pid_t> other_children_;  ///< our tools, and children from before our exec; not yet reaped
};

/// Orphaned grandchildren become our children and are seen by next_exit. Error: System.
Status become_subreaper();

}  // namespace ddprun::os
