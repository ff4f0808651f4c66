#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "env/unique_fd.h"

/// Ranks as processes, for tests in which a rank ends, is killed or is stopped.
namespace ddp::testing {

inline constexpr int kRight = 42;  ///< a child's exit code when the test's claim holds; gtest uses 0 and 1

/// Forks one process per rank; the destructor kills and reaps the remaining ones.
class ForkedRanks {
  public:
    /// `body` runs in the child and returns its exit code; 3 when it throws.
    ForkedRanks(int count, const std::function<int(int rank)>& body) {
        for (int rank = 0; rank < count; ++rank) {
            const pid_t pid = ::fork();
            if (pid == 0) ::_exit(guarded(rank, body));
            pids_.push_back(pid);
        }
    }
    ~ForkedRanks() {
        for (const pid_t pid : pids_) {
            if (pid <= 0) continue;
            ::kill(pid, SIGKILL);
            ::waitpid(pid, nullptr, 0);
        }
    }
    ForkedRanks(const ForkedRanks&) = delete;
    ForkedRanks& operator=(const ForkedRanks&) = delete;

    void kill_one(int rank) { ::kill(pid_of(rank), SIGKILL); }
    /// Returns once the process has stopped.
    void stop_one(int rank) {
        ::kill(pid_of(rank), SIGSTOP);
        int status = 0;
        ::waitpid(pid_of(rank), &status, WUNTRACED);
        EXPECT_TRUE(WIFSTOPPED(status)) << "rank " << rank << " ended instead";
    }
    void continue_one(int rank) { ::kill(pid_of(rank), SIGCONT); }
    /// Reaps the process. Returns the exit code, or 128 + the signal.
    int wait(int rank) {
        int status = 0;
        ::waitpid(std::exchange(pid_of(rank), -1), &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

  private:
    pid_t& pid_of(int rank) { return pids_[static_cast<std::size_t>(rank)]; }
    static int guarded(int rank, const std::function<int(int)>& body) {
        try {
            return body(rank);
        } catch (const std::exception& error) {
            ::dprintf(2, "rank %d: %s\n", rank, error.what());
            return 3;
        }
    }
    std::vector<pid_t> pids_;
};

/// One word between processes: "now".
struct Pipe {
    ddprun::UniqueFd read, write;
    Pipe() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) == 0) read.reset(ends[0]), write.reset(ends[1]);
    }
    void say_one() const { (void)!::write(write.get(), "x", 1); }
    [[nodiscard]] bool hears_one() const {
        char byte;
        return ::read(read.get(), &byte, 1) == 1;
    }
    void await_one() const { ASSERT_TRUE(hears_one()); }
};

}  // namespace ddp::testing
