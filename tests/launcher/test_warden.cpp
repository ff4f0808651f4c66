#include "launcher/guard/guards.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <vector>

#include "launcher/guard/job_mark.h"
#include "tests/support/temporary_directory.h"

namespace ddprun {
namespace {

/// Runs `act` in a separate process. Returns its exit code, or nullopt if it does not end in time.
template <class Act>
std::optional<int> exit_code_of(const Act& act) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(act());
    const TimePoint deadline = deadline_after(MonotonicClock::now(), std::chrono::seconds(60));
    int status = 0;
    while (MonotonicClock::now() < deadline) {
        if (::waitpid(pid, &status, WNOHANG) == pid) return WEXITSTATUS(status);
        ::usleep(1000);
    }
    ::kill(pid, SIGKILL);
    ::waitpid(pid, &status, 0);
    return std::nullopt;
}

bool is_there(pid_t pid) { return ::kill(pid, 0) == 0; }

TEST(Warden, DoesNotDelayTheEndWhenStopped) {
    EXPECT_EQ(exit_code_of([] {
                  auto warden = *Warden::start({"DDPRUN_JOB=none-of-ours", 0}, "", 1);
                  const pid_t pid = warden->pid();
                  ::kill(pid, SIGSTOP);
                  int status = 0;
                  if (::waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status)) return 1;
                  warden.reset();
                  return is_there(pid) ? 2 : 0;
              }),
              0);
}

TEST(Warden, RemovesTheSecretFileOfAKilledDdprun) {
    const test::TemporaryDirectory directory;
    const std::string secret = directory.file(".ddprun-1");
    std::ofstream(secret) << "the token";
    EXPECT_EQ(exit_code_of([&] {
                  const auto warden = *Warden::start({"DDPRUN_JOB=none-of-ours", 0}, "", 1, "", secret);
                  warden->end_all();
                  return ::access(secret.c_str(), F_OK) == 0 ? 1 : 0;
              }),
              0);
}

TEST(Warden, IsKilledAtTheEndWhenItStaysStopped) {
    EXPECT_EQ(exit_code_of([] {
                  auto warden = *Warden::start({"DDPRUN_JOB=none-of-ours", 0}, "", 1);
                  const pid_t pid = warden->pid();
                  // Stop the warden whenever it is continued.
                  const pid_t tormentor = ::fork();
                  if (tormentor == 0) {
                      for (;;) ::kill(pid, SIGSTOP);
                  }
                  int status = 0;
                  if (::waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status)) return 1;
                  warden.reset();
                  ::kill(tormentor, SIGKILL);
                  ::waitpid(tormentor, &status, 0);
                  return is_there(pid) ? 2 : 0;
              }),
              0);
}

TEST(Warden, KillsTheWorkersOfADdprunThatStandsStill) {
    EXPECT_EQ(exit_code_of([] {
                  auto warden = *Warden::start({"DDPRUN_JOB=none-of-ours", 0}, "", 1);
                  const pid_t worker = ::fork();
                  if (worker == 0) {
                      for (;;) ::pause();
                  }
                  ::setpgid(worker, worker);
                  warden->set_group(0, worker);
                  warden->watch_for_stalls(std::chrono::milliseconds(50));  // note_alive() is never called
                  int status = 0;
                  if (::waitpid(worker, &status, 0) != worker) return 1;
                  return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && is_there(warden->pid()) ? 0
                                                                                                       : 2;
              }),
              0);
}

TEST(Warden, WatchesForStallsAfterARestart) {
    EXPECT_EQ(exit_code_of([] {
                  auto warden = *Warden::start({"DDPRUN_JOB=none-of-ours", 0}, "", 1);
                  warden->watch_for_stalls(std::chrono::milliseconds(50));
                  ::kill(warden->pid(), SIGKILL);
                  int status = 0;
                  if (::waitpid(warden->pid(), &status, 0) != warden->pid() || !warden->restart()) return 1;
                  const pid_t worker = ::fork();
                  if (worker == 0) {
                      for (;;) ::pause();
                  }
                  ::setpgid(worker, worker);
                  warden->set_group(0, worker);
                  warden->note_alive();
                  return ::waitpid(worker, &status, 0) == worker && WIFSIGNALED(status) ? 0 : 2;
              }),
              0);
}

// ---- the mark

TEST(JobMark, IgnoresZombies) {
    const JobMark mark{"DDPRUN_JOB=none-of-ours", 0x4444123456789abc};
    const pid_t pid = ::fork();
    if (pid == 0) {
        const rlimit limit{mark.lock_limit, RLIM_INFINITY};
        ::setrlimit(RLIMIT_LOCKS, &limit);
        for (;;) ::pause();
    }
    while (kill_marked_processes(mark) == 0) ::usleep(1000);
    siginfo_t ended{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT), 0);
    EXPECT_EQ(kill_marked_processes(mark), 0) << "its limits can be read until it is reaped";
    ::waitpid(pid, nullptr, 0);
}

TEST(JobMark, IsFoundByItsLimitWhereProcBelongsToAnotherPidNamespace) {
    const std::optional<int> code = exit_code_of([] {
        if (::unshare(CLONE_NEWPID) != 0) return 77;
        const pid_t inside = ::fork();
        if (inside == 0) {
            const JobMark mark{"DDPRUN_JOB=none-of-ours", 0x4444123456789abc};
            const pid_t marked = ::fork();
            if (marked == 0) {
                const rlimit limit{mark.lock_limit, RLIM_INFINITY};
                ::setrlimit(RLIMIT_LOCKS, &limit);
                for (;;) ::pause();
            }
            while (marked_processes(mark) != std::vector<pid_t>{marked}) ::usleep(1000);
            ::kill(marked, SIGKILL);
            siginfo_t ended{};
            ::waitid(P_PID, static_cast<id_t>(marked), &ended, WEXITED | WNOWAIT);
            ::_exit(marked_processes(mark).empty() ? 0 : 1);
        }
        int status = 0;
        ::waitpid(inside, &status, 0);
        return WEXITSTATUS(status);
    });
    if (code == 77) GTEST_SKIP() << "no pid namespace can be made";
    EXPECT_EQ(code, 0);
}

constexpr std::uint64_t kUnlimited = ~std::uint64_t{0};

TEST(JobMark, IsTheJobsIdInAVariableAndInALimitThatNothingLooksAt) {
    const JobMark mark = make_job_mark("00f1e2d3c4b5a697", kUnlimited);
    EXPECT_EQ(mark.variable, "DDPRUN_JOB=00f1e2d3c4b5a697");
    EXPECT_EQ(mark.lock_limit, 0x444400f1e2d3c4b5U);
    EXPECT_NE(make_job_mark("00f1e2d3c4b6a697", kUnlimited).lock_limit, mark.lock_limit);
}

TEST(JobMark, KeepsTheMarkOfAnOuterJob) {
    const JobMark outer = make_job_mark("00f1e2d3c4b5a697", kUnlimited);
    EXPECT_EQ(make_job_mark("aaaaaaaaaaaaaaaa", outer.lock_limit),
              (JobMark{"DDPRUN_JOB=aaaaaaaaaaaaaaaa", 0}));
    EXPECT_NE(make_job_mark("aaaaaaaaaaaaaaaa", 1000).lock_limit, 0U)
        << "a limit that somebody has set is none of ours";
}

TEST(JobMark, OfAWorkerIsItsErrorFileUpToItsLastGeneration) {
    using namespace std::string_literals;
    const WorkerMark mark{{"DDPRUN_JOB=ab", 0}, "/jobs/1/error.json", 3};
    const auto text = [](const std::string& job, const std::string& file, const std::string& generation) {
        return "DDPRUN_JOB=" + job + "\0TORCHELASTIC_ERROR_FILE="s + file + "\0DDPRUN_GENERATION="s +
               generation + "\0"s;
    };
    EXPECT_TRUE(is_marked(mark, text("ab", "/jobs/1/error.json", "3")));
    EXPECT_TRUE(is_marked(mark, text("ab", "/jobs/1/error.json", "1")))
        << "the worker had survived two failures";
    EXPECT_FALSE(is_marked(mark, text("ab", "/jobs/1/error.json", "4"))) << "of the worker that replaces it";
    EXPECT_FALSE(is_marked(mark, text("ab", "/jobs/2/error.json", "3"))) << "of another worker";
    EXPECT_FALSE(is_marked(mark, text("abc", "/jobs/1/error.json", "3"))) << "of another job";
    EXPECT_FALSE(is_marked(mark, text("ab", "/jobs/1/error.json", "")));
    EXPECT_FALSE(is_marked(mark, "DDPRUN_JOB=ab\0TORCHELASTIC_ERROR_FILE=/jobs/1/error.json"s));
    EXPECT_FALSE(is_marked({{"DDPRUN_JOB=ab", 0}, "", 3}, text("ab", "", "3")))
        << "which worker is not known";
}

TEST(JobMark, IsFoundInEitherPlaceAndOnlyAsAWhole) {
    using namespace std::string_literals;
    const JobMark mark{"DDPRUN_JOB=ab", 4919131752989213764};
    const std::string limits =
        "Limit  Soft Limit  Hard Limit  Units\nMax file locks            4919131752989213764  unlimited            locks     \n";
    EXPECT_TRUE(is_marked(mark, "A=1\0DDPRUN_JOB=ab\0B=2\0"s, ""));
    EXPECT_TRUE(is_marked(mark, "", limits)) << "a process that has emptied its environment";
    EXPECT_FALSE(is_marked(mark, "A=1\0DDPRUN_JOB=abc\0XDDPRUN_JOB=ab\0"s, ""));
    EXPECT_FALSE(
        is_marked(mark, "", "Max file locks            unlimited            4919131752989213764  locks\n"));
    EXPECT_FALSE(
        is_marked({"DDPRUN_JOB=ab", 0}, "", "Max file locks            0            unlimited  locks\n"));
    EXPECT_FALSE(is_marked(mark, "", "Max file locks"));
    EXPECT_EQ(job_in_limits("Max file locks            4919057731888071861  unlimited            locks\n"),
              "00f1e2d3c4b5");
    EXPECT_EQ(job_in_limits("Max file locks            unlimited            unlimited            locks\n"),
              "");
    EXPECT_EQ(job_in_limits("Max file locks            1024                 unlimited            locks\n"),
              "");
    EXPECT_FALSE(is_marked(mark, "", ""));
}

}  // namespace
}  // namespace ddprun
