// Programs of LibTorch under ddprun, beside the same training in PyTorch; and what docs/libtorch.md says of
// the examples.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string content_of(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// Runs the program on so many ranks.
Outcome run_ranks(int ranks, std::vector<std::string> program, const std::vector<std::string>& options = {},
                  std::vector<std::string> environment = {}) {
    std::vector<std::string> command{path_of("DDPRUN"), "--prefix=none",
                                     "--nproc-per-node=" + std::to_string(ranks)};
    command.insert(command.end(), options.begin(), options.end());
    command.insert(command.end(), program.begin(), program.end());
    return run(command, with_environment(std::move(environment)));
}

/// A Python with PyTorch: that of Debian's packages, whose LibTorch these programs are linked with, or that
/// in PYTHON_EXEC; "" without one.
std::string python_with_torch() {
    const char* const chosen = std::getenv("PYTHON_EXEC");
    for (const std::string& python :
         {std::string("/usr/bin/python3"), std::string(chosen != nullptr ? chosen : "")}) {
        if (!python.empty() && run({python, "-c", "import torch.distributed"}).status == 0) return python;
    }
    return "";
}

/// The loss of each step on one rank. A step that was done again has two lines, and the last one counts.
std::map<std::string, std::string> losses_in(const std::string& directory, int rank) {
    std::ifstream file(directory + "/losses." + std::to_string(rank));
    std::map<std::string, std::string> losses;
    for (std::string step, loss; file >> step >> loss;) losses[step] = loss;
    return losses;
}

TEST(TorchRanks, LossesAndCheckpointsAreThoseOfPyTorch) {
    const std::string python = python_with_torch();
    if (python.empty()) GTEST_SKIP() << "/usr/bin/python3 has no torch (PYTHON_EXEC names another)";
    for (const int ranks : {1, 2, 4}) {
        const TemporaryDirectory place;
        const Outcome trained = run_ranks(ranks, {path_of("TORCH_RANKS"), place.path(), "resume"});
        ASSERT_EQ(trained.status, 0) << trained.err;
        const Outcome same =
            run_ranks(ranks, {path_of("SOURCE_ROOT") + "/tests/torch/torch_ranks.py", place.path()}, {},
                      {"PYTHON_EXEC=" + python});
        EXPECT_EQ(same.status, 0) << ranks << " ranks: " << same.out << same.err;
        EXPECT_THAT(same.out, AllOf(HasSubstr("losses differ by"), HasSubstr("checkpoint: differs by")));
    }
}

TEST(TorchRanks, AKilledRankChangesNoLoss) {
    const TemporaryDirectory undisturbed;
    ASSERT_EQ(run_ranks(2, {path_of("TORCH_RANKS"), undisturbed.path()}).status, 0);
    const auto expected = losses_in(undisturbed.path(), 0);
    EXPECT_EQ(expected.size(), 200U);

    const TemporaryDirectory resumed;
    const Outcome restarted = run_ranks(2, {path_of("TORCH_RANKS"), resumed.path(), "resume", "120"},
                                        {"--recover=restart", "--max-restarts=1"});
    EXPECT_EQ(restarted.status, 0) << restarted.err;
    EXPECT_THAT(restarted.err, HasSubstr("restart 1 of 1"));
    EXPECT_EQ(losses_in(resumed.path(), 0), expected);

    const TemporaryDirectory recovered;
    const Outcome in_place = run_ranks(2, {path_of("TORCH_RANKS"), recovered.path(), "recover", "120"});
    EXPECT_EQ(in_place.status, 0) << in_place.err;
    EXPECT_THAT(in_place.err, HasSubstr("rank 1 is back, at step 120"));
    EXPECT_EQ(losses_in(recovered.path(), 0), expected);
    EXPECT_EQ(losses_in(recovered.path(), 1), losses_in(undisturbed.path(), 1));
}

TEST(TorchExamples, TrainOnTwoRanksAndCheckThemselves) {
    const Outcome mnist =
        run_ranks(2, {path_of("TORCH_MNIST"), path_of("SOURCE_ROOT") + "/workers/train/data"});
    EXPECT_EQ(mnist.status, 0) << mnist.err;
    EXPECT_THAT(mnist.out, HasSubstr("% of the digits held out are right"));
    const Outcome unet = run_ranks(2, {path_of("TORCH_UNET")});
    EXPECT_EQ(unet.status, 0) << unet.err;
    EXPECT_THAT(unet.out, HasSubstr("% of the pixels are right"));
}

TEST(TorchExamples, MnistRecoversTwiceAndReadsAsManyDigits) {
    const std::vector<std::string> program{path_of("TORCH_MNIST_RECOVER"),
                                           path_of("SOURCE_ROOT") + "/workers/train/data"};
    const Outcome undisturbed = run_ranks(2, program);
    EXPECT_EQ(undisturbed.status, 0) << undisturbed.err;
    const Outcome rehearsed = run_ranks(2, program, {"--rehearse=50"}, {"DDP_CHECK_RECOVERY=1"});
    EXPECT_EQ(rehearsed.status, 0) << rehearsed.err;
    EXPECT_THAT(rehearsed.err, HasSubstr("all ranks let go and met again"));
    EXPECT_EQ(rehearsed.out, undisturbed.out);
}

TEST(TorchPage, ChangesTheProgramOfOneProcessIntoTheExamples) {
    const std::string page = content_of(path_of("SOURCE_ROOT") + "/docs/libtorch.md");
    const std::string examples = path_of("SOURCE_ROOT") + "/examples/torch/";
    std::size_t at = 0;
    for (const auto& [from, to, most] :
         {std::tuple{"single.cpp", "mnist.cpp", 8}, {"mnist.cpp", "mnist_recover.cpp", 12}}) {
        const std::string fence = "```diff\n";
        const std::size_t begin = page.find(fence, at) + fence.size();
        at = page.find("```", begin);
        const TemporaryDirectory place;
        std::ofstream(place.file("change")) << page.substr(begin, at - begin);
        const Outcome patched =
            run({"patch", "--fuzz=0", "-o", place.file(to), examples + from, place.file("change")});
        EXPECT_EQ(patched.status, 0) << patched.out << patched.err;
        EXPECT_EQ(content_of(place.file(to)), content_of(examples + to));
        const Outcome added = run({"grep", "-c", "^+[^+]", place.file("change")});
        EXPECT_LE(std::stoi(added.out), most) << to;
    }
}

TEST(TorchHeader, RefusesTheOldStrings) {
    const TemporaryDirectory place;
    std::ofstream(place.file("old.cpp")) << "#include \"ddp/torch.h\"\n";
    const Outcome outcome =
        run({path_of("CXX"), "-std=c++20", "-E", "-Wfatal-errors", "-D_GLIBCXX_USE_CXX11_ABI=0", "-o",
             "/dev/null", "-I" + path_of("SOURCE_ROOT") + "/workers", place.file("old.cpp")});
    EXPECT_NE(outcome.status, 0);
    EXPECT_THAT(outcome.err, HasSubstr("take a LibTorch built with the C++11 ABI"));
}

}  // namespace
}  // namespace ddprun::test
