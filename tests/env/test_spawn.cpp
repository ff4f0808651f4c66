#include <fcntl.h>
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "env/io/file.h"
#include "env/text.h"
#include "tests/env/process_fixture.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::os {
namespace {

using test::has_no_children;
using test::program;
using test::Ran;
using test::run;
using test::shell;
using testing::HasSubstr;

Error failure_of(const SpawnSpec& spec) {
    LinuxSystem system;
    const Result<pid_t> pid = system.spawn(spec);
    EXPECT_FALSE(pid);
    EXPECT_TRUE(has_no_children());
    return pid ? Error{} : pid.error();
}

TEST(Spawn, RunsAProgramWithItsArgumentsAndEnvironmentOnly) {
    LinuxSystem system;
    ::setenv("DDPRUN_TEST_OURS", "1", 1);
    SpawnSpec spec = program("/usr/bin/env");
    spec.environment = {"A=1", "B=two words"};
    EXPECT_EQ(run(system, spec).output, "A=1\nB=two words\n");
    EXPECT_EQ(run(system, program("/bin/echo", {"one", "", "three"})).output, "one  three\n");
    ::unsetenv("DDPRUN_TEST_OURS");
}

TEST(Spawn, DistinguishesExitCodesFromSignals) {
    LinuxSystem system;
    const Ran exited = run(system, shell("exit 37"));
    EXPECT_FALSE(exited.exit.signaled);
    EXPECT_EQ(exited.exit.status, 37);
    const Ran killed = run(system, shell("kill -TERM $$"));
    EXPECT_TRUE(killed.exit.signaled);
    EXPECT_EQ(killed.exit.status, SIGTERM);
    EXPECT_TRUE(has_no_children());
}

TEST(Spawn, NamesAMissingProgramAndLeavesNothing) {
    const Error error = failure_of(program("./trian"));
    EXPECT_EQ(error.code, Errc::Refused);
    EXPECT_EQ(error.sys, ENOENT);
    EXPECT_EQ(error.what, "exec ./trian: No such file or directory");
}

TEST(Spawn, NamesAProgramThatIsNotExecutable) {
    const test::TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("data"), "x", 0644));
    EXPECT_EQ(failure_of(program(dir.file("data"))).what, "exec " + dir.file("data") + ": Permission denied");
    EXPECT_EQ(failure_of(program(dir.path())).what, "exec " + dir.path() + ": Permission denied");
}

TEST(Spawn, NamesTheStepThatFailedBeforeExec) {
    const test::TemporaryDirectory dir;
    SpawnSpec spec = program("/bin/true");
    spec.directory = dir.file("none");
    EXPECT_EQ(failure_of(spec).what,
              "start /bin/true: chdir " + dir.file("none") + ": No such file or directory");

    spec = program("/bin/true");
    spec.cpus = {65000};
    EXPECT_EQ(failure_of(spec).what, "start /bin/true: sched_setaffinity: Invalid argument");

    spec = program("/bin/true");
    spec.descriptors = {{9999, 5}};
    EXPECT_EQ(failure_of(spec).what, "start /bin/true: dup: Bad file descriptor");
}

TEST(Spawn, RefusesASpecThatContradictsItself) {
    SpawnSpec spec = program("/bin/true");
    spec.descriptors = {{0, 5}, {1, 5}};
    EXPECT_EQ(failure_of(spec).code, Errc::InvalidArgument);
    spec = program("/bin/true");
    spec.cpus = {-1};
    EXPECT_EQ(failure_of(spec).code, Errc::InvalidArgument);
}

TEST(Spawn, RunsAScriptWithoutInterpreterLineUnderTheShell) {
    const test::TemporaryDirectory dir;
    ASSERT_TRUE(write_file_atomically(dir.file("script"), "echo \"$0 says $1\"\n", 0755));
    LinuxSystem system;
    EXPECT_EQ(run(system, program(dir.file("script"), {"hello"})).output,
              dir.file("script") + " says hello\n");
}

TEST(Spawn, DoesNotGiveABinaryOfAnotherMachineToTheShell) {
    const test::TemporaryDirectory dir;
    ASSERT_TRUE(
        write_file_atomically(dir.file("binary"), "\x7f" + std::string("ELF") + std::string(60, '\0'), 0755));
    EXPECT_THAT(failure_of(program(dir.file("binary"))).what, HasSubstr("Exec format error"));
}

TEST(Spawn, StartsInTheDirectoryAskedFor) {
    const test::TemporaryDirectory dir;
    LinuxSystem system;
    SpawnSpec spec = program("/bin/pwd", {"-P"});
    spec.directory = dir.path();
    EXPECT_EQ(run(system, spec).output, std::filesystem::canonical(dir.path()).string() + "\n");
    EXPECT_NE(std::filesystem::current_path(), std::filesystem::canonical(dir.path()));
}

TEST(Spawn, PutsTheChildInAGroupOfItsOwnAndInOurSession) {
    LinuxSystem system;
    // pid (comm) state ppid pgrp session
    const Ran ran = run(system, program("/bin/cat", {"/proc/self/stat"}));
    const std::string expected =
        fmt::format("{} (cat) R {} {} {} ", ran.exit.pid, ::getpid(), ran.exit.pid, ::getsid(0));
    EXPECT_EQ(ran.output.substr(0, expected.size()), expected);
}

/// The line of /proc/PID/status for a process that ignores these signals.
std::string ignored(const std::vector<int>& signals) {
    std::uint64_t bits = 0;
    for (const int signal : signals) bits |= 1ULL << (signal - 1);
    return fmt::format("SigIgn:\t{:016x}\n", bits);
}

TEST(Spawn, GivesTheChildDefaultSignalsWhateverOursAre) {
    LinuxSystem system;
    sigset_t blocked;
    sigset_t before;
    ::sigemptyset(&blocked);
    for (const int signal : {SIGTERM, SIGCHLD, SIGRTMIN + 3}) ::sigaddset(&blocked, signal);
    ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
    ::signal(SIGPIPE, SIG_IGN);
    ::signal(SIGTERM, SIG_IGN);
    ::signal(SIGRTMIN + 5, SIG_IGN);
    const auto handler = [](int) {};
    ::signal(SIGUSR1, handler);

    const Ran ran = run(system, program("/bin/cat", {"/proc/self/status"}));
    EXPECT_THAT(ran.output, HasSubstr("SigBlk:\t0000000000000000\n" + ignored({SIGTTIN, SIGTTOU})));

    // Our dispositions are unchanged: the child shares only our memory.
    sigset_t after;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
    EXPECT_EQ(::sigismember(&after, SIGTERM), 1);
    EXPECT_EQ(::sigismember(&after, SIGQUIT), ::sigismember(&before, SIGQUIT));
    EXPECT_EQ(::signal(SIGPIPE, SIG_DFL), SIG_IGN);
    EXPECT_EQ(::signal(SIGTERM, SIG_DFL), SIG_IGN);
    EXPECT_NE(::signal(SIGUSR1, SIG_DFL), SIG_DFL);
    ::signal(SIGRTMIN + 5, SIG_DFL);
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(Spawn, LetsTheChildIgnoreWhatAUserHadIgnored) {
    const std::vector<int> kept{SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP};
    for (const int signal : kept) ::signal(signal, SIG_IGN);
    LinuxSystem system;
    const Ran ran = run(system, program("/bin/cat", {"/proc/self/status"}));
    for (const int signal : kept) ::signal(signal, SIG_DFL);
    EXPECT_THAT(ran.output,
                HasSubstr(ignored({SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGTTIN, SIGTTOU})));
}

/// The descriptors open in a child, without that of `ls` itself, which points into /proc.
std::vector<std::string> open_in_child(SpawnSpec spec) {
    LinuxSystem system;
    std::vector<std::string> numbers;
    const Ran ran = run(system, std::move(spec));
    for (const std::string_view line : split(ran.output, '\n')) {
        const std::size_t arrow = line.find(" -> ");
        if (arrow == std::string_view::npos || line.find("/proc/") != std::string_view::npos) continue;
        const std::string_view before = line.substr(0, arrow);
        numbers.emplace_back(before.substr(before.rfind(' ') + 1));
    }
    return numbers;
}

TEST(Spawn, GivesTheChildItsDescriptorsAndNoOther) {
    // Open one with CLOEXEC, like ours, and one without, which a scheduler may leave us.
    const UniqueFd ours(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const UniqueFd inherited(::fcntl(ours.get(), F_DUPFD, 20));
    ASSERT_TRUE(inherited);
    SpawnSpec spec = program("/bin/ls", {"-l", "/proc/self/fd"});
    spec.descriptors = {{ours.get(), 0}, {ours.get(), 7}};
    EXPECT_THAT(open_in_child(spec), testing::ElementsAre("0", "1", "2", "7"));
    EXPECT_EQ(::fcntl(inherited.get(), F_GETFD), 0) << "our own descriptor was changed";
}

TEST(Spawn, KeepsNoCopyOfADescriptorItGaveAway) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
    const UniqueFd read_end(ends[0]);
    UniqueFd write_end(ends[1]);
    LinuxSystem system;
    SpawnSpec spec = program("/bin/true", {});
    spec.descriptors = {{write_end.get(), 1}};
    const Result<pid_t> child = system.spawn(spec);
    ASSERT_TRUE(child);
    write_end.reset();
    ::waitpid(*child, nullptr, 0);
    char byte = 0;
    EXPECT_EQ(::read(read_end.get(), &byte, 1), 0) << "the end of file is not seen: " << ::strerror(errno);
}

TEST(Spawn, KeepsADescriptorUnderItsOwnNumber) {
    const UniqueFd low(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const UniqueFd ours(::fcntl(low.get(), F_DUPFD_CLOEXEC, 30));
    SpawnSpec spec = program("/bin/ls", {"-l", "/proc/self/fd"});
    spec.descriptors = {{low.get(), 0}, {ours.get(), ours.get()}};
    EXPECT_THAT(open_in_child(spec), testing::ElementsAre("0", "1", "2", fmt::format("{}", ours.get())));
    EXPECT_EQ(::fcntl(ours.get(), F_GETFD), FD_CLOEXEC) << "our own descriptor was changed";
}

TEST(Spawn, MapsDescriptorsWhoseNumbersAreSwapped) {
    LinuxSystem system;
    Result<System::Pipe> first = system.make_pipe(65536);
    Result<System::Pipe> second = system.make_pipe(65536);
    ASSERT_TRUE(first && second);
    const int a = first->write.get();
    const int b = second->write.get();
    SpawnSpec spec = shell(fmt::format("echo to-a > /proc/self/fd/{}; echo to-b > /proc/self/fd/{}", a, b));
    spec.descriptors = {{a, b}, {b, a}};
    run(system, spec);
    first->write.reset();
    second->write.reset();
    EXPECT_EQ(test::read_to_end(first->read.get()), "to-b\n");
    EXPECT_EQ(test::read_to_end(second->read.get()), "to-a\n");
}

TEST(Spawn, MapsAChainOfDescriptors) {
    LinuxSystem system;
    Result<System::Pipe> first = system.make_pipe(65536);
    Result<System::Pipe> second = system.make_pipe(65536);
    ASSERT_TRUE(first && second);
    const int a = first->write.get();
    const int b = second->write.get();
    SpawnSpec spec =
        shell(fmt::format("echo one > /proc/self/fd/{}; echo two > /proc/self/fd/50; echo err >&2", b));
    spec.descriptors = {{a, b}, {b, 50}, {a, 2}};
    run(system, spec);
    first->write.reset();
    second->write.reset();
    EXPECT_EQ(test::read_to_end(first->read.get()), "one\nerr\n");
    EXPECT_EQ(test::read_to_end(second->read.get()), "two\n");
}

TEST(Spawn, BindsToTheCpusAskedFor) {
    cpu_set_t ours;
    ASSERT_EQ(::sched_getaffinity(0, sizeof ours, &ours), 0);
    int last = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(static_cast<unsigned>(cpu), &ours)) last = cpu;
    }
    LinuxSystem system;
    SpawnSpec spec = program("/bin/cat", {"/proc/self/status"});
    spec.cpus = {last};
    EXPECT_THAT(run(system, spec).output, HasSubstr(fmt::format("Cpus_allowed_list:\t{}\n", last)));
    cpu_set_t after;
    ::sched_getaffinity(0, sizeof after, &after);
    EXPECT_TRUE(CPU_EQUAL(&ours, &after)) << "our own affinity was changed";
}

TEST(Spawn, PrefersTheMemoryNodesAskedFor) {
    LinuxSystem system;
    SpawnSpec spec = program("/bin/cat", {"/proc/self/numa_maps"});
    spec.memory_nodes = {0};
    const Ran ran = run(system, spec);
    if (ran.exit.status != 0) GTEST_SKIP() << "this kernel has no NUMA";
    EXPECT_THAT(ran.output, HasSubstr("prefer"));
}

TEST(Spawn, IgnoresAMissingMemoryNode) {
    LinuxSystem system;
    SpawnSpec spec = program("/bin/echo", {"hello"});
    spec.memory_nodes = {1000};
    const Ran ran = run(system, spec);
    EXPECT_EQ(ran.exit.status, 0);
    EXPECT_EQ(ran.output, "hello\n");
}

TEST(Spawn, StartsInOurCgroupWhenTheOtherCannotBeEntered) {
    LinuxSystem system;
    const UniqueFd no_cgroup(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    SpawnSpec spec = program("/bin/echo", {"hello"});
    spec.cgroup = no_cgroup.get();
    const Ran ran = run(system, spec);
    EXPECT_EQ(ran.exit.status, 0);
    EXPECT_EQ(ran.output, "hello\n");
}

TEST(Spawn, ReportsAMachineWithoutRoomForAProcess) {
    LinuxSystem system;
    // Run as another user, because the limit does not bind root.
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit none{0, 0};
        const bool ready = (::getuid() != 0 || ::setuid(65534) == 0) && ::setrlimit(RLIMIT_NPROC, &none) == 0;
        const Result<pid_t> pid = system.spawn(program("/bin/true"));
        ::_exit(ready && !pid && pid.error().what == "fork: Resource temporarily unavailable" ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

/// Starts a child in the foreground of a new terminal on fd 0, in a new session. Returns 0 when the
/// terminal's foreground group is the child's, and the child can be stopped by it.
int start_in_foreground() {
    ::setsid();
    const UniqueFd terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
    if (!terminal || ::grantpt(terminal.get()) != 0 || ::unlockpt(terminal.get()) != 0) return 2;
    const int other_side = ::open(::ptsname(terminal.get()), O_RDWR | O_CLOEXEC);
    if (other_side < 0 || ::ioctl(other_side, TIOCSCTTY, 0) != 0 || ::dup2(other_side, 0) != 0) return 3;
    LinuxSystem system;
    SpawnSpec spec = program("/bin/sleep", {"1000"});
    spec.foreground_terminal = true;
    const Result<pid_t> pid = system.spawn(spec);
    if (!pid) return 4;
    const bool is_foreground = ::tcgetpgrp(0) == *pid;
    const Result<std::string> status = read_file(fmt::format("/proc/{}/status", *pid), 1 << 16);
    const bool is_stoppable = status && status->find(ignored({})) != std::string::npos;
    ::kill(*pid, SIGKILL);
    ::waitpid(*pid, nullptr, 0);
    return !is_foreground ? 1 : is_stoppable ? 0 : 5;
}

TEST(Spawn, GivesTheTerminalToAForegroundChild) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(start_in_foreground());
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Spawn, NamesTheTerminalThatCannotBeGiven) {
    const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    SpawnSpec spec = program("/bin/true");
    spec.descriptors = {{null.get(), 0}};
    spec.foreground_terminal = true;
    EXPECT_EQ(failure_of(spec).what, "start /bin/true: tcsetpgrp: Inappropriate ioctl for device");
}

TEST(Spawn, LetsNoChildOutliveItsParent) {
    LinuxSystem system;
    Result<System::Pipe> pipe = system.make_pipe(65536);
    ASSERT_TRUE(pipe);
    const pid_t parent = ::fork();
    if (parent == 0) {
        SpawnSpec spec = shell("echo $$; exec sleep 1000");
        spec.descriptors = {{pipe->write.get(), 1}};
        if (!system.spawn(spec)) ::_exit(1);
        ::raise(SIGSTOP);
        ::_exit(0);
    }
    pipe->write.reset();
    const std::string child = test::read_line(pipe->read.get());
    ::kill(parent, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(parent, &status, 0), parent);
    // The sleeping child holds the pipe, so its end shows the child's end.
    EXPECT_EQ(test::read_to_end(pipe->read.get()), "");
    const Result<std::int64_t> pid = parse_int(child);
    ASSERT_TRUE(pid) << child;
    if (HasFailure()) ::kill(static_cast<pid_t>(*pid), SIGKILL);
}

}  // namespace
}  // namespace ddprun::os
