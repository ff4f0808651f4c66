#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using nlohmann::json;

/// Runs `ddprun OPTIONS train ARGUMENTS` in a directory of its own.
class Train : public ::testing::Test {
  protected:
    std::vector<std::string> command(int workers, const std::vector<std::string>& arguments, std::vector<std::string> options = {}) {
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
    json log_of(const std::string& name) { return json::parse(std::ifstream(directory_.file(name))); }
    void write(const std::string& name, const std::string& content) { std::ofstream(directory_.file(name)) << content; }

    TemporaryDirectory directory_;
};

TEST_F(Train, FourWorkersReachNinetySevenPercentAndHoldTheSameParameters) {
    const Outcome outcome = run(command(4, {"--log-json", "log.json"}), here());
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_GE(log_of("log.json").at("held_out_accuracy").get<double>(), 0.97);
    EXPECT_THAT(outcome.out, HasSubstr("parameters are bitwise equal on 4 workers"));
    EXPECT_THAT(outcome.out, HasSubstr("learning rate 0.08 (0.02 x 4 workers"));
    EXPECT_LT(outcome.took, std::chrono::seconds(60));
}

TEST_F(Train, OneAndFourWorkersHaveTheSameLossCurveForTheSameEffectiveBatch) {
    const std::vector<std::string> common{"--epochs", "8", "--no-scale-lr", "--lr", "0.05", "--seed", "7"};
    const auto with = [&](const std::string& batch, const std::string& log) {
        std::vector<std::string> all = common;
        all.insert(all.end(), {"--batch-size", batch, "--log-json", log, "--checkpoint-dir", log + ".checkpoints"});
        return all;
    };
    ASSERT_EQ(run(command(1, with("64", "one")), here()).status, 0);
    ASSERT_EQ(run(command(4, with("16", "four")), here()).status, 0);
    const json one = log_of("one").at("epochs"), four = log_of("four").at("epochs");
    ASSERT_EQ(one.size(), 8u);
    ASSERT_EQ(four.size(), 8u);
    for (std::size_t epoch = 0; epoch < one.size(); ++epoch) {
        const double a = one[epoch].at("loss"), b = four[epoch].at("loss");
        EXPECT_NEAR(a, b, 1e-4 * std::abs(a)) << "epoch " << epoch;
    }
}

TEST_F(Train, TwoRunsOfTheSameSeedEndWithTheSameBits) {
    for (const char* name : {"first", "second"}) {
        ASSERT_EQ(run(command(3, {"--epochs", "3", "--log-json", name, "--checkpoint-dir", std::string(name) + ".checkpoints"}), here()).status, 0);
    }
    EXPECT_EQ(log_of("first").at("parameters_sha256"), log_of("second").at("parameters_sha256"));
}

TEST_F(Train, ResumesWhereItStopped) {
    const auto with = [](const std::string& epochs, const std::string& log, const std::string& checkpoints, bool resume) {
        std::vector<std::string> all{"--epochs", epochs, "--log-json", log, "--checkpoint-dir", checkpoints};
        if (resume) all.emplace_back("--resume");
        return all;
    };
    ASSERT_EQ(run(command(2, with("4", "whole", "a", false)), here()).status, 0);
    ASSERT_EQ(run(command(2, with("2", "half", "b", false)), here()).status, 0);
    ASSERT_EQ(run(command(2, with("4", "rest", "b", true)), here()).status, 0);
    EXPECT_EQ(log_of("whole").at("parameters_sha256"), log_of("rest").at("parameters_sha256"));
}

TEST_F(Train, AKilledRankEndsTheJobAtOnceAndTheReportSaysWhatItWasDoing) {
    Program program(command(4, {"--epochs", "100000", "--checkpoint-dir", "c"}), here());
    ASSERT_TRUE(program.wait_for_output("epoch"));
    const std::vector<pid_t> workers = children_named(program.pid(), "train");
    ASSERT_EQ(workers.size(), 4u);
    const auto killed = std::chrono::steady_clock::now();
    ::kill(workers[2], SIGKILL);
    const Outcome outcome = program.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(3));
    EXPECT_EQ(outcome.status, 128 + SIGKILL);
    EXPECT_THAT(outcome.err, HasSubstr("SIGKILL"));
}

TEST_F(Train, DataOfTheWrongKindIsRefusedInOneLine) {
    write("noise.csv", "1,2,three\n4,5,6\n");
    const Outcome outcome = run(command(2, {"--data", "noise.csv"}), here());
    EXPECT_EQ(outcome.status, 65) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("noise.csv"));
}

TEST_F(Train, AMissingFileIsNamed) {
    const Outcome outcome = run(command(2, {"--data", "nowhere.csv"}), here());
    EXPECT_EQ(outcome.status, 66) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("nowhere.csv"));
}

TEST_F(Train, ACheckpointOfAnotherModelIsRefusedAndKept) {
    ASSERT_EQ(run(command(2, {"--epochs", "1", "--hidden", "32", "--checkpoint-dir", "c"}), here()).status, 0);
    const Outcome outcome = run(command(2, {"--epochs", "2", "--hidden", "64", "--checkpoint-dir", "c", "--resume"}), here());
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("32"), HasSubstr("64")));
    EXPECT_EQ(run(command(2, {"--epochs", "2", "--hidden", "32", "--checkpoint-dir", "c", "--resume"}), here()).status, 0);
}

TEST_F(Train, AnOptionThatIsNoNumberIsAUsageError) {
    const Outcome outcome = run(command(2, {"--lr", "fast"}), here());
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err, HasSubstr("--lr: 'fast' is not a number"));
}

TEST_F(Train, AWorldSizeThatDisagreesIsRefusedByName) {
    // One worker is told that it is alone, the other that there are two.
    const std::string script = "[ \"$RANK\" = 1 ] && export WORLD_SIZE=1 RANK=0; exec \"$SUM\"";
    const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=2", "--no-python", "/bin/sh", "-c", script}, here());
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("WORLD_SIZE=1"));
    EXPECT_FALSE(outcome.timed_out);
}

TEST_F(Train, TheExamplesCheckThemselvesUnderTheLauncher) {
    for (const char* example : {"SUM", "REGRESSION"}) {
        const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=4", path_of(example)}, here());
        EXPECT_EQ(outcome.status, 0) << example << ": " << outcome.out << outcome.err;
    }
}

TEST_F(Train, SaysWhatToRaiseWhereTheLimitOnFileSizesLeavesNoRoomForSharedMemory) {
    const Outcome outcome = run({"/bin/bash", "-c", "ulimit -f 100; exec \"$0\" --nproc-per-node=2 train", path_of("DDPRUN")}, here());
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, HasSubstr("not enough for any group: raise the hard limit on file sizes (ulimit -Hf)"));
}

}  // namespace
}  // namespace ddprun::test
