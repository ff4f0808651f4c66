#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/refused_calls.h"

/// Saves that are interrupted: in children that are killed, on disks that are full.
namespace ddp::testing {

/// All names in a directory of checkpoints but `.writer`, which is there while its writer lives, and after
/// its kill.
inline std::vector<std::string> names_in(const std::string& path) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
        if (entry.path().filename() != ".writer") names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
}

/// A child that runs `body`; the test kills it.
template <class Body>
pid_t start_child(Body body) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    [&]() noexcept { body(); }();  // an exception must not continue the test
    ::_exit(0);
}

/// The exit status of a child that may not do what its test needs.
inline constexpr int kNotAllowed = 77;

/// Mounts a small disk at `place`, for this process alone. Call it before threads are started.
inline bool mount_disk(const std::string& place, unsigned long bytes, unsigned long inodes,
                       unsigned long flags) {
    const std::string options = "size=" + std::to_string(bytes) + ",nr_inodes=" + std::to_string(inodes);
    return ::mount("none", place.c_str(), "tmpfs", flags, options.c_str()) == 0;
}
inline bool mount_small_disk(const std::string& place) {
    if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           mount_disk(place, 1 << 20, 100, 0);
}
/// Leaves room for that many pages and files on the disk.
inline bool leave_room(const std::string& place, int pages, int files) {
    struct statvfs now {};
    return ::statvfs(place.c_str(), &now) == 0 &&
           mount_disk(place, (now.f_blocks - now.f_bfree + static_cast<unsigned long>(pages)) * now.f_bsize,
                      now.f_files - now.f_ffree + static_cast<unsigned long>(files), MS_REMOUNT);
}

/// Calls `save(pages, files)` in children, with more and more room for pages and then for files until it has
/// enough. It returns 0 for success, 1 for the error of a full disk, kNotAllowed, or another number for a
/// failure of the test. Expects more than `least` full disks.
template <class Save>
void fill_disks(int least, Save save) {
    constexpr int kEnough = 20;
    int full = 0;
    for (const bool by_files : {false, true}) {
        bool saved = false;
        for (int room = 0; !saved && room < kEnough; ++room) {
            const pid_t child =
                start_child([&] { ::_exit(save(by_files ? kEnough : room, by_files ? room : kEnough)); });
            int status = 0;
            ASSERT_EQ(::waitpid(child, &status, 0), child);
            ASSERT_TRUE(WIFEXITED(status));
            if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "needs a mount of its own";
            ASSERT_LE(WEXITSTATUS(status), 1) << (by_files ? "files " : "pages ") << room;
            full += WEXITSTATUS(status);
            saved = WEXITSTATUS(status) == 0;
        }
        EXPECT_TRUE(saved);
    }
    EXPECT_GT(full, least) << "the disk was full at different files";
}

/// Called in the body of finishes_before_stop: from here on system calls count.
inline void start_counting() { ::raise(SIGUSR1); }

/// Runs `body` in a child that is killed at the nth stop of any of its threads at a system call (entry and
/// exit count). True when it ended before that.
template <class Body>
bool finishes_before_stop(int nth, Body body) {
    const pid_t child = start_child([&] {
        ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
        ::raise(SIGSTOP);
        body();
    });
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    ::ptrace(PTRACE_SETOPTIONS, child, nullptr,
             PTRACE_O_TRACECLONE | PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    ::ptrace(PTRACE_SYSCALL, child, nullptr, nullptr);
    bool is_counting = false, finished = false;
    int stops = 0;
    for (pid_t thread = 0; (thread = ::waitpid(-1, &status, __WALL)) > 0;) {
        if (thread == child && !WIFSTOPPED(status)) finished = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!WIFSTOPPED(status)) continue;
        const int signal = WSTOPSIG(status);
        is_counting = is_counting || signal == SIGUSR1;
        if (signal == (SIGTRAP | 0x80) && is_counting && ++stops == nth) ::kill(child, SIGKILL);
        ::ptrace(PTRACE_SYSCALL, thread, nullptr, nullptr);
    }
    return finished;
}

/// Makes renameat2 behave in this thread, and those that it starts, as on NFS and Lustre, which support no
/// flags.
inline void refuse_flags_of_rename() {
    if (!ddprun::test::refuse_calls({SYS_renameat2, SYS_renameat2, EINVAL})) ::_exit(kNotAllowed);
}
/// Makes fcntl's locks fail likewise, as on Lustre without the mount option flock.
inline void refuse_locks() {
    if (!ddprun::test::refuse_call(SYS_fcntl, F_SETLK, ENOSYS)) ::_exit(kNotAllowed);
}

}  // namespace ddp::testing
