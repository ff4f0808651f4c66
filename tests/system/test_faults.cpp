// Faults on one node that no other test injects: too few descriptors, strangers' connections, frozen workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>

#include "env/io/socket.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// ddprun under this limit on open files, soft and hard.
std::vector<std::string> with_open_files(int limit, const std::vector<std::string>& command) {
    std::vector<std::string> words = {"/bin/sh", "-c",
                                      "ulimit -n " + std::to_string(limit) + " && exec \"$@\"", "sh"};
    words.insert(words.end(), command.begin(), command.end());
    return words;
}

TEST(Faults, ALimitOnOpenFilesThatIsTooSmallIsReportedBeforeAnyWorkerStarts) {
    const Outcome outcome =
        run(with_open_files(200, ddprun_probe({"--nproc-per-node=64"}, {"say", "started"})));
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("--nproc-per-node: 64 workers"), HasSubstr("limit is 200"),
                                   HasSubstr("ulimit -Hn")));
    EXPECT_EQ(occurrences(said_of_its_own_job(outcome), "\n"), 1);
    EXPECT_EQ(outcome.out, "");
}

TEST(Faults, AJobThatFitsRunsUnderASmallLimitOnOpenFiles) {
    // The limit is below the usual numbers of the segment and the lifeline.
    const Outcome outcome =
        run(with_open_files(128, ddprun_probe({"--nproc-per-node=8"}, {"say", "started"})));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "started"), 8);
}

TEST(Faults, ALimitOnFileSizesIsForTheWorkersFilesAndNotForSharedMemory) {
    const Outcome outcome =
        run({"/bin/bash", "-c", "ulimit -Sf 100; exec \"$0\" --nproc-per-node=2 bash -c 'ulimit -Sf'",
             path_of("DDPRUN")});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: 100\n"), HasSubstr("[1]: 100\n")));
}

TEST(Faults, AHardLimitOnFileSizesLeavesRoomForWorkersThatShareNoMemory) {
    const Outcome outcome =
        run({"/bin/bash", "-c", "ulimit -f 100; exec \"$0\" --nproc-per-node=2 bash -c 'ulimit -Hf'",
             path_of("DDPRUN")});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("[0]: 100\n"), HasSubstr("[1]: 100\n")));
}

TEST(Faults, AHardLimitOnFileSizesThatIsTooSmallIsReportedWithTheRemedy) {
    const Outcome outcome =
        run({"/bin/bash", "-c", "ulimit -f 1; exec \"$0\" --nproc-per-node=2 true", path_of("DDPRUN")});
    EXPECT_EQ(outcome.status, 70) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("files may have 1 KiB at most: raise the hard limit (ulimit -Hf)"));
}

TEST(Faults, ACallThatIsRefusedForEverEndsTheJobWithOneLine) {
    struct Case {
        long call;
        const char* said;
        std::vector<std::string> options = {};
    };
    if (run(with_refused_calls(SYS_eventfd2, SYS_eventfd2, EMFILE, {"true"})).status != 0)
        GTEST_SKIP() << "no seccomp filters here";
    const std::string mark = "PROBE_JOB=" + unique_name("refused");
    // The look-up of a name wakes the loop by an eventfd; that of a number needs none.
    const std::vector<std::string> by_name = {"--nnodes=2", "--node-rank=1", "--rdzv-endpoint=localhost:1"};
    for (const Case& one :
         {Case{SYS_eventfd2, "no controller at localhost:1", by_name},
          Case{SYS_accept4, "cannot accept connections"}, Case{SYS_getsockopt, "no controller at 127.0.0.1:"},
          Case{SYS_timerfd_settime, "timerfd_settime: "}}) {
        std::vector<std::string> options = {"--nproc-per-node=1", "--rdzv-conf=join_timeout=1"};
        options.insert(options.end(), one.options.begin(), one.options.end());
        const Outcome outcome =
            run(with_refused_calls(one.call, one.call, EMFILE,
                                   ddprun_probe(options, {"child", "daemon", "exit", "0"})),
                with_environment({mark}));
        EXPECT_FALSE(outcome.timed_out) << outcome.err;
        EXPECT_GT(outcome.status, 63) << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(HasSubstr(one.said), HasSubstr("Too many open files"),
                                       Not(HasSubstr("killing the workers"))));
        EXPECT_EQ(outcome.out, "");
        EXPECT_TRUE(all_gone(mark, 0ms));
    }
}

TEST(Faults, ASandboxThatRefusesACallEndsTheJobAtOnceWithOneLine) {
    if (run(with_refused_calls(SYS_eventfd2, SYS_eventfd2, EMFILE, {"true"})).status != 0)
        GTEST_SKIP() << "no seccomp filters here";
    for (const auto& [call, said] : {std::pair(SYS_waitid, "waitid: Operation not permitted"),
                                     std::pair(SYS_sendmsg, "lost: Operation not permitted")}) {
        const Outcome outcome =
            run(with_refused_calls(call, call, EPERM, ddprun_probe({"--nproc-per-node=1"}, {"exit", "0"})));
        EXPECT_FALSE(outcome.timed_out) << outcome.err;
        EXPECT_GT(outcome.status, 63) << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr(said));
    }
}

TEST(Faults, AFrozenWorkerDoesNotDelayTheEndOfAFailedJobBeyondTheGrace) {
    const std::string marker = "PROBE_JOB=" + unique_name("faults");
    const TemporaryDirectory directory;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=3", "--failure-grace=500ms"},
                         {"rank", "0", "ignore", "15", "once", directory.file("deaf"), "stop", "end", "end",
                          "rank", "1", "await", directory.file("deaf"), "exit", "9", "end", "hold"}),
            with_environment({marker}));
    EXPECT_EQ(outcome.status, 9) << outcome.err;
    EXPECT_LT(outcome.took, 5s);
    EXPECT_TRUE(all_gone(marker, 0ms));
}

TEST(Faults, TheFirstErrorReportIsTheRootCauseThoughAPeerExitsFirst) {
    const TemporaryDirectory directory;
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=2"},
                         {"rank", "1", "report", "ValueError: boom", "once", directory.file("failed"), "hold",
                          "end", "end", "await", directory.file("failed"), "sleep", "200", "exit", "4"}));
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("root cause, after all: rank 1"), HasSubstr("first cause   rank 1"),
                      HasSubstr("ValueError: boom"), HasSubstr("rank 0: exit code 4")));
}

/// Rank 1 reports an error and is still at its end when rank 0 fails of it. Both run behind `wrapper`.
Outcome run_with_late_reporter(const std::string& report, const std::vector<std::string>& wrapper) {
    const TemporaryDirectory directory;
    std::filesystem::permissions(directory.path(), std::filesystem::perms::all);  // also for another user
    std::vector<std::string> command = {path_of("DDPRUN"), "--nproc-per-node=2", "--no-python"};
    command.insert(command.end(), wrapper.begin(), wrapper.end());
    const std::string failed = directory.file("failed");
    const std::vector<std::string> acts = {
        path_of("PROBE"), "rank", "1", "report", report,  "once", failed,  "end", "rank", "1", "sleep",
        "2000",           "exit", "3", "end",    "await", failed, "sleep", "200", "exit", "7"};
    command.insert(command.end(), acts.begin(), acts.end());
    return run(command);
}

TEST(Faults, ALongErrorReportIsTheRootCauseToo) {
    const Outcome outcome = run_with_late_reporter("ValueError: " + std::string(100'000, 'x'), {"env"});
    EXPECT_EQ(outcome.status, 1) << outcome.err.substr(0, 2000);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("first cause   rank 1"), HasSubstr("error report"),
                                   HasSubstr("ValueError: xxx"), HasSubstr("of this report are left out")));
}

TEST(Faults, AWorkerInOtherNamespacesLeavesItsErrorReport) {
    // What apptainer, enroot and podman do without root; and what a wrapper does that changes the user.
    std::vector<std::vector<std::string>> wrappers = {
        {"unshare", "-Ur"}, {"unshare", "-Urpf", "--mount-proc"}, {"unshare", "-Urm"}};
    if (::geteuid() == 0) wrappers.push_back({"setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"});
    for (const std::vector<std::string>& wrapper : wrappers) {
        std::vector<std::string> works = wrapper;
        works.emplace_back("true");
        if (run(works).status != 0) continue;
        const Outcome outcome = run_with_late_reporter("ValueError: boom", wrapper);
        EXPECT_EQ(outcome.status, 1) << wrapper[0] << ' ' << wrapper[1] << '\n' << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(HasSubstr("first cause   rank 1"), HasSubstr("ValueError: boom")));
        EXPECT_EQ(said_of_its_own_job(outcome), outcome.err);
    }
}

TEST(Faults, AnErrorReportIsThisUsersAndGoesWithTheJob) {
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=1", "--no-python", "sh", "-c",
             "echo \"file $TORCHELASTIC_ERROR_FILE\"; stat -c '%u %s' \"$TORCHELASTIC_ERROR_FILE\""});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const std::size_t begin = outcome.out.find("file /");
    ASSERT_NE(begin, std::string::npos);
    const std::string path = outcome.out.substr(begin + 5, outcome.out.find('\n', begin) - begin - 5);
    EXPECT_THAT(outcome.out, HasSubstr(std::to_string(::geteuid()) + " 0\n"));
    EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(path).parent_path())) << path;
}

TEST(Faults, AnErrorThatAllRanksReportIsOneRootCause) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe(
        {"--nproc-per-node=2"},
        {"rank", "1", "report", "ValueError: boom 1", "once", directory.file("failed"), "hold", "end", "end",
         "await", directory.file("failed"), "sleep", "200", "report", "ValueError: boom 0", "exit", "1"}));
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("root cause: rank 0"), Not(HasSubstr("after all")),
                                   HasSubstr("first cause   rank 1")));
}

TEST(Faults, AnErrorReportedBecauseWeStoppedAWorkerIsNotTheCause) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe(
        {"--nproc-per-node=2"},
        {"rank", "1", "note", "15", "stopping", "once", directory.file("ready"), "noted", "15", "report",
         "interrupted", "exit", "9", "end", "end", "await", directory.file("ready"), "exit", "4"}));
    EXPECT_EQ(outcome.status, 4) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("first cause   rank 0"), Not(HasSubstr("interrupted"))));
}

TEST(Faults, TheRemedyIsReportedOnAHostWithoutLoopback) {
    if (run({"unshare", "-n", "true"}).status != 0) GTEST_SKIP() << "no network namespace can be made";
    std::vector<std::string> command{"unshare", "-n"};
    const std::vector<std::string> job = ddprun_probe({"--nproc-per-node=1"}, {"exit", "0"});
    command.insert(command.end(), job.begin(), job.end());
    const Outcome outcome = run(command);
    EXPECT_EQ(outcome.status, 69);
    EXPECT_THAT(outcome.err, HasSubstr("loopback interface is down: ip link set lo up"));
}

TEST(Faults, StrangersAtTheControllersPortDoNotDisturbTheJob) {
    const ReservedPort port;
    Program program(ddprun_probe(
        {"--nproc-per-node=2", "--prefix=", "--torch-store=on", "--master-port=" + port.number()},
        {"note", "10", "go", "say", "up ${rank}", "noted", "10", "say", "done"}));
    ASSERT_TRUE(program.wait_for_output("up 0") && program.wait_for_output("up 1"));
    std::vector<UniqueFd> strangers;
    for (const std::string& words : {std::string(), std::string("GET / HTTP/1.1\r\n\r\n"),
                                     std::string("\x7f", 1), std::string(100'000, '\xff')}) {
        Result<UniqueFd> stranger = connect_tcp(port.endpoint(), deadline_after(MonotonicClock::now(), 5s));
        ASSERT_TRUE(stranger) << stranger.error().what;
        (void)::send(stranger->get(), words.data(), words.size(), MSG_NOSIGNAL);
        strangers.push_back(std::move(*stranger));
    }
    program.signal(SIGUSR1);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "done"), 2);
}

TEST(Faults, ADirectoryThatIsGoneIsNoFault) {
    const std::string directory = TemporaryDirectory().path();
    const Outcome outcome =
        run({"bash", "-c", "mkdir \"$2\" && cd \"$2\" && rmdir \"$2\" && exec \"$0\" \"$1\" say here",
             path_of("DDPRUN"), path_of("PROBE"), directory});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("here"));
}

TEST(Faults, ATraceBelowADirectoryThatIsGoneIsRefused) {
    const std::string directory = TemporaryDirectory().path();
    const Outcome outcome =
        run({"bash", "-c", "mkdir \"$2\" && cd \"$2\" && rmdir \"$2\" && exec \"$0\" --trace t \"$1\"",
             path_of("DDPRUN"), path_of("PROBE"), directory});
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("--trace: the current directory: No such file or directory"));
}

TEST(Faults, ClosedStandardStreamsAreNoFault) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(
        {"bash", "-c",
         "\"$0\" --nproc-per-node=2 --log-dir=\"$2\" -r3 \"$1\" fds lines 100 <&- >&- 2>&-; echo \"status $?\"",
         path_of("DDPRUN"), path_of("PROBE"), directory.path()});
    EXPECT_EQ(outcome.out, "status 0\n");
    const auto files = log_files(directory.path());
    EXPECT_EQ(occurrences(files.at("attempt_0/1/stdout.log"), " line "), 100);
    EXPECT_THAT(files.at("attempt_0/1/stdout.log"), HasSubstr("fds: 0 1 2 250 251 252 253\n"));
}

TEST(Faults, HundredsOfRestartsLeakNothing) {
    // A leak of one descriptor, pipe or segment per restart would end the job long before.
    const Outcome outcome =
        run({"bash", "-c", "ulimit -n 300; exec \"$0\" --nproc-per-node=4 --max-restarts=200 \"$1\" exit 3",
             path_of("DDPRUN"), path_of("PROBE")});
    EXPECT_EQ(outcome.status, 3) << outcome.err.substr(outcome.err.size() > 2000 ? outcome.err.size() - 2000
                                                                                 : 0);
    EXPECT_THAT(outcome.err, HasSubstr("restart 200 of 200"));
}

TEST(Faults, AWorkerThatHasReportedItsErrorAndDoesNotExitIsKilledAfterTheFailureGraceAndIsTheCause) {
    for (const bool has_log_directory : {false, true}) {
        const TemporaryDirectory directory;
        std::vector<std::string> options{"--nproc-per-node=2", "--failure-grace=100ms"};
        if (has_log_directory) options.push_back("--log-dir=" + directory.path());
        const Outcome outcome =
            run(ddprun_probe(options, {"rank", "1", "report", "no such column", "end", "hold"}));
        EXPECT_EQ(outcome.status, 1) << outcome.err;
        EXPECT_THAT(
            outcome.err,
            HasSubstr("reported an error and has not exited 100 ms later (--failure-grace); killing it"));
        EXPECT_THAT(outcome.err, HasSubstr("root cause: rank 1"));
        EXPECT_THAT(outcome.err, HasSubstr("no such column"));
    }
}

TEST(Faults, AWorkerThatHasReportedItsErrorMayStillExitItself) {
    const Outcome outcome = run(ddprun_probe({"--nproc-per-node=1", "--failure-grace=60s"},
                                             {"report", "no such column", "sleep", "50", "exit", "7"}));
    EXPECT_EQ(outcome.status, 7) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("killing")));
}

}  // namespace
}  // namespace ddprun::test
