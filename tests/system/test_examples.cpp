// The examples, as a user starts them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>

#include "tests/support/reserved_port.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"
#include "tests/system/look.h"

namespace ddprun::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

Outcome run_example(const char* program, int ranks, const std::vector<std::string>& arguments,
                    const RunOptions& options = {}) {
    std::vector<std::string> command = {path_of("DDPRUN"), "--prefix=none",
                                        "--nproc-per-node=" + std::to_string(ranks), path_of(program)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run(command, options);
}

/// The line "4 ranks after 80 steps, sha256 ..." at the end of multinode_basic's output.
std::string result_of(const Outcome& outcome) {
    std::smatch found;
    return std::regex_search(outcome.out, found, std::regex("bitwise equal on (.*)\n"))
               ? found[1].str()
               : "nothing: " + outcome.out + outcome.err;
}

TEST(Examples, CheckThemselvesOnThreeWorkers) {
    for (const auto& [example, says] :
         {std::pair{"SUM_OF_RANKS", "the sum of their ranks is 3"},
          {"REGRESSION", "found y = 3.000 x + -1.000"},
          {"ACCUMULATION", "in 4 parts, 60 averages each"},
          {"EVALUATION", "% of 1003 samples are right"},
          {"RESUME", "stopped in epoch 0 behind 960 samples; ended after 63 steps"}}) {
        const Outcome outcome = run_example(example, 3, {});
        EXPECT_EQ(outcome.status, 0) << example << ": " << outcome.err;
        EXPECT_THAT(outcome.out, AllOf(StartsWith("3 workers"), HasSubstr(says)));
    }
}

TEST(Examples, RecoverLosesARankAndNoStep) {
    const Outcome outcome = run_example("RECOVER", 3, {});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("3 workers: 63 steps in two generations"));
    EXPECT_THAT(outcome.err, HasSubstr("2 ranks go on in place, rank 2 starts again"));
}

TEST(Examples, RollCallCountsEveryRankAndOneRankCalls) {
    const Outcome outcome = run_example("ROLL_CALL", 4, {});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "4 workers, 0 missing\n");
}

TEST(Examples, MultinodeBasicResumesAtTheNextEpochWithTheSameResult) {
    const TemporaryDirectory directory;
    const auto train = [&](const std::string& snapshot, const std::string& epochs) {
        return run_example(
            "MULTINODE_BASIC", 4,
            {"--total_epochs", epochs, "--save_every=2", "--snapshot", directory.file(snapshot)});
    };
    const Outcome whole = train("whole", "6");
    EXPECT_EQ(whole.status, 0) << whole.err;
    EXPECT_THAT(whole.out, AllOf(HasSubstr("Training on 4 ranks"),
                                 HasSubstr("[GPU3] Epoch 5 | Batchsize: 32 | Steps: 16"),
                                 HasSubstr("[GPU0] Epoch 5 completed in ")));
    EXPECT_EQ(occurrences(whole.out, "Training snapshot saved"), 3) << "one writer, every second epoch";
    const Outcome first = train("parts", "3");
    EXPECT_EQ(first.status, 0) << first.err;
    const Outcome second = train("parts", "6");
    EXPECT_EQ(second.status, 0) << second.err;
    EXPECT_THAT(second.out, AllOf(HasSubstr("Resuming training from snapshot at Epoch 3\n"),
                                  Not(HasSubstr("Epoch 2 |")), HasSubstr("Epoch 3 |")));
    EXPECT_EQ(result_of(second), result_of(whole));
    EXPECT_THAT(result_of(whole), StartsWith("4 ranks after 96 steps"));
}

TEST(Examples, MultinodeBasicGoesOnAfterAKilledRankFromTheLastWholeSnapshot) {
    const TemporaryDirectory directory;
    const std::string script =
        "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \"$@\" --total_epochs 2 --snapshot " +
        directory.file("s") + " && kill -KILL $$; else exec \"$@\" --snapshot " + directory.file("s") +
        " --total_epochs $((2 + 4 * TORCHELASTIC_RESTART_COUNT)); fi";
    const Outcome outcome =
        run({path_of("DDPRUN"), "--prefix=none", "--nproc-per-node=2", "--max-restarts=1", "/bin/sh", "-c",
             script, "sh", path_of("MULTINODE_BASIC"), "--save_every=1"});
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    EXPECT_THAT(outcome.out, HasSubstr("Resuming training from snapshot at Epoch 2\n"));
}

TEST(Examples, MultinodeBasicNamesAWrongOption) {
    EXPECT_THAT(run({path_of("MULTINODE_BASIC"), "--batch_size", "many"}).err,
                HasSubstr("--batch_size: 'many' is not a number"));
    EXPECT_THAT(run({path_of("MULTINODE_BASIC"), "--epochs=3"}).err, HasSubstr("--epochs: unknown option"));
    EXPECT_THAT(run({path_of("MULTINODE_BASIC"), "--backend=nccl"}).err, HasSubstr("train --device cuda"));
}

TEST(Examples, DistributedLoaderLearnsWithEveryRankOnItsShare) {
    for (const int ranks : {2, 3}) {
        const Outcome outcome =
            run_example("DISTRIBUTED_LOADER", ranks, {"--num_epochs", "3", "--backend=gloo"});
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, AllOf(HasSubstr("with " + std::to_string(ranks) + " processes"),
                                       HasSubstr("Training completed successfully!")));
        EXPECT_EQ(occurrences(outcome.out, "Epoch 2, Training ..."), ranks);
    }
}

TEST(Examples, CommBenchMeasuresBothCollectivesInEverySizeAndKeepsALog) {
    const TemporaryDirectory directory;
    const std::string csv = directory.file("comm.csv");
    const RunOptions options = with_environment({"NCCL_DEBUG=WARN", "OMP_NUM_THREADS=1"});
    for (int times = 0; times < 2; ++times) {
        const Outcome outcome =
            run_example("COMM_BENCH", 4, {"--max-bytes", "400000", "--csv", csv}, options);
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out, AllOf(HasSubstr("broadcast"), HasSubstr("all results were right")));
    }
    std::ifstream log(csv);
    std::vector<std::string> lines;
    for (std::string line; std::getline(log, line);) lines.push_back(line);
    ASSERT_THAT(lines, SizeIs(3 + 2 * 2 * 3))
        << "two variables, the names, and two runs of two collectives in three sizes";
    EXPECT_THAT(lines, Contains("# NCCL_DEBUG=WARN"));
    EXPECT_THAT(lines[2], StartsWith("unix_time,host,world_size,"));
    EXPECT_THAT(lines.back(), HasSubstr(",all_reduce,100000,400000,"));
}

TEST(Examples, DigitsHasTheSameBitsWhereRanksMeetAgainInTheMiddleOfTheRun) {
    const TemporaryDirectory directory;
    const auto weights_with = [&](const std::string& option, const std::string& said) {
        const std::string checkpoints = directory.file(option);
        const Outcome outcome = run({path_of("DDPRUN"), "--nproc-per-node=3", option, path_of("DIGITS"),
                                     path_of("SOURCE_ROOT") + "/workers/train/data", checkpoints});
        EXPECT_EQ(outcome.status, 0) << outcome.err;
        EXPECT_THAT(outcome.out + outcome.err, HasSubstr(said));
        std::ifstream file(checkpoints + "/step-000380/model.safetensors", std::ios::binary);
        return std::string{std::istreambuf_iterator<char>(file), {}};
    };
    const std::string undisturbed = weights_with("--recover=restart", "epoch 10 of 10: loss 0.466,");
    EXPECT_THAT(undisturbed, Not(IsEmpty()));
    EXPECT_EQ(weights_with("--rehearse=10", "rehearsals: all ranks let go and met again"), undisturbed);
}

/// The nodes have one worker and two, and are two ddpruns.
TEST(Examples, CheckThemselvesOnTwoNodes) {
    const TemporaryDirectory directory;
    for (const auto& [example, arguments] : std::vector<std::pair<const char*, std::vector<std::string>>>{
             {"EVALUATION", {}},
             {"RESUME", {}},
             {"MULTINODE_BASIC",
              {"--total_epochs=3", "--save_every=2", "--snapshot", directory.file("snapshot")}}}) {
        const ReservedPort port;
        const auto node = [&](int rank) {
            std::vector<std::string> command = {path_of("DDPRUN"),
                                                "--prefix=none",
                                                "--nnodes=2",
                                                "--nproc-per-node=" + std::to_string(1 + rank),
                                                "--master-addr=127.0.0.1",
                                                "--master-port=" + port.number(),
                                                "--node-rank=" + std::to_string(rank),
                                                path_of(example)};
            command.insert(command.end(), arguments.begin(), arguments.end());
            return std::make_unique<Program>(command, with_environment({"DDPRUN_TOKEN=secret of the job"}));
        };
        const std::unique_ptr<Program> head = node(0), other = node(1);
        const Outcome zero = head->wait(), one = other->wait();
        EXPECT_EQ(zero.status, 0) << example << ": " << zero.err;
        EXPECT_EQ(one.status, 0) << example << ": " << one.err;
    }
}

/// The example that runs on GPUs, here over fakes of NCCL and CUDA, on two nodes that are two ddpruns.
TEST(Examples, CommBenchMeasuresInTheMemoryOfGpusOfSeveralNodes) {
    const ReservedPort port;
    std::vector<std::unique_ptr<Program>> nodes;
    for (const char* node : {"0", "1"}) {
        nodes.push_back(std::make_unique<Program>(
            std::vector<std::string>{
                path_of("DDPRUN"), "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1",
                "--master-port=" + port.number(), std::string("--node-rank=") + node,
                path_of("OVER_FAKES") + "/comm_bench", "--device=cuda", "--max-bytes=40000"},
            with_environment({"DDP_NCCL_LIBRARY=" + path_of("FAKE_NCCL_LIBRARY"), "FAKE_CUDA_DEVICES=2",
                              "DDPRUN_TOKEN=secret of the job"})));
    }
    const Outcome zero = nodes[0]->wait();
    EXPECT_EQ(nodes[1]->wait().status, 0);
    EXPECT_EQ(zero.status, 0) << zero.err;
    EXPECT_THAT(zero.out, AllOf(HasSubstr("4 ranks, nccl"), HasSubstr("all results were right")));
}

}  // namespace
}  // namespace ddprun::test
