// The workers' output arrives whole, once and in the place that was asked for; no log ever ends a job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "env/io/socket.h"
#include "tests/support/run_program.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

std::string probe_line(int rank, int number) {
    std::string text = "rank " + std::to_string(rank) + " line " + std::to_string(number) + " ";
    text.resize(99, 'x');
    return text;
}

/// All lines that `ranks` probes print with one of the acts lines, blocks, halves.
std::vector<std::string> all_lines(int ranks, int count) {
    std::vector<std::string> lines;
    for (int rank = 0; rank < ranks; ++rank) {
        for (int n = 0; n < count; ++n)
            lines.push_back("[" + std::to_string(rank) + "]: " + probe_line(rank, n));
    }
    std::sort(lines.begin(), lines.end());
    return lines;
}

// ---- whole lines

TEST(Logs, NoLineIsTornOrLostWhateverPiecesItIsWrittenIn) {
    for (const auto& [act, count] :
         std::vector<std::pair<std::string, int>>{{"lines", 4000}, {"blocks", 4000}, {"halves", 25}}) {
        const Outcome outcome = run(ddprun_probe({"--nproc-per-node=4"}, {act, std::to_string(count)}));
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_TRUE(sorted_lines(outcome.out) == all_lines(4, count))
            << act << ": " << sorted_lines(outcome.out).size() << " lines";
    }
}

TEST(Logs, TheLinesOfOneRankKeepTheirOrder) {
    const Outcome outcome =
        run(ddprun_probe({"--nproc-per-node=2", "--local-ranks-filter=1"}, {"blocks", "3000"}));
    std::string expected;
    for (int n = 0; n < 3000; ++n) expected += probe_line(1, n) + "\n";
    EXPECT_TRUE(outcome.out == expected);
}

TEST(Logs, AnOnlyRanksOutputReachesTheNextProgramInAPipeUnchanged) {
    const std::string record = R"({"loss": 0.25, "text": "[0]: "})";
    const auto piped = [&](const std::string& options) {
        return run({"bash", "-c", "\"$0\" " + options + " \"$1\" say \"$2\" | cat", path_of("DDPRUN"),
                    path_of("PROBE"), record})
            .out;
    };
    EXPECT_EQ(piped(""), record + "\n");
    EXPECT_EQ(piped("--nproc-per-node=2 --local-ranks-filter=1"), record + "\n");
    EXPECT_EQ(piped("--nproc-per-node=2 --prefix=none"), record + "\n" + record + "\n");
    EXPECT_EQ(piped("--nproc-per-node=1 '--log-line-prefix-template=${hostname}:'"),
              host_name() + ":" + record + "\n");
    EXPECT_THAT(piped("--nproc-per-node=2"),
                AllOf(HasSubstr("[0]: " + record + "\n"), HasSubstr("[1]: " + record + "\n")));
}

TEST(Logs, AFloodOfOneWorkerDoesNotDelayTheFailureOfAnother) {
    Program program(ddprun_probe({"--nproc-per-node=2"},
                                 {"rank", "1", "err", "gone", "exit", "9", "end", "lines", "100000000"}));
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 9);
    EXPECT_THAT(outcome.err, HasSubstr("[1]: gone"));
    EXPECT_LT(outcome.took, 10s);
}

TEST(Logs, AWorkerThatClosesItsOutputGoesOn) {
    const Outcome outcome =
        run(ddprun_probe({}, {"say", "last words", "closeout", "sleep", "100", "exit", "3"}));
    EXPECT_EQ(outcome.status, 3) << outcome.err;
    EXPECT_EQ(outcome.out, "last words\n");
}

TEST(Logs, AConsoleThatIsClosedDoesNotEndTheJob) {
    const TemporaryDirectory directory;
    // head takes one line and goes.
    const Outcome outcome =
        run({"bash", "-c", "\"$0\" --nproc-per-node=2 --log-dir=\"$2\" \"$1\" lines 2000; echo status $? >&2",
             path_of("DDPRUN"), path_of("PROBE"), directory.path()});
    EXPECT_THAT(outcome.err, HasSubstr("status 0"));
    const Outcome cut = run(
        {"bash", "-c",
         "{ \"$0\" --nproc-per-node=2 --log-dir=\"$2\" \"$1\" lines 20000; echo status $? >&2; } | head -n 1",
         path_of("DDPRUN"), path_of("PROBE"), directory.path()});
    EXPECT_THAT(cut.err, AllOf(HasSubstr("status 0"), HasSubstr("output is being lost")));
    EXPECT_EQ(occurrences(cut.err, "output is being lost"), 1);
}

/// True once the process has ended; false after `timeout`. Does not reap it, and reads nothing from it.
bool has_ended(pid_t pid, std::chrono::seconds timeout = 30s) {
    const auto until = std::chrono::steady_clock::now() + timeout;
    siginfo_t info{};
    while (std::chrono::steady_clock::now() < until) {
        if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
            info.si_pid == pid)
            return true;
        ::usleep(2000);
    }
    return false;
}

/// A job whose two outputs are one pipe that nobody reads before wait() is called.
std::vector<std::string> on_one_pipe(std::vector<std::string> command) {
    std::vector<std::string> words = {"/bin/sh", "-c", "exec \"$0\" \"$@\" 2>&1"};
    words.insert(words.end(), command.begin(), command.end());
    return words;
}

bool comes_to_hold(const std::string& path, const std::string& text) {
    for (const auto until = std::chrono::steady_clock::now() + 60s;
         std::chrono::steady_clock::now() < until;) {
        if (file_content(path).find(text) != std::string::npos) return true;
        ::usleep(2000);
    }
    return false;
}

TEST(Logs, LogLinesAndReportOnAJammedConsoleAreKeptBetweenWholeLines) {
    const TemporaryDirectory directory;
    const std::string events = directory.file("events");
    Program program(on_one_pipe(ddprun_probe({"--max-restarts=1", "--prefix=[${rank}]: ", "--events", events},
                                             {"lines", "3000", "exit", "3"})));
    ASSERT_TRUE(comes_to_hold(events, "\"finished\""));
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 3);
    int whole = 0;
    for (const std::string_view line : split(outcome.out, '\n')) {
        if (line.find("rank 0 line ") == std::string_view::npos) continue;
        EXPECT_TRUE(line.starts_with("[0]: rank 0 line ") && line.size() == 104) << line;
        ++whole;
    }
    EXPECT_EQ(whole, 6000);
    EXPECT_EQ(occurrences(outcome.out, "exited with code 3"), 2) << "one log line per attempt";
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("\n[0]: rank 0 line 2999"), Not(HasSubstr("could not be written"))));
}

TEST(Logs, ASignalEndsTheWaitForAReaderOfTheLastLines) {
    const TemporaryDirectory directory;
    const std::string events = directory.file("events");
    Program program(on_one_pipe(ddprun_probe({"--events", events}, {"lines", "3000", "exit", "3"})));
    ASSERT_TRUE(comes_to_hold(events, "\"finished\""));
    program.signal(SIGTERM);
    EXPECT_TRUE(has_ended(program.pid()));
    EXPECT_EQ(program.wait().status, 3) << "the job had ended before";
}

// ---- files

TEST(Logs, ARunIdThatIsTooLongForANameIsCut) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe(
        {"--log-dir", directory.path(), "--rdzv-id=" + std::string(300, 'i'), "-r", "1"}, {"say", "kept"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(log_files(directory.path()).at("attempt_0/0/stdout.log"), "kept\n");
}

TEST(Logs, TeeShowsAndKeepsRedirectOnlyKeeps) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe(
        {"--nproc-per-node=2", "--log-dir", directory.path(), "--rdzv-id=run7", "-r", "0:1", "-t", "1:1"},
        {"say", "hello"}));
    EXPECT_EQ(outcome.out, "[default1]:hello\n");
    const auto files = log_files(directory.path());
    EXPECT_EQ(files.at("attempt_0/0/stdout.log"), "hello\n");
    EXPECT_EQ(files.at("attempt_0/1/stdout.log"), "hello\n");
    EXPECT_EQ(files.count("attempt_0/1/stderr.log"), 0u) << "nobody asked for it";
    EXPECT_TRUE(std::filesystem::directory_iterator(directory.path())
                    ->path()
                    .filename()
                    .string()
                    .starts_with("run7_"));
}

TEST(Logs, LocalRanksFilterConcernsTheConsoleOnly) {
    const TemporaryDirectory directory;
    const Outcome outcome = run(ddprun_probe(
        {"--nproc-per-node=3", "--log-dir", directory.path(), "--tee=3", "--local-ranks-filter=0,2"},
        {"say", "hi"}));
    EXPECT_THAT(sorted_lines(outcome.out), ElementsAre("[default0]:hi", "[default2]:hi"));
    EXPECT_EQ(log_files(directory.path()).at("attempt_0/1/stdout.log"), "hi\n");
}

TEST(Logs, EveryAttemptHasADirectoryOfItsOwn) {
    const TemporaryDirectory directory;
    run(ddprun_probe({"--max-restarts=1", "--log-dir", directory.path(), "-r", "3"},
                     {"env", "TORCHELASTIC_RESTART_COUNT", "exit", "1"}));
    const auto files = log_files(directory.path());
    EXPECT_EQ(files.at("attempt_0/0/stdout.log"), "TORCHELASTIC_RESTART_COUNT=0\n");
    EXPECT_EQ(files.at("attempt_1/0/stdout.log"), "TORCHELASTIC_RESTART_COUNT=1\n");
}

// ---- no log ends a job

TEST(Logs, ALogDirectoryThatCannotBeMadeIsRefusedBeforeTheJobBegins) {
    const TemporaryDirectory directory;
    std::ofstream(directory.file("plain")) << "a file";
    std::vector<std::string> job =
        ddprun_probe({"--log-dir", directory.file("plain") + "/logs"}, {"say", "started"});
    const Outcome outcome = run(job);
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("--log-dir: " + directory.file("plain") + "/logs: " +
                                       directory.file("plain") + " is no directory (name another)"));
    job.insert(job.begin() + 1, "--dry-run");
    EXPECT_EQ(run(job).err, outcome.err);
}

TEST(Logs, AFullDiskIsReportedWhereWorkersWriteTheirFilesThemselves) {
    const SmallDisk disk("size=128k");
    if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=2", "--no-python", "--log-dir",
                                 disk.path(), "-r", "3", "sh", "-c", "seq 100000; exit 0"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.err, "output is being lost: write into " + disk.path()), 1) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("No space left on device"));
    for (const auto& entry : std::filesystem::recursive_directory_iterator(disk.path()))
        EXPECT_EQ(entry.path().string().find(".room"), std::string::npos) << entry.path();
}

TEST(Logs, AFullDiskIsReportedOnceAndCountedAndTheJobGoesOn) {
    const SmallDisk disk("size=128k");
    if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here";
    const Outcome outcome =
        run(ddprun_probe({"--log-dir", disk.path(), "-t", "3"}, {"lines", "8000", "exit", "5"}));
    EXPECT_EQ(outcome.status, 5);
    EXPECT_EQ(occurrences(outcome.out, " line "), 8000) << "the console has everything";
    EXPECT_EQ(occurrences(outcome.err, "output is being lost"), 1) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("No space left on device"), HasSubstr("output lost")));
}

TEST(Logs, ADiskThatTakesNoNewFilesCostsOnlyTheFiles) {
    for (const char* streams : {"-r3", "-t3"}) {
        const SmallDisk disk("nr_inodes=4");  // the root, the job, the attempt, and one more
        if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here";
        const Outcome outcome = run(ddprun_probe({"--nproc-per-node=2", "--log-dir", disk.path(), streams},
                                                 {"say", "out", "err", "cause", "exit", "5"}));
        EXPECT_EQ(outcome.status, 5) << outcome.err;
        EXPECT_EQ(occurrences(outcome.err, "output is being lost"), 1) << outcome.err;
        EXPECT_THAT(outcome.err, AllOf(HasSubstr("cause"), HasSubstr("output lost")));
    }
}

TEST(Logs, AFileSizeLimitCostsOnlyWhatIsBeyondIt) {
    const TemporaryDirectory directory;
    Program program(ddprun_probe({"--log-dir", directory.path()}, {"note", "10", "go", "say", "up", "noted",
                                                                   "10", "lines", "2000", "exit", "5"}));
    ASSERT_TRUE(program.wait_for_output("up\n"));
    const rlimit limit{16384, 16384};
    ASSERT_EQ(::prlimit(program.pid(), RLIMIT_FSIZE, &limit, nullptr), 0);
    program.signal(SIGUSR1);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 5) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, " line "), 2000);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("File too large"), HasSubstr("output lost")));
}

TEST(Logs, APipeInPlaceOfAnErrorReportDoesNotHoldUpTheJob) {
    const TemporaryDirectory directory;
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=1", "--no-python", "--log-dir", directory.path(), "bash",
             "-c", "rm -f \"$TORCHELASTIC_ERROR_FILE\"; mkfifo \"$TORCHELASTIC_ERROR_FILE\"; exit 3"});
    EXPECT_EQ(outcome.status, 3) << outcome.err;
}

}  // namespace
}  // namespace ddprun::test
