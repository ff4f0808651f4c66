#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// A variable that marks every process of one job, whatever it becomes.
struct Marked {
    std::string variable = "PROBE_JOB=" + unique_name("orphan");
    RunOptions options = with_environment({variable});
};

TEST(Orphans, NothingOutlivesAJobThatEndsWell) {
    const Marked job;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=2"}, {"child", "daemon", "exit", "0"}), job.options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_TRUE(processes_with(job.variable).empty());
}

TEST(Orphans, ChildrenOfTheShellThatBecameDdprunAreNotTheJobs) {
    const Marked job;
    const Outcome outcome =
        run({"sh", "-c", "sleep 1000 >/dev/null 2>&1 & exec \"$@\"", "sh", path_of("DDPRUN"),
             "--nproc-per-node=1", path_of("PROBE"), "daemon", "exit", "0"},
            job.options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const std::vector<pid_t> left = processes_with(job.variable);
    EXPECT_EQ(left.size(), 1U) << "the shell's, without the worker's daemon";
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
}

TEST(Orphans, AGrandchildThatHoldsStdoutDoesNotHoldTheJob) {
    const Marked job;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=1"}, {"daemon", "say", "done", "exit", "0"}), job.options);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.out, HasSubstr("done"));
    EXPECT_LT(outcome.took, 5s);
    EXPECT_TRUE(all_gone(job.variable, 0ms));
}

TEST(Orphans, TheChildrenOfAKilledWorkerEndWithItsJob) {
    const Marked job;
    const Outcome outcome = run(
        ddprun_probe({"--nproc-per-node=2"}, {"child", "daemon", "rank", "1", "kill", "9", "end", "hold"}),
        job.options);
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_TRUE(processes_with(job.variable).empty());
}

TEST(Orphans, WorkersThatStoppedThemselvesAreEndedToo) {
    const Marked job;
    Program program(ddprun_probe({"--nproc-per-node=2", "--shutdown-timeout=1"}, {"say", "up", "stop"}),
                    job.options);
    ASSERT_TRUE(program.wait_for_output("[1]: up"));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_FALSE(outcome.timed_out);
    EXPECT_TRUE(all_gone(job.variable, 0ms));
}

TEST(Orphans, SigkillOfDdprunAtAnyMomentLeavesNoProcess) {
    std::mt19937 random(20);
    constexpr int kRounds = 200;
    for (int round = 0; round < kRounds; ++round) {
        const Marked job;
        Program program(ddprun_probe({"--nproc-per-node=3"}, {"child", "daemon", "hold"}), job.options);
        // The kills range from before the first worker's start to long after the last one's.
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 25'000));
        program.signal(SIGKILL);
        program.wait();
        ASSERT_TRUE(all_gone(job.variable))
            << "round " << round << ": " << processes_with(job.variable).size() << " processes are left";
    }
}

TEST(Orphans, SigkillOfDdprunsWholeGroupLeavesNoProcess) {
    const Marked job;
    Program program(ddprun_probe({"--nproc-per-node=3"}, {"child", "daemon", "say", "up", "hold"}),
                    job.options);
    ASSERT_TRUE(program.wait_for_output("[2]: up"));
    ::kill(-program.pid(), SIGKILL);
    program.wait();
    EXPECT_TRUE(all_gone(job.variable));
}

TEST(Orphans, AKilledWardenIsReplacedAndTheReplacementKillsTheWorkers) {
    const Marked job;
    Program program(ddprun_probe({"--nproc-per-node=2"}, {"daemon", "say", "up", "hold"}), job.options);
    ASSERT_TRUE(program.wait_for_output("[1]: up"));
    const std::vector<pid_t> wardens = children_named(program.pid(), "warden");
    ASSERT_EQ(wardens.size(), 1u);
    ::kill(wardens[0], SIGKILL);
    ASSERT_TRUE(program.wait_for_output("started another"));
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(all_gone(job.variable));
}

/// A Python program that leaves its shared memory to Python's resource tracker; the parameter is how it ends.
class SharedMemoryOfPython : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Orphans, SharedMemoryOfPython, ::testing::Values("exit", "abort", "kill"),
                         [](const auto& how) { return how.param; });

TEST_P(SharedMemoryOfPython, IsRemovedByItsResourceTracker) {
    if (run({"python3", "-c", "import multiprocessing.shared_memory"}).status != 0)
        GTEST_SKIP() << "no python3";
    const std::string name = unique_name("ddprun-memory");
    const TemporaryDirectory made;
    // A rank that is stopped because the other has died must have told its tracker of its memory before.
    const std::string program =
        "import os, signal, sys, time\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=1, name=sys.argv[1] + '.' + os.environ['RANK'])\n"
        "open(sys.argv[3] + '/' + os.environ['RANK'], 'w').close()\n"
        "while len(os.listdir(sys.argv[3])) < 2: time.sleep(0.001)\n"
        "if sys.argv[2] == 'abort': os.abort()\n"
        "if sys.argv[2] == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=2", "--no-python", "python3", "-c",
                                 program, name, GetParam(), made.path()});
    EXPECT_EQ(outcome.status == 0, GetParam() == "exit") << outcome.err;
    EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("left behind")));
    for (const char* rank : {".0", ".1"})
        EXPECT_NE(::access(("/dev/shm/" + name + rank).c_str(), F_OK), 0) << rank;
}

TEST(Orphans, AProcOfAnotherPidNamespaceKillsNoStranger) {
    if (run({"unshare", "-p", "-f", "true"}).status != 0) GTEST_SKIP() << "no pid namespace can be made";
    std::vector<std::string> command{"unshare", "-p", "-f"};
    const std::vector<std::string> job = ddprun_probe({"--nproc-per-node=2"}, {"daemon", "exit", "0"});
    command.insert(command.end(), job.begin(), job.end());
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, ::testing::Not(HasSubstr("left behind")))
        << "two daemons at most are its own, and they end when asked";
}

TEST(Orphans, ADaemonDoesNotOutliveASigkillOfDdprunWithoutProc) {
    if (run({"unshare", "-m", "mount", "-t", "tmpfs", "none", "/proc"}).status != 0)
        GTEST_SKIP() << "/proc cannot be hidden";
    const Marked job;
    std::vector<std::string> command{"unshare", "-m", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"",
                                     "sh"};
    const std::vector<std::string> rest =
        ddprun_probe({"--nproc-per-node=2", "--cgroup=none"}, {"daemon", "say", "up", "hold"});
    command.insert(command.end(), rest.begin(), rest.end());
    Program program(command, job.options);
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(all_gone(job.variable));
}

bool comes_to_nothing(const std::string& argument) {
    for (const auto until = std::chrono::steady_clock::now() + 20s;
         std::chrono::steady_clock::now() < until;) {
        if (processes_called_with(argument).empty()) return true;
        std::this_thread::sleep_for(2ms);
    }
    return false;
}

TEST(Orphans, ADaemonWithAnEmptyEnvironmentDoesNotOutliveASigkillOfDdprunWithoutACgroup) {
    const std::string name = unique_name("nameless");
    Program program(ddprun_probe({"--nproc-per-node=2", "--cgroup=none"}, {"nameless", "say", "up", "hold"}),
                    with_environment({"PROBE_JOB=" + name}));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    ASSERT_EQ(processes_called_with(name).size(), 2u);
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(comes_to_nothing(name));
}

TEST(Orphans, ADaemonOfAnInnerJobEndsWithTheOuterJobWithoutACgroup) {
    const std::string name = unique_name("nameless");
    std::vector<std::string> outer{path_of("DDPRUN"), "--cgroup=none"};
    const std::vector<std::string> inner = ddprun_probe({"--cgroup=none"}, {"nameless", "say", "up", "hold"});
    outer.insert(outer.end(), inner.begin(), inner.end());
    Program program(outer, with_environment({"PROBE_JOB=" + name}));
    ASSERT_TRUE(program.wait_for_output("up\n"));
    ASSERT_EQ(processes_called_with(name).size(), 1u);
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(comes_to_nothing(name));
}

/// Runs as another user, whose leftovers no other test makes.
std::vector<std::string> as_daemon(const std::vector<std::string>& command) {
    std::vector<std::string> all{"setpriv", "--reuid=daemon", "--regid=daemon", "--clear-groups"};
    all.insert(all.end(), command.begin(), command.end());
    return all;
}

void kill_with_its_warden(Program& program) {
    const std::vector<pid_t> wardens = children_named(program.pid(), "warden");
    ASSERT_EQ(wardens.size(), 1u);
    program.signal(SIGSTOP);  // so that it starts no other warden
    ASSERT_TRUE(is_soon(Stopped::Yes, program.pid()));
    ::kill(wardens[0], SIGKILL);
    program.signal(SIGKILL);
    program.wait();
}

TEST(Orphans, CleanEndsTheProcessesOfAKilledDdprunAndTouchesNoRunningJob) {
    const std::string ddprun = path_of("DDPRUN");
    if (run(as_daemon({ddprun, "--version"})).status != 0)
        GTEST_SKIP() << "needs root, and a place that other users can read";
    const std::string left = unique_name("left"), alive = unique_name("alive");
    Program runs(as_daemon(ddprun_probe({"--nproc-per-node=1"}, {"nameless", "say", "up", "hold"})),
                 with_environment({"PROBE_JOB=" + alive}));
    Program killed(
        as_daemon(ddprun_probe({"--nproc-per-node=2"}, {"child", "daemon", "nameless", "say", "up", "hold"})),
        with_environment({"PROBE_JOB=" + left}));
    ASSERT_TRUE(runs.wait_for_output("up") && killed.wait_for_output("[0]: up") &&
                killed.wait_for_output("[1]: up"));
    kill_with_its_warden(killed);
    ASSERT_FALSE(processes_called_with(left).empty());

    const Outcome shown = run({ddprun, "clean", "--dry-run", "--user=daemon"});
    EXPECT_THAT(shown.out, ::testing::ContainsRegex("would end [0-9]+ processes of job")) << shown.err;
    EXPECT_EQ(processes_called_with(left).size(), 2u);

    const Outcome cleaned = run({ddprun, "clean", "--user=daemon"});
    EXPECT_EQ(cleaned.status, 0) << cleaned.err;
    EXPECT_THAT(cleaned.out, ::testing::ContainsRegex("ended [0-9]+ processes of job"));
    EXPECT_TRUE(processes_called_with(left).empty() && processes_with("PROBE_JOB=" + left).empty());
    EXPECT_EQ(processes_called_with(alive).size(), 1u);
    EXPECT_THAT(run({ddprun, "clean", "--user=daemon"}).out, HasSubstr("nothing is left"));
}

TEST(Orphans, CleanTakesANumberThatNoUserHas) {
    const std::string ddprun = path_of("DDPRUN");
    if (::geteuid() != 0) GTEST_SKIP() << "only root cleans up for others";
    const Outcome outcome = run({ddprun, "clean", "--user", "60125"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("nothing is left"));
    EXPECT_EQ(run({ddprun, "clean", "--user", "nobody-has-this-name"}).status, 64);
}

TEST(Orphans, AStoppedWardenIsWokenAndKillsTheWorkers) {
    const Marked job;
    Program program(ddprun_probe({"--nproc-per-node=2"}, {"daemon", "say", "up", "hold"}), job.options);
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    const std::vector<pid_t> wardens = children_named(program.pid(), "warden");
    ASSERT_EQ(wardens.size(), 1u);
    program.signal(SIGSTOP);  // so that we see the warden stopped before it is woken
    ::kill(wardens[0], SIGSTOP);
    ASSERT_TRUE(is_soon(Stopped::Yes, wardens[0]));
    program.signal(SIGCONT);
    ASSERT_TRUE(is_soon(Stopped::No, wardens[0]));
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(all_gone(job.variable));
}

}  // namespace
}  // namespace ddprun::test
