// examples/torch/gpt.cpp under ddprun, with a model of two small blocks, and beside gpt.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> command_of(int ranks, const std::vector<std::string>& program,
                                    const std::vector<std::string>& options) {
    std::vector<std::string> command{path_of("DDPRUN"), "--prefix=none",
                                     "--nproc-per-node=" + std::to_string(ranks)};
    command.insert(command.end(), program.begin(), program.end());
    command.push_back(path_of("SOURCE_ROOT") + "/LICENSE");
    std::istringstream small("--width 32 --layers 2 --context 32 --steps 20 --log-every 5 --sample 20");
    for (std::string word; small >> word;) command.push_back(word);
    command.insert(command.end(), options.begin(), options.end());
    return command;
}

RunOptions one_thread() { return with_environment({"OMP_NUM_THREADS=1"}); }

Outcome train(int ranks, const std::vector<std::string>& options) {
    const Outcome outcome = run(command_of(ranks, {path_of("TORCH_GPT")}, options), one_thread());
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    return outcome;
}

std::vector<double> losses_of(const Outcome& outcome) {
    std::vector<double> losses;
    const std::regex line("step [0-9]+: loss ([0-9.]+)");
    for (std::sregex_iterator one(outcome.out.begin(), outcome.out.end(), line), end; one != end; ++one)
        losses.push_back(std::stod((*one)[1]));
    return losses;
}

std::string weights_of(const Outcome& outcome) {
    std::smatch found;
    return std::regex_search(outcome.out, found, std::regex("sha256 ([0-9a-f]{64})"))
               ? found[1].str()
               : "no digest: " + outcome.out + outcome.err;
}

/// Expects as many losses, none further away than `most`.
void expect_near(const std::vector<double>& losses, const std::vector<double>& expected, double most) {
    ASSERT_EQ(losses.size(), expected.size());
    for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], most) << "line " << i;
}

TEST(TorchGpt, LossFalls) {
    const std::vector<double> losses = losses_of(train(2, {"--steps", "60", "--dropout", "0.1"}));
    ASSERT_EQ(losses.size(), 12U);
    EXPECT_GT(losses.front(), 5.2);
    EXPECT_LT(losses.back(), 4.4);
}

TEST(TorchGpt, RecomputedActivationsLeaveTheSameBits) {
    const auto weights = [](const char* recompute) {
        return weights_of(train(2, {"--recompute", recompute, "--dropout", "0.2", "--accumulate", "3"}));
    };
    EXPECT_EQ(weights("1"), weights("0"));
}

TEST(TorchGpt, DividedOptimizerLeavesTheSameBits) {
    const auto weights = [](const char* zero) { return weights_of(train(2, {"--zero", zero})); };
    EXPECT_EQ(weights("1"), weights("0"));
}

TEST(TorchGpt, TwoRanksLearnWhatOneRankLearnsFromTheirBatchesTogether) {
    const std::vector<double> one = losses_of(train(1, {"--batch", "8"}));
    expect_near(losses_of(train(2, {"--batch", "4"})), one, 1e-4);
    expect_near(losses_of(train(2, {"--batch", "4", "--accumulate", "2"})), one, 1e-4);
}

TEST(TorchGpt, KilledRunGoesOnFromItsCheckpointWithTheSameBits) {
    const std::vector<std::string> options{"--steps", "60", "--dropout", "0.1"};
    const std::string undisturbed = weights_of(train(2, options));
    const TemporaryDirectory directory;
    std::vector<std::string> saving = options;
    saving.insert(saving.end(), {"--checkpoints", directory.path(), "--save-every", "5"});
    Program first(command_of(2, {path_of("TORCH_GPT")}, saving), one_thread());
    ASSERT_TRUE(first.wait_for_output("step 10:"));
    for (const pid_t rank : children_named(first.pid(), "torch_gpt")) ::kill(rank, SIGKILL);
    first.wait();
    const Outcome second = train(2, saving);
    EXPECT_THAT(second.out, HasSubstr("goes on after step "));
    EXPECT_EQ(weights_of(second), undisturbed);
}

/// A Python with the LibTorch that the program is linked with.
TEST(TorchGpt, LossesAreThoseOfPyTorch) {
    const std::string python = "/usr/bin/python3";
    if (run({python, "-c", "import torch.distributed"}).status != 0)
        GTEST_SKIP() << python << " has no torch";
    const std::vector<std::string> options{"--dropout", "0.1", "--accumulate", "3", "--recompute", "1"};
    const Outcome theirs = run(
        command_of(2, {python, path_of("SOURCE_ROOT") + "/examples/torch/gpt.py"}, options), one_thread());
    EXPECT_EQ(theirs.status, 0) << theirs.err;
    expect_near(losses_of(train(2, options)), losses_of(theirs), 2e-6);
}

TEST(TorchGpt, NamesAWrongOption) {
    const auto error = [](std::vector<std::string> options) {
        options.insert(options.begin(), path_of("TORCH_GPT"));
        return run(options, one_thread()).err;
    };
    EXPECT_THAT(error({"--depth", "3"}), HasSubstr("gpt: --depth: unknown option; --help lists all"));
    EXPECT_THAT(error({"--steps", "many"}), HasSubstr("gpt: --steps: 'many' is not a value of this option"));
    EXPECT_THAT(error({"--batch", "0"}), HasSubstr("gpt: --batch 0: too small"));
    EXPECT_THAT(error({"--batch", "100000"}), HasSubstr("less than a batch: choose a smaller --batch"));
    const TemporaryDirectory empty;
    EXPECT_THAT(error({empty.file("none")}), HasSubstr(empty.file("none")));
}

}  // namespace
}  // namespace ddprun::test
