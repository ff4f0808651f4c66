#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>

#include "env/json.h"
#include "launcher/ends/explain.h"
#include "launcher/ends/report.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

using namespace std::chrono_literals;

using testing::HasSubstr;
using testing::Not;

WorkerEnd exited(int rank, int code, std::uint64_t order = 0) {
    WorkerEnd end;
    end.rank = end.local_rank = rank;
    end.host = "node00";
    end.pid = 4000 + rank;
    end.status = code;
    end.order = order;
    end.after_start_ns = Duration(std::chrono::seconds(41)).count();
    return end;
}

WorkerEnd killed(int rank, int signal, std::uint64_t order = 0) {
    WorkerEnd end = exited(rank, signal, order);
    end.signaled = true;
    return end;
}

WorkerEnd stopped(int rank) {
    WorkerEnd end = killed(rank, SIGTERM);
    end.by_us = true;
    return end;
}

JobEnd job(std::vector<WorkerEnd> workers) {
    JobEnd end;
    end.program = "train";
    end.world_size = static_cast<int>(workers.size());
    end.workers = std::move(workers);
    return end;
}

TEST(RootCause, IsTheEarliestFailureThatWeDidNotCause) {
    const JobEnd end = job({stopped(0), exited(1, 3, 9), killed(2, SIGKILL, 7), exited(3, 0, 1)});
    ASSERT_NE(root_cause(end.workers), nullptr);
    EXPECT_EQ(root_cause(end.workers)->rank, 2);
    EXPECT_EQ(root_cause(job({exited(0, 0), stopped(1)}).workers), nullptr);
}

/// A worker that ended `ended` after the job's begin and wrote its error report at `reported`.
WorkerEnd reporting(WorkerEnd end, std::chrono::milliseconds reported, std::chrono::milliseconds ended) {
    end.error_reported = TimePoint{} + reported;
    end.ended = TimePoint{} + ended;
    return end;
}

TEST(RootCause, IsTheOldestErrorReportHoweverLateItsWriterExits) {
    using std::chrono::milliseconds;
    const JobEnd end = job({reporting(exited(0, 1, 1), milliseconds(400), milliseconds(410)),
                            reporting(exited(1, 7, 2), milliseconds(100), milliseconds(700))});
    EXPECT_EQ(root_cause(end.workers)->rank, 1);
    EXPECT_EQ(exit_code(end), 7);
}

TEST(RootCause, IsTheCrashUnlessAReportIsClearlyOlder) {
    using std::chrono::milliseconds;
    WorkerEnd crash = killed(0, SIGSEGV, 1);
    crash.ended = TimePoint{} + milliseconds(500);
    EXPECT_EQ(
        root_cause(job({crash, reporting(exited(1, 1, 2), milliseconds(450), milliseconds(600))}).workers)
            ->rank,
        0);
    EXPECT_EQ(
        root_cause(job({crash, reporting(exited(1, 1, 2), milliseconds(350), milliseconds(600))}).workers)
            ->rank,
        1);
    crash.exec_failure = "exec ./trian: No such file or directory";
    EXPECT_EQ(
        root_cause(job({crash, reporting(exited(1, 1, 2), milliseconds(350), milliseconds(600))}).workers)
            ->rank,
        0);
}

TEST(ReportNote, SaysThatPbsEndsAJobWhoseLostHostComesBack) {
    JobEnd end = job({});
    end.lost_hosts = {"node02"};
    EXPECT_EQ(note_of_returned_host(end), "") << "nobody has ended it";
    end.stopped_by_signal = SIGTERM;
    EXPECT_EQ(
        note_of_returned_host(end),
        "node02 had been lost: PBS ends a job by SIGTERM when such a host comes back, and nothing tells that "
        "from a qdel");
    end.lost_hosts.clear();
    EXPECT_EQ(note_of_returned_host(end), "");
}

TEST(RootCause, CanBeAWorkerThatWeStoppedWhileItWasFailing) {
    using std::chrono::milliseconds;
    WorkerEnd failing = reporting(killed(1, SIGTERM, 2), milliseconds(100), milliseconds(600));
    failing.stopped_failing = true;
    WorkerEnd peer = exited(0, 4, 1);
    peer.ended = TimePoint{} + milliseconds(550);
    const JobEnd end = job({peer, failing});
    EXPECT_EQ(exit_code(end), 1) << "the signal was ours";
    EXPECT_THAT(render_report(end, 100),
                AllOf(HasSubstr("first cause   rank 1"), HasSubstr("reported an error, and was stopped")));
}

TEST(RootCause, IsNoWorkerThatFailedAfterWeHadDecidedOnAnotherCause) {
    using std::chrono::milliseconds;
    JobEnd end = job({reporting(exited(0, 1, 1), milliseconds(510), milliseconds(600)), exited(1, 1, 2)});
    end.workers[1].ended = TimePoint{} + milliseconds(700);
    end.failure = "rank 2 has been stopped";
    end.failure_decided = TimePoint{} + milliseconds(500);
    end.hung = true;
    EXPECT_EQ(root_cause(end), nullptr);
    EXPECT_EQ(exit_code(end), 124);
    end.workers.push_back(reporting(exited(2, 5, 3), milliseconds(400), milliseconds(800)));
    ASSERT_NE(root_cause(end), nullptr);
    EXPECT_EQ(root_cause(end)->rank, 2) << "its report is older than the decision";
    end.workers.pop_back();
    end.hung = false;
    EXPECT_EQ(exit_code(end), 69) << "a lost node, its peers' errors";
}

TEST(FailedAlike, IgnoresNumbersInTheErrors) {
    const auto reported = [](const char* text) {
        WorkerEnd end = exited(0, 1);
        end.error_file = text;
        return end;
    };
    EXPECT_TRUE(failed_alike(reported("rank 0: no shard 7\n at 0x7fa2"),
                             reported("rank 12: no shard 7\n at 0x1c04")));
    EXPECT_FALSE(failed_alike(reported("rank 0: no shard 7"), reported("rank 1: the disk is full")));
    EXPECT_FALSE(failed_alike(reported(""), reported(""))) << "who said nothing may have failed of anything";
}

TEST(ExplainEarlyEnd, NamesTheRanksThatHadEndedWellBeforeAPeerMissedThem) {
    using std::chrono::milliseconds;
    WorkerEnd missed = exited(2, 1, 3);
    missed.ended = TimePoint{} + milliseconds(500);
    missed.error_file = "rank 2: all_reduce #7: rank 0 (pid 4000) ended without taking part";
    WorkerEnd left = exited(0, 0, 1), later = exited(1, 0, 4), also = exited(3, 0, 2);
    left.ended = TimePoint{} + milliseconds(380);
    also.ended = TimePoint{} + milliseconds(450);
    EXPECT_EQ(explain_early_end(missed, job({left, later, missed}).workers),
              "rank 0 had ended with 0, 120 ms before: did it leave the training early?");
    EXPECT_EQ(
        explain_early_end(missed, job({left, missed, also}).workers),
        "ranks 0, 3 had ended with 0, the last of them 50 ms before: did they leave the training early?");
    EXPECT_EQ(explain_early_end(missed, job({stopped(0), later, missed}).workers), "");
    EXPECT_THAT(render_report(job({left, missed}), 200),
                HasSubstr("  before        rank 0 had ended with 0, 120 ms before"));
    missed.error_file = "ValueError: no shard 12";
    EXPECT_EQ(explain_early_end(missed, job({left, missed}).workers), "");
}

TEST(JobExitCode, IsThatOfTheRootCause) {
    EXPECT_EQ(exit_code(job({exited(0, 0), exited(1, 0)})), 0);
    EXPECT_EQ(exit_code(job({exited(0, 3)})), 3);
    EXPECT_EQ(exit_code(job({killed(0, SIGKILL)})), 137);
    EXPECT_EQ(exit_code(job({exited(0, 255)})), 255);
    EXPECT_EQ(exit_code(job({exited(0, 1, 5), exited(1, 2, 4)})), 2);
}

TEST(JobExitCode, SaysThatAProgramCouldNotBeExecuted) {
    WorkerEnd absent = exited(0, 1);
    absent.exec_failure = "exec ./trian: No such file or directory";
    absent.failed_at_exec = true;
    absent.start_errno = ENOENT;
    EXPECT_EQ(exit_code(job({absent})), 127);
    absent.exec_failure = "exec ./data: Permission denied";
    absent.start_errno = EACCES;
    EXPECT_EQ(exit_code(job({absent})), 126);
}

TEST(JobExitCode, IsTryAgainAfterASignalOrAPreemption) {
    JobEnd end = job({stopped(0), killed(1, SIGTERM, 1)});
    end.stopped_by_signal = SIGTERM;
    EXPECT_EQ(exit_code(end), 75) << "a worker that got the signal too is no culprit";
    end.workers = {exited(0, 0), exited(1, 0)};
    EXPECT_EQ(exit_code(end), 0) << "all had succeeded";
    end.workers = {stopped(0)};
    end.stopped_by_signal.reset();
    end.preempted = true;
    EXPECT_EQ(exit_code(end), 75);
    end.workers = {};
    EXPECT_EQ(exit_code(end), 75) << "stopped before any worker ran";
}

TEST(JobExitCode, DoNotRequeueOutweighsASignal) {
    JobEnd end = job({exited(0, 93)});
    EXPECT_EQ(exit_code(end), 93);
    end.stopped_by_signal = SIGTERM;
    EXPECT_EQ(exit_code(end), 93);
}

TEST(JobExitCode, IsUnavailableAfterARendezvousFailure) {
    JobEnd end = job({});
    end.failure = "1 of 2 nodes joined within 600 s";
    EXPECT_EQ(exit_code(end), 69);
    end.failure.clear();
    EXPECT_EQ(exit_code(end), 70) << "no worker, no failure, no success: a bug of ours";
}

TEST(DescribeEnd, NamesSignals) {
    EXPECT_EQ(describe_end(killed(0, SIGKILL)), "signal 9 (SIGKILL)");
    EXPECT_EQ(describe_end(killed(0, 50)), "signal 50");
    EXPECT_EQ(describe_end(exited(0, 3)), "exit code 3");
    EXPECT_EQ(signal_name(SIGUSR1), "SIGUSR1");
    EXPECT_EQ(signal_name(77), "signal 77");
}

#if __GLIBC_PREREQ(2, 32)
TEST(SignalNames, AreThoseOfGlibcForEverySignalWithAName) {
    for (int signal = 1; signal < SIGRTMIN; ++signal) {
        const char* abbreviation = ::sigabbrev_np(signal);
        if (abbreviation == nullptr) continue;
        EXPECT_EQ(signal_name(signal), std::string("SIG") + abbreviation);
        EXPECT_EQ(signal_from_name(abbreviation), signal);
    }
}
#endif

std::string meaning(WorkerEnd end, std::vector<std::string> stderr_lines = {}) {
    end.last_stderr = std::move(stderr_lines);
    return explain_end(end);
}

TEST(ExplainEnd, KnowsSignals) {
    EXPECT_THAT(meaning(killed(0, SIGKILL)), HasSubstr("out-of-memory killer"));
    EXPECT_THAT(meaning(killed(0, SIGBUS)), HasSubstr("/dev/shm is full"));
    EXPECT_THAT(meaning(killed(0, SIGSEGV)), HasSubstr("accessed memory"));
    EXPECT_THAT(meaning(killed(0, SIGILL)), HasSubstr("newer CPU"));
    EXPECT_THAT(meaning(killed(0, SIGTERM)), HasSubstr("walltime"));
    EXPECT_THAT(meaning(killed(0, SIGABRT)), HasSubstr("abort()"));
    EXPECT_THAT(meaning(killed(0, SIGSYS)), HasSubstr("container"));
}

TEST(ExplainEnd, ReadsTheLastLines) {
    EXPECT_EQ(
        meaning(
            exited(0, 127),
            {"./train: error while loading shared libraries: libnccl.so.2: cannot open shared object file"}),
        "the shared library libnccl.so.2 is not found on this node (LD_LIBRARY_PATH, or a module that is not loaded)");
    EXPECT_THAT(meaning(exited(0, 1), {"ModuleNotFoundError: No module named 'numpy'"}),
                HasSubstr("module numpy is not installed"));
    EXPECT_THAT(meaning(exited(0, 1), {"torch.OutOfMemoryError: CUDA out of memory. Tried"}),
                HasSubstr("GPU's memory is full"));
    EXPECT_THAT(meaning(exited(0, 1), {"EOFError: EOF when reading a line"}), HasSubstr("--stdin RANK"));
    EXPECT_THAT(
        meaning(exited(0, 1), {"RuntimeError: [pair.cc:537] Connection closed by peer [10.0.0.1]:27311"}),
        HasSubstr("Gloo lost a peer"));
    EXPECT_THAT(meaning(exited(0, 1), {"bind: Address already in use"}), HasSubstr("a port is taken"));
    EXPECT_THAT(
        meaning(killed(0, SIGABRT), {"[Rank 3] Watchdog caught collective operation timeout: WorkNCCL"}),
        HasSubstr("NCCL's watchdog"));
    EXPECT_THAT(
        meaning(killed(0, SIGABRT), {"ncclRemoteError: A call failed possibly due to a network error"}),
        HasSubstr("lost a peer"));
    EXPECT_THAT(
        meaning(killed(0, SIGABRT), {"terminate called after throwing an instance of 'std::runtime_error'"}),
        HasSubstr("exception was not caught"));
    EXPECT_THAT(
        meaning(killed(0, SIGABRT), {"terminate called after throwing an instance of 'std::bad_alloc'"}),
        HasSubstr("host's memory"));
    EXPECT_THAT(meaning(exited(0, 126), {"sh: ./x: /usr/bin/pyhton: bad interpreter: No such file"}),
                HasSubstr("#!"));
    EXPECT_THAT(meaning(exited(0, 1), {"/lib/libc.so.6: version `GLIBC_2.38' not found"}),
                HasSubstr("newer C library"));
}

TEST(ExplainEnd, IgnoresTheLastLinesAfterAKillFromOutside) {
    EXPECT_THAT(meaning(killed(0, SIGKILL), {"warning: Address already in use, trying another"}),
                HasSubstr("out-of-memory"));
}

TEST(ExplainEnd, KnowsExecFailuresAndExitCodes) {
    WorkerEnd end = exited(0, 1);
    end.exec_failure = "exec ./x: No such file or directory";
    end.failed_at_exec = true;
    end.start_errno = ENOENT;
    EXPECT_THAT(explain_end(end), HasSubstr("the interpreter in its first line (#!)"));
    end.exec_failure = "exec ./x: Exec format error";
    end.start_errno = ENOEXEC;
    EXPECT_THAT(explain_end(end), HasSubstr("another architecture"));
    EXPECT_THAT(meaning(exited(0, 139)), HasSubstr("ended by SIGSEGV"));
    EXPECT_THAT(meaning(exited(0, 93)), HasSubstr("not to be started again"));
}

TEST(ExplainEnd, IsEmptyWhenThereIsNothingToAdd) {
    EXPECT_EQ(meaning(exited(0, 1), {"some error"}), "");
    EXPECT_EQ(meaning(exited(0, 0), {"bind: Address already in use"}), "");
    EXPECT_EQ(meaning(stopped(0)), "");
}

TEST(Report, ShowsTheEndOfALongErrorReport) {
    WorkerEnd cause = exited(0, 1);
    cause.error_file = "Traceback:\n";
    for (int i = 1; i <= 100; ++i) cause.error_file += fmt::format("  line {}.\n", i);
    cause.error_file += "ValueError: no shard 12\n";
    const std::string text = render_report(job({cause}), 100);
    EXPECT_THAT(text,
                AllOf(HasSubstr("| Traceback:"), HasSubstr("line 9."), HasSubstr("... 62 lines left out"),
                      HasSubstr("line 72."), HasSubstr("| ValueError: no shard 12")));
    EXPECT_THAT(text, AllOf(Not(HasSubstr("line 10.")), Not(HasSubstr("line 71."))));
}

TEST(Report, IsEmptyAfterASuccess) { EXPECT_EQ(render_report(job({exited(0, 0)}), 100), ""); }

TEST(Report, NamesTheFirstCauseAndFoldsWhatWeStopped) {
    WorkerEnd cause = killed(5, SIGKILL, 1);
    cause.local_rank = 1;
    cause.last_stderr = {"step 812", "loss 0.3"};
    cause.last_collective = "in all_reduce #812 (25 MiB)";
    JobEnd end =
        job({stopped(0), stopped(1), stopped(2), cause, exited(6, 1, 2), exited(7, 1, 3), exited(4, 0)});
    end.world_size = 8;
    end.max_restarts = 3;
    end.restarts_used = 1;
    end.log_directory = "/logs/j";
    end.notes = {"2 processes could not be killed: 17, 18"};
    end.loss = {2048, "write /logs/3/stdout.log: No space left on device"};
    const std::string text = render_report(end, 100);
    EXPECT_THAT(text, HasSubstr("ddprun: train failed: rank 5 on node00: signal 9 (SIGKILL)\n"));
    EXPECT_THAT(text, HasSubstr("  first cause   rank 5 on node00 (local rank 1, pid 4005)\n"));
    EXPECT_THAT(text, HasSubstr("  how           signal 9 (SIGKILL), 41 s after start\n"));
    EXPECT_THAT(text, HasSubstr("  doing         in all_reduce #812 (25 MiB)\n"));
    EXPECT_THAT(text, HasSubstr("  last stderr   | step 812\n                | loss 0.3\n"));
    EXPECT_THAT(text, HasSubstr("  afterwards    ranks 6-7: exit code 1\n"));
    EXPECT_THAT(text, HasSubstr("  stopped by us 3 workers (ranks 0-2)\n"));
    EXPECT_THAT(text, HasSubstr("  succeeded     1 worker (rank 4)\n"));
    EXPECT_THAT(text, HasSubstr("1 of 3 restarts used"));
    EXPECT_THAT(text, HasSubstr("  note          2 processes could not be killed"));
    EXPECT_THAT(text, HasSubstr("  logs          /logs/j\n"));
    EXPECT_THAT(text,
                HasSubstr("  output lost   2 KiB (write /logs/3/stdout.log: No space left on device)\n"));
    EXPECT_THAT(text, HasSubstr("  exit code     137\n"));
    EXPECT_EQ(text.back(), '\n');
}

TEST(Report, NamesARankOnceThoughItsReplacementDiedToo) {
    const std::string one =
        render_report(job({killed(5, SIGKILL, 1), exited(2, 1, 2), exited(2, 1, 3)}), 100);
    EXPECT_THAT(one, HasSubstr("  afterwards    rank 2: exit code 1\n"));
    const std::string more =
        render_report(job({killed(0, SIGKILL, 1), exited(4, 1, 2), exited(2, 1, 3), exited(4, 1, 4)}), 100);
    EXPECT_THAT(more, HasSubstr("  afterwards    ranks 2, 4: exit code 1\n"));
}

TEST(ExplainPython, NamesThePythonThatLacksAModule) {
    WorkerEnd cause = exited(0, 1);
    const std::string how = "run by /usr/bin/python3, the first python3 in PATH";
    EXPECT_EQ(explain_python(cause, "train.py", how), "");
    cause.last_stderr = {"ModuleNotFoundError: No module named 'torch'"};
    EXPECT_EQ(explain_python(cause, "train.py", how), "train.py was " + how + " (PYTHON_EXEC names another)");
    EXPECT_EQ(explain_python(cause, "lightning", "found in PATH"), "") << "its first line names the Python";
}

TEST(Report, NamesWorkersThatDidNotHandleAPreemption) {
    WorkerEnd saved = exited(0, 0);
    saved.by_us = true;
    JobEnd end = job({saved, stopped(1)});
    end.preempted = true;
    EXPECT_THAT(
        render_report(end, std::nullopt),
        HasSubstr(
            "  not handled   SIGTERM ended 1 worker (rank 1): without a handler nothing is saved at a notice\n"));
    end.preempted = false;
    end.stopped_by_signal = SIGINT;
    EXPECT_THAT(render_report(end, std::nullopt), Not(HasSubstr("not handled"))) << "nobody asked it to save";
}

TEST(Report, ShowsAPrintedAndReportedExceptionOnce) {
    WorkerEnd cause = exited(1, 1);
    cause.error_file = "Traceback:\n  read()\nValueError: no shard 12\n";
    cause.last_stderr = {"Traceback:", "  read()", "[rank1]: ValueError: no shard 12"};
    EXPECT_THAT(render_report(job({cause}), 100),
                AllOf(HasSubstr("  error report  | Traceback:"), Not(HasSubstr("last stderr"))));
    cause.last_stderr.emplace_back("corrupted double-linked list");
    EXPECT_THAT(render_report(job({cause}), 100), HasSubstr("last stderr"));
}

TEST(Report, FoldsThousandsOfStoppedWorkersIntoOneLine) {
    std::vector<WorkerEnd> workers = {exited(0, 3, 1)};
    for (int rank = 1; rank < 4096; ++rank) workers.push_back(stopped(rank));
    const std::string text = render_report(job(workers), 100);
    EXPECT_THAT(text, HasSubstr("stopped by us 4095 workers (ranks 1-4095)\n"));
    EXPECT_LT(text.size(), 1000U);
}

TEST(Report, AWorkersControlCharactersDoNotReachTheTerminal) {
    WorkerEnd cause = exited(0, 1);
    cause.last_stderr = {"\x1b[2Jgone\r", std::string(5000, 'x')};
    const std::string text = render_report(job({cause}), 80);
    EXPECT_THAT(text, HasSubstr("| \\x1b[2Jgone\n"));
    EXPECT_EQ(text.find('\x1b'), std::string::npos);
    EXPECT_LT(text.size(), 3000U);
}

TEST(Report, EscapesTextFromOutsideThatATerminalObeysOrThatReordersALine) {
    WorkerEnd cause = exited(0, 1);
    cause.host = "h\x1b[1m";
    cause.error_file =
        "eight bits \x9b"
        "2J, C1 \xc2\x9b"
        "2J";
    cause.last_stderr = {
        "a \xe2\x80\xae"
        "b"};
    JobEnd end = job({cause});
    end.program = "./tr\x1b[31main\nddprun: all is well";
    end.notes = {"\xe2\x80\xa8note"};
    end.log_directory = "/logs/\x1b]0;title\x07";
    const std::string text = render_report(end, 200);
    EXPECT_THAT(text,
                HasSubstr("ddprun: ./tr\\x1b[31main\\nddprun: all is well failed: rank 0 on h\\x1b[1m"));
    EXPECT_THAT(text, HasSubstr("eight bits \\x9b2J, C1 \\u{9b}2J"));
    EXPECT_THAT(text, HasSubstr("a \\u{202e}b"));
    EXPECT_THAT(text, HasSubstr("\\u{2028}note"));
    EXPECT_EQ(text.find_first_of("\x1b\x07\x9b"), std::string::npos);
}

TEST(Report, WrapsItsRowsOnATerminalButNotTheHeadline) {
    WorkerEnd cause = killed(0, SIGKILL);
    JobEnd long_named = job({cause});
    long_named.program = "/home/user/a/long/way/to/" + std::string(80, 'p');
    const std::string text = render_report(long_named, 60);
    EXPECT_THAT(
        text, HasSubstr("ddprun: " + long_named.program + " failed: rank 0 on node00: signal 9 (SIGKILL)\n"));
    std::size_t start = text.find('\n') + 1;
    for (std::size_t end = 0; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
        EXPECT_LE(end - start, 60U) << text.substr(start, end - start);
    }
}

TEST(Report, IsOneLineForEachRowInAFile) {
    WorkerEnd cause = killed(0, SIGKILL);
    JobEnd end = job({cause});
    end.notes = {"a note of several words " + std::string(300, 'n') + " and its end"};
    const std::string text = render_report(end, std::nullopt);
    EXPECT_THAT(text, HasSubstr("  note          " + end.notes.front() + "\n"));
    EXPECT_THAT(text, Not(HasSubstr("\n                ")));
}

TEST(Report, SaysThatAJobWasStoppedOrPreempted) {
    JobEnd end = job({stopped(0)});
    end.stopped_by_signal = SIGINT;
    EXPECT_THAT(render_report(end, 80), HasSubstr("ddprun: train was stopped by SIGINT\n"));
    EXPECT_THAT(render_report(end, 80), HasSubstr("exit code     75 (can be started again)\n"));
    end.preempted = true;
    EXPECT_THAT(render_report(end, 80), HasSubstr("ddprun: train was preempted\n"));
    JobEnd failed = job({});
    failed.failure = "1 of 2 nodes joined within 600 s";
    EXPECT_THAT(render_report(failed, 80),
                HasSubstr("ddprun: train failed: 1 of 2 nodes joined within 600 s\n"));
}

TEST(Report, ShowsTheErrorReportOfTheRootCause) {
    WorkerEnd cause = exited(0, 1);
    cause.error_file = "ValueError: bad\n  at train.py:3\n";
    EXPECT_THAT(render_report(job({cause}), 80),
                HasSubstr("  error report  | ValueError: bad\n                |   at train.py:3\n"));
}

TEST(JsonReport, MatchesTheTable) {
    WorkerEnd cause = killed(1, SIGKILL, 4);
    cause.last_stderr = {"\xff not UTF-8"};
    const Json json = parse_json(render_report_json(job({stopped(0), cause}))).value_or(Json());
    EXPECT_EQ(json["exit_code"], 137);
    EXPECT_EQ(json["first_cause"]["rank"], 1);
    EXPECT_EQ(json["first_cause"]["signal"]["name"], "SIGKILL");
    EXPECT_THAT(json["first_cause"]["meaning"].get<std::string>(), HasSubstr("out-of-memory"));
    EXPECT_EQ(json["workers"].size(), 2U);
    EXPECT_EQ(json["workers"][0]["stopped_by_ddprun"], true);
    EXPECT_TRUE(json["stopped_by_signal"].is_null());
    const Json success = parse_json(render_report_json(job({exited(0, 0)}))).value_or(Json());
    EXPECT_EQ(success["exit_code"], 0);
    EXPECT_TRUE(success["first_cause"].is_null());
    EXPECT_TRUE(success["useful_seconds"].is_null());
}

TEST(JsonReport, HasTheRecoveriesAndTheTimeOfTheRankThatCommittedMost) {
    JobEnd end = job({exited(0, 0)});
    end.wall = 60s;
    end.time = {41'500ms, {.failures = 2s, .restarts = 8s}};
    end.recoveries = 3;
    const Json json = parse_json(render_report_json(end)).value_or(Json());
    EXPECT_EQ(json["recoveries"], 3);
    EXPECT_EQ(json["useful_seconds"], 41.5);
    EXPECT_EQ(json["lost_seconds"]["failures"], 2);
    EXPECT_EQ(json["lost_seconds"]["restarts"], 8);
    EXPECT_EQ(json["lost_seconds"]["rehearsals"], 0);
    EXPECT_EQ(json["lost_seconds"]["other"], 8.5) << "all adds up to the job's seconds";
}

TEST(UsefulTime, AddsUpStartsAndCountsStepsThatALaterStartRepeatsAsLostByTheRestart) {
    // Steps 0 to 1000 and 500 to 2000, then 1500 to 1800: the first two keep 500 and 1000 steps.
    const JobTime time = add_up({{1000, 1000, 10s}, {2000, 1500, 30s}, {1800, 300, 6s}}, {.failures = 1s});
    EXPECT_EQ(time.useful, 5s + 20s + 6s);
    EXPECT_EQ(time.lost.restarts, 5s + 10s);
    EXPECT_EQ(time.lost.failures, 1s);
}

TEST(UsefulTime, AStartFromTheBeginningKeepsNothingOfEarlierOnes) {
    const JobTime time = add_up({{1000, 1000, 10s}, {-1, 200, 2s}}, {});
    EXPECT_EQ(time.useful, 2s) << "a program that counts no steps has committed them since its start";
    EXPECT_EQ(time.lost.restarts, 10s);
}

TEST(UsefulTime, AStartThatCommitsNothingChangesNothing) {
    EXPECT_EQ(add_up({{1000, 1000, 10s}, {}}, {}).useful, 10s);
    EXPECT_FALSE(add_up({{}, {}}, {}).useful) << "no rank commits any step";
    CommittedTime most{812, 812, 2s};
    most.raise_to({811, 811, 60s});
    EXPECT_EQ(most.commits, 812);
    EXPECT_EQ(most.time, 60s) << "the first one's node is a spare";
    // Ten of the commits were evaluations. The second start goes on behind the last step of the first.
    EXPECT_EQ(add_up({{1000, 1010, 10s}, {1500, 500, 5s}}, {}).useful, 15s);
    EXPECT_EQ(add_up({{1000, 1010, 10s}}, {}).useful, 10s);
}

}  // namespace
}  // namespace ddprun
