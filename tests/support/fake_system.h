#pragma once

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "env/os/system.h"

namespace ddprun::test {

/// Fails the n-th call that needs a resource: spawn and the make_ family. 0: none.
struct FailNth {
    int n = 0;
};

/// Scripted children in place of processes; the test ends them. Pipes, sockets and segments are real, so that
/// an event loop can watch them.
///
/// A child holds copies of its descriptors until it ends, as a process does: the reader of its pipe sees the
/// end of file only then. A child that ends raises SIGCHLD in this process.
class FakeSystem final : public os::System {
  public:
    explicit FakeSystem(FailNth fail = {}) : fail_(fail) {}
    ~FakeSystem() override;
    FakeSystem(const FakeSystem&) = delete;
    FakeSystem& operator=(const FakeSystem&) = delete;

    Result<pid_t> spawn(const os::SpawnSpec& spec) override;
    Status signal_group(pid_t group, int signal) override;
    Status signal_process(pid_t pid, int signal) override;
    std::optional<os::ChildExit> next_exit() override;
    void reap(pid_t pid) override;
    std::optional<os::ChildStop> next_stop() override { return std::nullopt; }
    bool group_exists(pid_t group) override;
    pid_t group_of(pid_t pid) override;
    std::vector<pid_t> descendants() override;
    Result<Pipe> make_pipe(std::size_t buffer_bytes) override;
    Result<SocketPair> make_socket_pair() override;
    Result<UniqueFd> make_segment(std::uint64_t bytes) override;

    // Actions of the test.

    void exit(pid_t pid, int code);
    void die_of(pid_t pid, int signal, bool dumped_core = false);
    /// Makes the child ignore this signal; SIGKILL cannot be ignored.
    void ignore_signal(pid_t pid, int signal);
    /// Adds a grandchild in `group`, which lives until a signal or exit() ends it.
    pid_t add_grandchild(pid_t group);
    /// The child's copy of a descriptor, by the number that it has there; -1 if the child has none, or has
    /// ended.
    [[nodiscard]] int descriptor(pid_t pid, int childs_number) const;
    /// Makes spawn fail with this errno from now on, as for a missing program; 0: not any more.
    void fail_spawn(int error) { spawn_error_ = error; }
    /// Makes every further child exit with this code before spawn returns its number.
    void exit_at_birth(int code) { exit_at_birth_ = code; }
    /// Sets a function that is called before a group is signalled and before a child is reaped, to simulate a
    /// slow kernel.
    void on_signal_group(std::function<void(pid_t group, int signal)> what) {
        on_signal_group_ = std::move(what);
    }
    void on_reap(std::function<void(pid_t pid)> what) { on_reap_ = std::move(what); }

    // Observations of the test.

    struct Signal {
        pid_t target;
        int signal;
        bool to_group;
        bool operator==(const Signal&) const = default;
    };
    [[nodiscard]] const std::vector<Signal>& signals() const { return signals_; }
    /// All processes so far, in order, with the arguments of their spawn.
    [[nodiscard]] const std::vector<std::pair<pid_t, os::SpawnSpec>>& spawned() const { return spawned_; }
    [[nodiscard]] int live_children() const;
    /// Children that have ended and are not reaped.
    [[nodiscard]] int zombies() const { return static_cast<int>(zombies_.size()); }
    /// Open descriptors that were handed out, without the children's copies.
    [[nodiscard]] int open_fds() const;
    /// The number of calls so far that FailNth counts.
    [[nodiscard]] int calls() const { return calls_; }

  private:
    struct Child {
        pid_t group;
        std::set<int> ignored;
        std::map<int, UniqueFd> descriptors;
    };
    bool fails();
    void track(int fd);
    void end(const os::ChildExit& how);
    void deliver(pid_t pid, int signal);

    FailNth fail_;
    int calls_ = 0;
    int spawn_error_ = 0;
    std::optional<int> exit_at_birth_;
    std::function<void(pid_t, int)> on_signal_group_;
    std::function<void(pid_t)> on_reap_;
    pid_t next_pid_ = 5000001;  ///< above the kernel's limit: a stray kill() of ours hits nobody
    std::map<pid_t, Child> running_;
    std::vector<os::ChildExit> zombies_;
    std::vector<Signal> signals_;
    std::vector<std::pair<pid_t, os::SpawnSpec>> spawned_;
    std::map<int, std::pair<dev_t, ino_t>>
        issued_;  ///< by number; a number issued again replaces the old entry
};

}  // namespace ddprun::test
