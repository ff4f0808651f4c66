#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>

#include "tests/support/comes.h"
#include "tests/support/curves.h"
#include "tests/support/json_file.h"
#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/small_disk.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Runs `ddprun OPTIONS train ARGUMENTS` in a directory of its own.
class Train : public ::testing::Test {
  protected:
    std::vector<std::string> command(int workers, const std::vector<std::string>& arguments,
                                     std::vector<std::string> options = {}) {
        std::vector<std::string> words{path_of("DDPRUN"), "--nproc-per-node=" + std::to_string(workers)};
        words.insert(words.end(), options.begin(), options.end());
        words.emplace_back("train");
        words.insert(words.end(), arguments.begin(), arguments.end());
        return words;
    }
    RunOptions here() {
        RunOptions options;
        options.directory = directory_.path();
        return options;
    }
    /// As here(), for ranks that end as soon as they get SIGTERM: LeakSanitizer stops such a process by
    /// ptrace, and waits for ever where the SIGCONT that ddprun sends too continues it.
    RunOptions here_to_be_stopped() {
        RunOptions options = here();
        options.environment = {without_leak_check()};
        return options;
    }
    Json log_of(const std::string& name) { return json_file(directory_.file(name)); }
    void write(const std::string& name, const std::string& content) {
        std::ofstream(directory_.file(name)) << content;
    }
    std::set<std::filesystem::path> files_in(const std::string& name) {
        std::error_code absent;
        std::set<std::filesystem::path> files;
        for (const auto& entry : std::filesystem::directory_iterator(directory_.file(name), absent))
            files.insert(entry.path());
        return files;
    }

    TemporaryDirectory directory_;
};

TEST_F(Train, FourWorkersReachNinetySevenPercentAndHoldTheSameParameters) {
    const Outcome outcome = run(command(4, {"--log-json", "log.json"}), here());
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_GE(log_of("log.json")["held_out_accuracy"].get<double>(), 0.97);
    EXPECT_THAT(outcome.out, HasSubstr("parameters are bitwise equal on 4 workers"));
    EXPECT_THAT(outcome.out, HasSubstr("learning rate 0.08 (0.02 x 4 workers"));
    EXPECT_LT(outcome.took, std::chrono::seconds(60));
}

TEST_F(Train, TwoNodesOfDifferentSizeEndWithTheSameParametersInEveryRun) {
    RunOptions options = here();
    options.environment.push_back("DDPRUN_TOKEN=secret of the job");
    for (const char* name : {"first", "second"}) {
        const ReservedPort port;
        const auto node = [&](int rank) {
            return std::make_unique<Program>(
                command(1 + rank,
                        {"--epochs", "3", "--log-json", name, "--checkpoint-dir",
                         std::string(name) + ".checkpoints"},
                        {"--nnodes=2", "--node-rank=" + std::to_string(rank), "--master-addr=127.0.0.1",
                         "--master-port=" + port.number()}),
                options);
        };
        const std::unique_ptr<Program> head = node(0), other = node(1);
        const Outcome zero = head->wait(), one = other->wait();
        ASSERT_EQ(zero.status, 0) << zero.err;
        ASSERT_EQ(one.status, 0) << one.err;
        EXPECT_THAT(zero.out, AllOf(HasSubstr("3 workers over cpu (shared memory in nodes, libfabric "),
                                    HasSubstr("parameters are bitwise equal on 3 workers")));
    }
    EXPECT_EQ(log_of("first")["parameters_sha256"], log_of("second")["parameters_sha256"]);
}

TEST_F(Train, ResumesWhereItStopped) {
    const auto with = [](const std::string& epochs, const std::string& log, const std::string& checkpoints,
                         bool resume) {
        std::vector<std::string> all{"--epochs", epochs, "--log-json", log, "--checkpoint-dir", checkpoints};
        if (resume) all.emplace_back("--resume");
        return all;
    };
    ASSERT_EQ(run(command(2, with("4", "whole", "a", false)), here()).status, 0);
    ASSERT_EQ(run(command(2, with("2", "half", "b", false)), here()).status, 0);
    ASSERT_EQ(run(command(2, with("4", "rest", "b", true)), here()).status, 0);
    EXPECT_EQ(log_of("whole")["parameters_sha256"], log_of("rest")["parameters_sha256"]);
}

/// Under PBS and Slurm the scheduler's SIGTERM reaches each worker 10 to 20 ms before or after ddprun's.
TEST_F(Train, SavesWhenASchedulerSignalsWorkersAndDdprunAlike) {
    for (const bool are_workers_first : {true, false}) {
        const std::string checkpoints = are_workers_first ? "workers-first" : "ddprun-first";
        Program program(
            command(2, {"--epochs=100000", "--checkpoint-every=100000", "--checkpoint-dir", checkpoints}),
            here());
        ASSERT_TRUE(program.wait_for_output("loss"));
        const std::vector<pid_t> workers = children_named(program.pid(), "train");
        ASSERT_EQ(workers.size(), 2u);
        const auto signal_workers = [&] {
            std::ranges::for_each(workers, [](pid_t pid) { ::kill(pid, SIGTERM); });
        };
        if (are_workers_first) signal_workers();
        program.signal(SIGTERM);
        signal_workers();
        const Outcome outcome = program.wait();
        EXPECT_EQ(outcome.status, 75) << outcome.err;
        EXPECT_THAT(outcome.out, HasSubstr("asked to stop in epoch")) << outcome.err;
        EXPECT_FALSE(files_in(checkpoints).empty());
    }
}

TEST_F(Train, ASigtermToOneWorkerIsNoSuccess) {
    Program program(command(2, {"--epochs=100000", "--checkpoint-every=100000"}, {"--report=report.json"}),
                    here());
    ASSERT_TRUE(program.wait_for_output("loss"));
    const std::vector<pid_t> workers = children_named(program.pid(), "train");
    ASSERT_EQ(workers.size(), 2u);
    ::kill(workers.back(), SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("asked to stop in epoch"));
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("train stopped before its end: rank "),
                                   HasSubstr("it was asked to stop before its end")));
    EXPECT_EQ(log_of("report.json")["exit_code"], 75);
}

TEST_F(Train, ARankThatDiesWhileTheJobStopsCostsNoCheckpoint) {
    RunOptions options = here();
    options.environment.push_back("DDPRUN_TOKEN=secret of the job");
    const ReservedPort port;
    const auto node = [&](int rank) {
        return std::make_unique<Program>(
            command(2, {"--epochs=100000", "--checkpoint-every=100000", "--checkpoint-dir=saved"},
                    {"--nnodes=2", "--node-rank=" + std::to_string(rank), "--master-addr=127.0.0.1",
                     "--master-port=" + port.number()}),
            options);
    };
    const std::unique_ptr<Program> head = node(0), other = node(1);
    ASSERT_TRUE(head->wait_for_output("loss"));
    const std::vector<pid_t> workers = children_named(other->pid(), "train");
    ASSERT_EQ(workers.size(), 2u);
    head->signal(SIGTERM);
    ::kill(workers.front(), SIGKILL);  // the one that would tell the other node
    const Outcome zero = head->wait(), one = other->wait();
    EXPECT_EQ(zero.status, 75) << zero.err;
    EXPECT_LT(zero.took, std::chrono::seconds(25)) << "the grace is 30 s" << zero.err << one.err;
    EXPECT_THAT(zero.out, HasSubstr("asked to stop in epoch")) << zero.err;
    EXPECT_FALSE(files_in("saved").empty());
}

/// True when the process has a handler of SIGTERM.
bool handles_term(pid_t pid) {
    const std::string status = file_content("/proc/" + std::to_string(pid) + "/status"), key = "SigCgt:";
    const std::size_t at = status.find(key);
    return at != status.npos &&
           (std::stoull(status.substr(at + key.size()), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
}

TEST_F(Train, ASigtermEndsRanksThatWaitForOneThatHasNotStarted) {
    Program program({path_of("DDPRUN"), "--nproc-per-node=2", "sh", "-c",
                     "test $RANK = 1 && exec sleep 100; exec " + path_of("TRAIN")},
                    here_to_be_stopped());
    const auto waits = [&] {
        const std::vector<pid_t> workers = children_named(program.pid(), "train");
        return workers.size() == 1 && handles_term(workers.front());
    };
    ASSERT_TRUE(comes(waits, std::chrono::seconds(60)));
    program.signal(SIGTERM);
    const Outcome outcome = program.wait();
    EXPECT_EQ(outcome.status, 75) << outcome.err;
    EXPECT_THAT(outcome.err, Not(HasSubstr("still running; SIGKILL in")));
}

TEST_F(Train, AKilledRankEndsTheJobAtOnceAndTheReportHasItsLastCollective) {
    Program program(command(4, {"--epochs", "100000", "--checkpoint-dir", "c"}, {"--recover=restart"}),
                    here());
    ASSERT_TRUE(program.wait_for_output("epoch"));
    const std::vector<pid_t> workers = children_named(program.pid(), "train");
    ASSERT_EQ(workers.size(), 4u);
    const auto killed = std::chrono::steady_clock::now();
    ::kill(workers[2], SIGKILL);
    const Outcome outcome = program.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(15));
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_THAT(outcome.err, HasSubstr("SIGKILL"));
}

TEST_F(Train, DataOfTheWrongKindIsRefusedInOneLine) {
    write("noise.csv", "1,two,three\n4,5,6\n");
    const Outcome outcome = run(command(2, {"--data", "noise.csv"}), here());
    EXPECT_EQ(outcome.status, 65) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("noise.csv"), Not(HasSubstr("in place"))));
}

TEST_F(Train, ADataFilesControlCharactersDoNotReachTheTerminal) {
    write("noise.csv",
          "1,\x1b[2J\xc2\x9b"
          "2J,2\n4,5,6\n");
    const Outcome outcome = run(command(2, {"--data", "noise.csv"}), here());
    EXPECT_EQ(outcome.status, 65) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("\\x1b[2J"), Not(HasSubstr("\x1b")), Not(HasSubstr("\xc2\x9b"))));
}

TEST_F(Train, GradientsThatAreNoNumbersEndTheJobWithARemedy) {
    const Outcome diverged = run(command(2, {"--epochs=3", "--lr=1e30"}), here());
    EXPECT_EQ(diverged.status, 1) << diverged.err;
    EXPECT_THAT(diverged.err, HasSubstr("training has diverged; try a lower --lr"));
    const Outcome clipped = run(command(2, {"--epochs=3", "--lr=1e30", "--clip=1e30"}), here());
    EXPECT_EQ(clipped.status, 1) << clipped.err;
    EXPECT_THAT(clipped.err, HasSubstr("the norm of the gradients is "));
}

TEST_F(Train, AMissingFileIsNamed) {
    const Outcome outcome = run(command(2, {"--data", "nowhere.csv"}), here());
    EXPECT_EQ(outcome.status, 66) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("nowhere.csv"));
}

TEST_F(Train, ACheckpointOfAnotherModelIsRefusedAndKept) {
    ASSERT_EQ(run(command(2, {"--epochs", "1", "--hidden", "32", "--checkpoint-dir", "c"}), here()).status,
              0);
    const Outcome outcome =
        run(command(2, {"--epochs", "2", "--hidden", "64", "--checkpoint-dir", "c", "--resume"}), here());
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("32"), HasSubstr("64")));
    EXPECT_EQ(
        run(command(2, {"--epochs", "2", "--hidden", "32", "--checkpoint-dir", "c", "--resume"}), here())
            .status,
        0);
}

TEST_F(Train, ASecondRunInADirectoryOfCheckpointsEndsAtItsStartAndNamesTheFirst) {
    Program first(command(2, {"--epochs", "100000", "--checkpoint-dir", "c"}, {"--rdzv-id=first"}), here());
    ASSERT_TRUE(comes([&] { return std::filesystem::exists(directory_.file("c/latest")); }));
    const Outcome second = run(command(2, {"--checkpoint-dir", "c"}), here());
    EXPECT_EQ(second.status, 73) << second.err;
    EXPECT_THAT(second.err,
                AllOf(HasSubstr("train: --checkpoint-dir: checkpoint c: another run (job first on "),
                      HasSubstr(") saves here: give each run its own directory")));
    EXPECT_THAT(second.out, Not(HasSubstr("epoch 1")));
    first.signal(SIGTERM);
    const Outcome stopped = first.wait();
    EXPECT_EQ(stopped.status, 75) << stopped.err;
    EXPECT_THAT(stopped.out, HasSubstr("train: asked to stop in epoch "));
    EXPECT_FALSE(std::filesystem::exists(directory_.file("c/.writer")));
}

TEST_F(Train, ARankWithOtherOptionsKeepsTheJobFromBeginning) {
    const std::string script = "[ \"$RANK\" = 1 ] && set -- --lr=0.5 \"$@\"; exec \"$TRAIN\" \"$@\"";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=2", "--no-python", "/bin/sh", "-c",
                                 script, "train", "--epochs=2", "--checkpoint-dir=c"},
                                here());
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("--lr is 0.5 on rank 1, 0.02 on rank 0"));
    EXPECT_FALSE(std::filesystem::exists(directory_.file("c/latest")))
        << "a checkpoint of a job that never began";
}

TEST_F(Train, AWorldSizeThatDisagreesIsRefusedByName) {
    // One worker is told that it is alone, the other that there are two.
    const std::string script = "[ \"$RANK\" = 1 ] && export WORLD_SIZE=1 RANK=0; exec \"$SUM_OF_RANKS\"";
    const Outcome outcome =
        run({path_of("DDPRUN"), "--nproc-per-node=2", "--no-python", "/bin/sh", "-c", script}, here());
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("WORLD_SIZE=1"));
    EXPECT_FALSE(outcome.timed_out);
}

TEST_F(Train, AFullDiskAtACheckpointEndsWithTheDocumentedCode) {
    const SmallDisk disk("size=64k");
    if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here";
    const Outcome outcome = run(command(2, {"--epochs=1", "--checkpoint-dir=" + disk.path()}), here());
    EXPECT_EQ(outcome.status, 73) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("No space left on device"), HasSubstr(disk.path()),
                                   Not(HasSubstr("go on in place"))));
}

TEST_F(Train, ARunThatIsKilledInsideARecordAndRestartedTwiceIsOneCurve) {
    Program job(
        command(1, {"--epochs=200", "--checkpoint-every=10", "--tensorboard=curves"}, {"--max-restarts=2"}),
        here());
    std::set<std::filesystem::path> files;
    for (const std::size_t restarts : {0U, 1U}) {
        ASSERT_TRUE(comes([&] {
            files = files_in("curves");
            return files.size() == restarts + 1 && std::filesystem::file_size(*files.rbegin()) > 20000;
        }));
        const pid_t worker = children_named(job.pid(), "train").at(0);
        ::kill(worker, SIGKILL);
        ASSERT_TRUE(comes([&] { return ::kill(worker, 0) != 0; }));
        std::filesystem::resize_file(*files.rbegin(), std::filesystem::file_size(*files.rbegin()) / 2 + 1);
    }
    const Outcome outcome = job.wait();
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const Curves curves = read_curves(directory_.file("curves"));
    EXPECT_EQ(curves.files.size(), 3U);
    const std::vector<std::uint64_t> steps = curves.steps("step/loss");
    ASSERT_FALSE(steps.empty());
    for (std::size_t i = 1; i < steps.size(); ++i) ASSERT_LT(steps[i - 1], steps[i]);
    EXPECT_EQ(steps.back(), 200U * 101);
    EXPECT_EQ(curves.steps("epoch/held_out_accuracy").back(), steps.back());
    EXPECT_GT(curves.points.at("epoch/held_out_accuracy").back().second, 0.95);
    EXPECT_NEAR(curves.points.at("step/learning_rate").back().second, 0.02, 1e-6);
    EXPECT_GT(curves.points.at("step/samples_per_second").back().second, 0);
}

TEST_F(Train, CurvesThatFindTheDiskFullCostOneLineAndNotTheTraining) {
    const SmallDisk disk("size=16k");
    if (!disk.mounted()) GTEST_SKIP() << "a tmpfs cannot be mounted here";
    const Outcome outcome = run(command(2, {"--epochs=20", "--tensorboard=" + disk.path()}), here());
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(occurrences(outcome.out, "--tensorboard"), 1) << outcome.out;
    EXPECT_THAT(outcome.out, HasSubstr("points are lost, the training goes on"));
}

TEST_F(Train, ADirectoryForCurvesThatIsAFileIsRefusedBeforeTheTraining) {
    write("notes", "text");
    const Outcome outcome = run(command(2, {"--tensorboard=notes"}), here());
    EXPECT_EQ(outcome.status, 73) << outcome.err;
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("--tensorboard: notes: Not a directory"), Not(HasSubstr("go on in place"))));
}

TEST_F(Train, AnOutputThatCannotBeWrittenEndsAllRanksAtOnce) {
    write("file", "");
    for (const char* option : {"--checkpoint-dir", "--tensorboard"}) {
        for (int round = 0; round < 4; ++round) {
            const Outcome outcome = run(command(4, {option, "file/below"}), here_to_be_stopped());
            EXPECT_EQ(outcome.status, 73) << outcome.err;
            EXPECT_THAT(outcome.err,
                        HasSubstr(std::string("train: rank 0: ") + option + ": file/below: Not a directory"));
            EXPECT_LT(outcome.took, std::chrono::seconds(5))
                << "a rank waited for a signal that it had caught";
        }
    }
}

TEST_F(Train, ALimitOnAddressSpaceThatIsTooSmallForOpenBlasIsReported) {
    if (std::getenv("SANITIZED") != nullptr) GTEST_SKIP() << "a sanitizer needs terabytes of address space";
    for (const char* limit : {"-v 150000", "-d 100000"}) {
        const std::string script = std::string("ulimit ") + limit + "; exec \"$0\" --nproc-per-node=2 train";
        const Outcome outcome = run({"/bin/bash", "-c", script, path_of("DDPRUN")}, here());
        EXPECT_FALSE(outcome.timed_out) << limit;
        EXPECT_EQ(outcome.status, 69) << limit << ": " << outcome.err;
        EXPECT_THAT(outcome.err,
                    HasSubstr(std::string("ulimit ") + std::string(limit).substr(0, 2) + " allows"))
            << outcome.err;
    }
}

TEST_F(Train, NamesTheLimitOnFileSizesThatLeavesNoRoomForSharedMemory) {
    const Outcome outcome =
        run({"/bin/bash", "-c", "ulimit -f 100; exec \"$0\" --nproc-per-node=2 train", path_of("DDPRUN")},
            here());
    EXPECT_EQ(outcome.status, 64) << outcome.err;
    EXPECT_THAT(outcome.err,
                HasSubstr("not enough for any group: raise the hard limit on file sizes (ulimit -Hf)"));
}

}  // namespace
}  // namespace ddprun::test
