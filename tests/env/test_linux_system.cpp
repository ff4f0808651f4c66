#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/process_tree.h"
#include "env/text.h"
#include "tests/env/process_fixture.h"
#include "tests/support/receive_exactly.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::os {
namespace {

using test::has_no_children;
using test::program;
using test::shell;
using test::wait_for_exit;
using testing::ElementsAre;

/// Starts a child that prints a line to the returned pipe.
struct Started {
    pid_t pid = 0;
    UniqueFd output;
};

/// True when the group has a process; zombies count.
bool group_exists(pid_t group) { return ::kill(-group, 0) == 0 || errno == EPERM; }

Started start(LinuxSystem& system, const std::string& script) {
    Result<System::Pipe> pipe = system.make_pipe(65536);
    SpawnSpec spec = shell(script);
    spec.descriptors = {{pipe->write.get(), 1}};
    const Result<pid_t> pid = system.spawn(spec);
    EXPECT_TRUE(pid) << pid.error().what;
    return {pid ? *pid : 0, std::move(pipe->read)};
}

pid_t read_pid(int fd) {
    const Result<std::int64_t> pid = parse_int_between(test::read_line(fd), 2, 0x7fffffff);
    EXPECT_TRUE(pid) << pid.error().what;
    return pid ? static_cast<pid_t>(*pid) : -1;
}

void end(LinuxSystem& system, pid_t pid) {
    EXPECT_TRUE(system.signal_group(pid, SIGKILL));
    EXPECT_EQ(wait_for_exit(system).pid, pid);
    system.reap(pid);
}

TEST(NextExit, IsEmptyWhileAllChildrenRun) {
    LinuxSystem system;
    EXPECT_EQ(system.next_exit(), std::nullopt) << "without children";
    const Result<pid_t> pid = system.spawn(program("/bin/sleep", {"1000"}));
    ASSERT_TRUE(pid);
    EXPECT_EQ(system.next_exit(), std::nullopt);
    end(system, *pid);
    EXPECT_TRUE(has_no_children());
}

TEST(NextExit, LeavesTheZombieUntilItIsReaped) {
    LinuxSystem system;
    const Result<pid_t> pid = system.spawn(shell("exit 3"));
    ASSERT_TRUE(pid);
    const ChildExit expected{*pid, false, 3, false};
    EXPECT_EQ(wait_for_exit(system), expected);
    EXPECT_EQ(system.next_exit(), expected);
    EXPECT_TRUE(group_exists(*pid));
    system.reap(*pid);
    EXPECT_EQ(system.next_exit(), std::nullopt);
    EXPECT_FALSE(group_exists(*pid));
}

TEST(Reap, OfARunningChildDoesNotWait) {
    LinuxSystem system;
    const Result<pid_t> pid = system.spawn(program("/bin/sleep", {"1000"}));
    ASSERT_TRUE(pid);
    system.reap(*pid);
    EXPECT_TRUE(group_exists(*pid));
    end(system, *pid);
}

TEST(Signal, ToAGroupReachesAllItsProcesses) {
    LinuxSystem system;
    const Started leader = start(system, "sleep 1000 & echo started; wait");
    EXPECT_EQ(test::read_line(leader.output.get()), "started");
    EXPECT_TRUE(system.signal_group(leader.pid, SIGKILL));
    EXPECT_EQ(test::read_to_end(leader.output.get()), "") << "the grandchild holds the pipe";
    EXPECT_EQ(wait_for_exit(system), (ChildExit{leader.pid, true, SIGKILL, false}));
    system.reap(leader.pid);
}

TEST(Signal, ToAnEmptyGroupIsSuccessAndAnUnknownSignalAnError) {
    LinuxSystem system;
    const Result<pid_t> pid = system.spawn(program("/bin/true"));
    ASSERT_TRUE(pid);
    wait_for_exit(system);
    system.reap(*pid);
    EXPECT_TRUE(system.signal_group(*pid, SIGTERM));
    EXPECT_TRUE(system.signal_process(*pid, SIGTERM));
    EXPECT_EQ(system.signal_process(::getpid(), 999).error().what, "kill: Invalid argument");
}

TEST(Subreaper, SeesTheEndOfOrphanedGrandchildren) {
    LinuxSystem system;
    ASSERT_TRUE(become_subreaper());
    const Started leader = start(system, "sleep 1000 >/dev/null & echo $!");
    const pid_t grandchild = read_pid(leader.output.get());
    EXPECT_EQ(wait_for_exit(system).pid, leader.pid);
    system.reap(leader.pid);
    EXPECT_TRUE(group_exists(leader.pid)) << "the grandchild is still in the group";
    EXPECT_THAT(system.descendants(), ElementsAre(grandchild));
    EXPECT_TRUE(system.signal_group(leader.pid, SIGKILL));
    EXPECT_EQ(wait_for_exit(system), (ChildExit{grandchild, true, SIGKILL, false}));
    system.reap(grandchild);
    EXPECT_FALSE(group_exists(leader.pid));
    ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST(Descendants, LeaveOutOurTools) {
    LinuxSystem system;
    SpawnSpec spec = program("/bin/sleep", {"1000"});
    spec.is_tool = true;
    const Result<pid_t> tool = system.spawn(spec);
    ASSERT_TRUE(tool);
    EXPECT_TRUE(system.descendants().empty());
    EXPECT_TRUE(system.signal_group(*tool, SIGKILL));
    EXPECT_EQ(wait_for_exit(system).pid, *tool);
    system.reap(*tool);
}

TEST(Descendants, LeaveOutChildrenFromBefore) {
    LinuxSystem before;
    const Started old = start(before, "sleep 1000 >/dev/null & echo $!; wait");
    (void)read_pid(old.output.get());
    LinuxSystem system;
    EXPECT_TRUE(system.descendants().empty()) << "nor what they have started";
    const Result<pid_t> own = system.spawn(program("/bin/sleep", {"1000"}));
    ASSERT_TRUE(own);
    EXPECT_THAT(system.descendants(), ElementsAre(*own));
    for (const pid_t pid : {old.pid, *own}) {
        EXPECT_TRUE(system.signal_group(pid, SIGKILL));
        system.reap(wait_for_exit(system).pid);
    }
}

TEST(Descendants, ListsChildrenBeforeParentsAcrossSessions) {
    LinuxSystem system;
    const Started leader = start(system, "setsid sh -c 'sleep 1000 & echo $!; echo $$; wait' & wait");
    const pid_t sleeper = read_pid(leader.output.get());
    const pid_t middle = read_pid(leader.output.get());
    EXPECT_THAT(system.descendants(), ElementsAre(sleeper, middle, leader.pid));
    for (const pid_t pid : system.descendants()) EXPECT_TRUE(system.signal_process(pid, SIGKILL));
    EXPECT_EQ(test::read_to_end(leader.output.get()), "");
    EXPECT_EQ(wait_for_exit(system).pid, leader.pid);
    EXPECT_THAT(system.descendants(), ElementsAre()) << "a zombie is not living";
    system.reap(leader.pid);
}

/// Runs `act` as process 1 of a pid namespace whose /proc is still the outer one. Returns its exit code;
/// nullopt: no namespace can be made.
std::optional<int> exit_code_in_pid_namespace(const std::function<int()>& act) {
    const pid_t outside = ::fork();
    if (outside == 0) {
        if (::unshare(CLONE_NEWPID) != 0) ::_exit(250);
        const pid_t inside = ::fork();
        if (inside == 0) ::_exit(act());
        int status = 0;
        ::waitpid(inside, &status, 0);
        ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 251);
    }
    int status = 0;
    ::waitpid(outside, &status, 0);
    if (WEXITSTATUS(status) == 250) return std::nullopt;
    return WEXITSTATUS(status);
}

TEST(Proc, ShowsNoProcessOfAnotherPidNamespace) {
    EXPECT_TRUE(has_own_proc());
    const std::optional<int> code = exit_code_in_pid_namespace([] {
        const pid_t child = ::fork();
        if (child == 0) ::_exit(::pause());
        LinuxSystem system;
        const bool shows_nobody =
            system.descendants().empty() && !proc_stat_of(::getpid()) && !proc_stat_of(child);
        ::kill(child, SIGKILL);
        if (has_own_proc() || !shows_nobody) return 1;
        return own_number_in_proc() != ::getpid() ? 0 : 2;  // /proc/self is right there, too
    });
    if (!code) GTEST_SKIP() << "no pid namespace can be made";
    EXPECT_EQ(*code, 0);
}

/// A fake /proc: each process has its parent, state, and its threads' lists of children.
class FakeProc {
  public:
    void add(pid_t pid, pid_t parent, char state, const std::string& name = "x", int threads = 1) {
        put(pid, "stat",
            fmt::format("{} ({}) {} {} 1 1 0 -1 0 1 1 1 1 1 1 0 0 20 0 {} 0 9 4096 3 0\n", pid, name, state,
                        parent, threads));
    }
    void list_children(pid_t pid, pid_t thread, const std::string& children) {
        put(pid, "task/" + std::to_string(thread) + "/children", children);
    }
    [[nodiscard]] const std::string& path() const { return dir_.path(); }

  private:
    void put(pid_t pid, const std::string& file, const std::string& content) {
        const std::string path = dir_.path() + "/" + std::to_string(pid) + "/" + file;
        ASSERT_TRUE(make_directories(path.substr(0, path.rfind('/'))));
        ASSERT_TRUE(write_file_atomically(path, content, 0644));
    }
    test::TemporaryDirectory dir_;
};

struct Family : FakeProc {
    Family() {
        add(10, 1, 'S');
        add(11, 10, 'S', "a) Z 99 (b");
        add(12, 10, 'Z');
        add(13, 11, 'R');
        add(14, 1, 'S');
    }
};

TEST(ProcStat, IsParsedAfterAnyName) {
    const auto stat =
        parse_proc_stat("17 (a ) (b) T 4 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 6 0 99 4096 512 0\n");
    EXPECT_EQ(stat, (ProcStat{'T', 4, 6, 120, 7, 512, 99}));
    for (const char* bad :
         {"", "17 (a", "17 (a) S 1 2", "17 (a) S 1 2 3 4 5 6 7 8 9 10 x 20 3 4 20 0 6 0 99 4096 512 0"}) {
        EXPECT_EQ(parse_proc_stat(bad), std::nullopt) << bad;
    }
    EXPECT_GT(proc_stat_of(::getpid()).value_or(ProcStat{}).rss_pages, 0u);
}

TEST(ProcessTree, AProcessWhoseFirstThreadHasEndedLivesOnInItsOthers) {
    FakeProc proc;
    proc.add(10, 1, 'S');
    proc.add(11, 10, 'Z', "x", 2);
    proc.add(12, 10, 'Z');
    EXPECT_THAT(descendants_from_parents(10, proc.path()), ElementsAre(11));
}

TEST(ProcessTree, IsFoundFromParentsWhateverTheNames) {
    const Family proc;
    EXPECT_THAT(descendants_from_parents(10, proc.path()), ElementsAre(13, 11));
    EXPECT_THAT(descendants_of(10, proc.path()), ElementsAre(13, 11))
        << "this /proc has no lists of children";
    EXPECT_THAT(descendants_from_parents(99, proc.path()), ElementsAre());
}

TEST(ProcessTree, IsFoundFromTheListsOfAllThreads) {
    Family proc;
    EXPECT_EQ(descendants_from_children_lists(10, proc.path()), std::nullopt);
    proc.list_children(10, 10, "");
    proc.list_children(10, 15, "11 12 ");
    proc.list_children(11, 11, "13 ");
    proc.list_children(13, 13, "77 ");  // 77 has ended: no stat
    EXPECT_THAT(*descendants_from_children_lists(10, proc.path()), ElementsAre(13, 11));
    EXPECT_THAT(descendants_of(10, proc.path()), ElementsAre(13, 11));
}

TEST(Pipe, IsCloexecAndNonBlockingOnlyWhereWeRead) {
    LinuxSystem system;
    const Result<System::Pipe> pipe = system.make_pipe(65536);
    ASSERT_TRUE(pipe);
    EXPECT_EQ(::fcntl(pipe->read.get(), F_GETFD), FD_CLOEXEC);
    EXPECT_EQ(::fcntl(pipe->write.get(), F_GETFD), FD_CLOEXEC);
    EXPECT_NE(::fcntl(pipe->read.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(::fcntl(pipe->write.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_GE(::fcntl(pipe->read.get(), F_GETPIPE_SZ), 4096);
}

TEST(SocketPair, IsNonBlockingOnOurSideOnly) {
    LinuxSystem system;
    const Result<System::SocketPair> pair = system.make_socket_pair();
    ASSERT_TRUE(pair);
    EXPECT_EQ(::fcntl(pair->ours.get(), F_GETFD), FD_CLOEXEC);
    EXPECT_EQ(::fcntl(pair->theirs.get(), F_GETFD), FD_CLOEXEC);
    EXPECT_NE(::fcntl(pair->ours.get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_EQ(::fcntl(pair->theirs.get(), F_GETFL) & O_NONBLOCK, 0);
    ASSERT_TRUE(send_all(pair->theirs.get(), "ready", test::soon()));
    std::string ready(5, '\0');
    ASSERT_TRUE(test::receive_exactly(pair->ours.get(), ready, test::soon()));
    EXPECT_EQ(ready, "ready");
}

TEST(Segment, IsSparseAndShared) {
    LinuxSystem system;
    constexpr std::uint64_t kTebibyte = std::uint64_t{1} << 40;
    const Result<UniqueFd> segment = system.make_segment(kTebibyte);
    ASSERT_TRUE(segment) << segment.error().what;
    struct stat status {};
    ASSERT_EQ(::fstat(segment->get(), &status), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), kTebibyte);
    EXPECT_EQ(status.st_blocks, 0);
    EXPECT_EQ(::fcntl(segment->get(), F_GETFD), FD_CLOEXEC);
    void* const page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, segment->get(), 0);
    ASSERT_NE(page, MAP_FAILED);
    EXPECT_EQ(::munmap(page, 4096), 0);
}

TEST(Segment, CannotBeShrunkUnderItsUsers) {
    LinuxSystem system;
    const Result<UniqueFd> segment = system.make_segment(1 << 20);
    ASSERT_TRUE(segment);
    EXPECT_EQ(::ftruncate(segment->get(), 0), -1);
    EXPECT_EQ(errno, EPERM);
}

/// The lowest free number, which open(2) would return now.
int next_number() { return UniqueFd(::dup(0)).get(); }

TEST(LinuxSystem, NamesTheCallThatRanOutOfDescriptorsAndLeaksNone) {
    LinuxSystem system;
    const int before = next_number();
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlimit one_more{static_cast<rlim_t>(before) + 1, limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &one_more), 0);
    const Result<System::Pipe> pipe = system.make_pipe(65536);
    const Result<System::SocketPair> pair = system.make_socket_pair();
    const int after = next_number();
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(pipe.error().what, "pipe2: Too many open files");
    EXPECT_EQ(pair.error().what, "socketpair: Too many open files");
    EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace ddprun::os
