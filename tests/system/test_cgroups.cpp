// Real cgroups, where this machine lets us make them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "launcher/ends/explain.h"
#include "launcher/guard/job_cgroup.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// A cgroup v2 of one test, in which only its ddprun runs.
class Cgroups : public ::testing::Test {
  protected:
    void SetUp() override {
        const OwnCgroup own =
            find_own_cgroup(file_content("/proc/self/cgroup"), file_content("/proc/self/mountinfo"));
        if (own.directory.empty()) GTEST_SKIP() << own.why;
        const std::string directory = own.directory + "/" + unique_name("ddprun-test");
        Result<std::unique_ptr<JobCgroup>> made = JobCgroup::create(directory);
        if (!made) GTEST_SKIP() << made.error().what;
        cgroup_ = std::move(*made);
        directory_ = directory;
        if (run(inside({"/bin/true"})).status != 0)
            GTEST_SKIP() << directory << ": processes cannot be moved there";
    }

    [[nodiscard]] std::vector<std::string> inside(const std::vector<std::string>& command) const {
        std::vector<std::string> words = {"/bin/sh", "-c", "echo 0 > \"$0\" && exec \"$@\"",
                                          directory_ + "/cgroup.procs"};
        words.insert(words.end(), command.begin(), command.end());
        return words;
    }
    /// The cgroups of jobs that exist now.
    [[nodiscard]] std::vector<std::string> jobs() const {
        std::vector<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
            if (entry.is_directory()) found.push_back(entry.path().filename());
        }
        return found;
    }
    [[nodiscard]] std::string populated() const { return file_content(directory_ + "/cgroup.events"); }
    /// True when no process and no directory is left in it.
    [[nodiscard]] bool comes_to_rest() const {
        for (const auto until = std::chrono::steady_clock::now() + 10s;
             std::chrono::steady_clock::now() < until;) {
            if (populated().starts_with("populated 0") && jobs().empty()) return true;
            ::usleep(1000);
        }
        return false;
    }

    std::string directory_;
    std::unique_ptr<JobCgroup> cgroup_;
};

/// The acts, after one that starts a process which no environment, session or parent ties to the job.
std::vector<std::string> with_stray(std::vector<std::string> acts) {
    acts.insert(acts.begin(), "nameless");
    return acts;
}

TEST_F(Cgroups, WorkersLiveInACgroupOfTheirOwnThatIsGoneAfterwards) {
    Program program(inside(ddprun_probe({"--nproc-per-node=2"}, {"say", "up", "hold"})));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    ASSERT_EQ(jobs().size(), 1u);
    EXPECT_THAT(jobs()[0], HasSubstr("ddprun-job-"));
    EXPECT_EQ(occurrences(file_content(directory_ + "/" + jobs()[0] + "/cgroup.procs"), "\n"), 2);
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().status, 75);
    EXPECT_TRUE(jobs().empty());
}

TEST_F(Cgroups, WorkersStayInOurCgroupWithCgroupNone) {
    const Outcome outcome =
        run(inside(ddprun_probe({"--cgroup=none"}, {"say", "up"})), with_environment({"LOGLEVEL=debug"}));
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("our own cgroup: --cgroup none"));
}

TEST_F(Cgroups, ARestartFindsNoStraysOfTheLastGeneration) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(
        inside(ddprun_probe({"--max-restarts=1"},
                            with_stray({"once", directory.file("x"), "exit", "5", "end", "say", "again"}))));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("again"));
    EXPECT_THAT(populated(), HasSubstr("populated 0"));
    EXPECT_TRUE(jobs().empty());
}

TEST_F(Cgroups, AStrayWithoutOurMarkerDoesNotOutliveASigkillOfDdprun) {
    Program program(inside(ddprun_probe({"--nproc-per-node=2"}, with_stray({"say", "up", "hold"}))));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    program.signal(SIGKILL);
    program.wait();
    EXPECT_TRUE(comes_to_rest()) << populated();
}

TEST_F(Cgroups, SigkillOfDdprunAtAnyMomentLeavesNoCgroup) {
    for (int round = 0; round < 60; ++round) {
        Program program(inside(ddprun_probe({"--nproc-per-node=3"}, with_stray({"hold"}))));
        // The kills are spread from before the cgroup is made to after the last worker has started.
        std::this_thread::sleep_for(std::chrono::microseconds(round * 400));
        program.signal(SIGKILL);
        program.wait();
        ASSERT_TRUE(comes_to_rest()) << "round " << round << ": " << populated();
    }
}

TEST_F(Cgroups, TheNextDdprunRemovesTheCgroupOfADdprunKilledWithItsWarden) {
    Program program(inside(ddprun_probe({"--nproc-per-node=2"}, with_stray({"say", "up", "hold"}))));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    const std::vector<pid_t> wardens = children_named(program.pid(), "warden");
    ASSERT_EQ(wardens.size(), 1u);
    // Kill the warden first, while ddprun is stopped and cannot start another. (A stopped warden would be
    // continued by the kernel at ddprun's death, which orphans its process group, and would act before our
    // signal.)
    program.signal(SIGSTOP);
    ASSERT_TRUE(is_soon(Stopped::Yes, program.pid()));
    ::kill(wardens[0], SIGKILL);
    program.signal(SIGKILL);
    program.wait();
    ASSERT_EQ(jobs().size(), 1u);
    ASSERT_THAT(populated(), HasSubstr("populated 1")) << "nothing is left that could be ended";

    const Outcome next = run(inside(ddprun_probe({}, {"say", "next"})));
    EXPECT_EQ(next.status, 0);
    EXPECT_THAT(next.err, HasSubstr("ended what was in it"));
    EXPECT_TRUE(comes_to_rest()) << populated();
}

TEST_F(Cgroups, TheNextDdprunLeavesTheCgroupOfALivingOneAlone) {
    const TemporaryDirectory directory;
    Program program(
        inside(ddprun_probe({"--max-restarts=1"}, {"once", directory.file("x"), "on", "10", "1", "say",
                                                   "first", "hold", "end", "say", "second", "hold"})));
    const auto is_untouched = [&](const char* when) {
        EXPECT_EQ(run(inside(ddprun_probe({}, {"say", "next"}))).status, 0);
        ASSERT_EQ(jobs().size(), 1u) << when;
        EXPECT_EQ(occurrences(file_content(directory_ + "/" + jobs()[0] + "/cgroup.procs"), "\n"), 1) << when;
    };
    ASSERT_TRUE(program.wait_for_output("first"));
    is_untouched("while it runs");
    program.signal(SIGSTOP);
    is_untouched("while it is stopped");
    program.signal(SIGCONT);
    program.signal(SIGUSR1);
    ASSERT_TRUE(program.wait_for_output("second"));
    is_untouched("made anew for another generation");
    program.signal(SIGTERM);
    EXPECT_EQ(program.wait().status, 75);
    EXPECT_TRUE(jobs().empty());
}

TEST_F(Cgroups, AJobInsideAJobLeavesNoCgroupEither) {
    const std::vector<std::string> inner =
        ddprun_probe({"--nproc-per-node=2"}, with_stray({"say", "up", "hold"}));
    const TemporaryDirectory directory;
    // The inner ddprun is killed by the outer one, after the shell between them.
    std::vector<std::string> outer = {path_of("DDPRUN"),
                                      "--failure-grace=0",
                                      "/bin/sh",
                                      "-c",
                                      "\"$@\" & while ! test -e \"$0\"; do sleep 0.01; done; kill -9 $$",
                                      directory.file("up")};
    outer.insert(outer.end(), inner.begin(), inner.end());
    Program program(inside(outer));
    ASSERT_TRUE(program.wait_for_output("[0]: up") && program.wait_for_output("[1]: up"));
    std::ofstream(directory.file("up")) << "go";
    EXPECT_EQ(program.wait().status, 128 + SIGKILL);
    EXPECT_TRUE(comes_to_rest()) << populated();
}

// ---- memory

/// A cgroup with a memory limit below ours, of version 1 or 2; "" with the reason when none can be made.
struct LimitedCgroup {
    std::string directory, why;
    bool version2 = false;

    explicit LimitedCgroup(const std::string& bytes) {
        const CgroupPlaces own = cgroup_places(file_content("/proc/self/cgroup"), "memory");
        if (own.version == 0) {
            why = "no memory cgroup";
            return;
        }
        version2 = own.version == 2;
        directory = own.directories.front() + "/" + unique_name("ddprun-memory");
        if (::mkdir(directory.c_str(), 0755) != 0) {
            why = directory + ": " + std::strerror(errno);
            directory.clear();
            return;
        }
        const std::string limit = directory + (version2 ? "/memory.max" : "/memory.limit_in_bytes");
        std::ofstream(limit) << bytes;
        // With swap the process would only become slow.
        for (const char* name : {"/memory.swap.max", "/memory.memsw.limit_in_bytes"})
            std::ofstream(directory + name) << (version2 ? "0" : bytes);
        if (file_content(limit) != bytes + "\n")
            why = directory + ": no limit can be set (the memory controller is not delegated)";
    }
    ~LimitedCgroup() {
        if (!directory.empty()) ::rmdir(directory.c_str());
    }
    LimitedCgroup(const LimitedCgroup&) = delete;
    LimitedCgroup& operator=(const LimitedCgroup&) = delete;

    [[nodiscard]] std::vector<std::string> inside(const std::vector<std::string>& command) const {
        std::vector<std::string> words = {"/bin/sh", "-c", "echo 0 > \"$0\" && exec \"$@\"",
                                          directory + "/cgroup.procs"};
        words.insert(words.end(), command.begin(), command.end());
        return words;
    }
};

TEST(OutOfMemory, AWorkerThatTheKernelKilledAtTheLimitIsExplainedInTheReport) {
    const LimitedCgroup cgroup("536870912");
    if (!cgroup.why.empty()) GTEST_SKIP() << cgroup.why;
    const Outcome outcome =
        run(cgroup.inside(ddprun_probe({"--nproc-per-node=2"}, {"rank", "1", "grow", "end", "hold"})));
    EXPECT_EQ(outcome.status, 128 + SIGKILL) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("first cause   rank 1"),
                                   HasSubstr("out of memory: the cgroup's limit of 512 MiB was hit")))
        << outcome.err;
}

TEST(OutOfMemory, AKillByHandUnderTheSameLimitIsNotExplainedByMemory) {
    const LimitedCgroup cgroup("536870912");
    if (!cgroup.why.empty()) GTEST_SKIP() << cgroup.why;
    const Outcome outcome =
        run(cgroup.inside(ddprun_probe({"--nproc-per-node=2"}, {"rank", "1", "kill", "9", "end", "hold"})));
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_THAT(outcome.err, Not(HasSubstr("out of memory:")));
}

}  // namespace
}  // namespace ddprun::test
