// `ddprun train --device cuda` as a user starts it. CUDA, cuBLAS and NCCL are fakes over host memory; the
// kernels are the real ones, compiled for the host. No GPU is used.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <map>

#include "tests/support/json_file.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

class TrainJob : public ::testing::Test {
  protected:
    Outcome start(int workers, const Words& arguments, const Words& variables = {}) {
        Words words{path_of("DDPRUN"), "--nproc-per-node=" + std::to_string(workers), "--no-python",
                    path_of("TRAIN")};
        words.insert(words.end(), arguments.begin(), arguments.end());
        return run_in_directory(words, variables);
    }
    Outcome run_in_directory(const Words& words, const Words& variables = {}) {
        RunOptions options;
        options.directory = directory_.path();
        options.environment = variables;
        return run(words, options);
    }
    /// The log of a run with that name, which must succeed. The workers share 32 samples per step.
    Json train(const std::string& name, int workers, const Words& arguments, const Words& variables = {}) {
        Words all{"--no-scale-lr", "--lr=0.05", "--batch-size=" + std::to_string(32 / workers),
                  "--log-json=" + name, "--checkpoint-dir=" + name + ".checkpoints"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const Outcome outcome = start(workers, all, variables);
        EXPECT_EQ(outcome.status, 0) << name << ": " << outcome.out << outcome.err;
        if (outcome.status != 0) return {};
        out_ = outcome.out;
        return json_file(directory_.file(name));
    }
    static void expect_curve(const Json& log, const Json& expected, double tolerance) {
        ASSERT_TRUE(log.contains("epochs"));
        const Json &mine = log["epochs"], &theirs = expected["epochs"];
        ASSERT_EQ(mine.size(), theirs.size());
        for (std::size_t e = 0; e < mine.size(); ++e) {
            const double loss = theirs[e]["loss"].get<double>();
            EXPECT_NEAR(mine[e]["loss"].get<double>(), loss, tolerance * loss) << "epoch " << e + 1;
        }
    }

    TemporaryDirectory directory_;
    std::string out_;  ///< of the last run
};

TEST_F(TrainJob, MatchesTheLossOfTheCpuInEveryPrecision) {
    const Json cpu = train("cpu", 1, {"--device=cpu", "--epochs=4"});
    expect_curve(train("fp32", 1, {"--device=cuda", "--epochs=4"}), cpu, 1e-4);
    EXPECT_THAT(out_, HasSubstr("on CUDA device 0 (asked for)"));
    EXPECT_THAT(out_, HasSubstr("cuBLAS 13.1.0, fp32"));
    expect_curve(train("tf32", 1, {"--precision=tf32", "--epochs=4"}), cpu, 1e-2);
    EXPECT_THAT(out_, HasSubstr("on CUDA device 0 (for --precision tf32)"));
    expect_curve(train("fp16", 1, {"--precision=fp16", "--epochs=4"}), cpu, 2e-2);
    expect_curve(train("bf16", 1, {"--precision=bf16", "--epochs=4"}), cpu, 5e-2);
}

TEST_F(TrainJob, TwoWorkersOverNcclMatchOneWorker) {
    const Json one = train("one", 1, {"--device=cuda", "--epochs=3"});
    const Json two = train("two", 2, {"--device=cuda", "--backend=nccl", "--epochs=3"});
    expect_curve(two, one, 1e-4);
    EXPECT_THAT(out_, HasSubstr("parameters are bitwise equal on 2 workers"));
    expect_curve(train("adamw", 2, {"--device=cuda", "--optimizer=adamw", "--lr=0.002", "--epochs=3"}),
                 train("adamw-cpu", 2, {"--device=cpu", "--optimizer=adamw", "--lr=0.002", "--epochs=3"}),
                 1e-3);
}

TEST_F(TrainJob, TwoWorkersShareADeviceThroughTheStagedBackend) {
    const Json one = train("one", 1, {"--device=cuda", "--epochs=3"});
    const Json two =
        train("two", 2, {"--device=cuda", "--backend=staged", "--epochs=3"}, {"FAKE_CUDA_DEVICES=1"});
    expect_curve(two, one, 1e-4);
    EXPECT_THAT(out_, HasSubstr("staged"));
    EXPECT_THAT(out_, HasSubstr("parameters are bitwise equal on 2 workers"));
}

TEST_F(TrainJob, AKilledRankIsReplacedInPlaceAndTheResultHasTheSameBits) {
    const Words arguments{"--device=cuda", "--epochs=12", "--checkpoint-every=100", "--clip=0.5"};
    const Json undisturbed = train("undisturbed", 2, arguments);
    for (const std::string backend : {"staged", "nccl"}) {
        RunOptions options = with_environment({"DDP_RECOVER_ON_GPUS=1"});
        options.directory = directory_.path();
        Words words{path_of("DDPRUN"),       "--nproc-per-node=2",
                    "--no-python",           path_of("TRAIN"),
                    "--no-scale-lr",         "--lr=0.05",
                    "--batch-size=16",       "--backend=" + backend,
                    "--log-json=" + backend, "--checkpoint-dir=" + backend + ".checkpoints"};
        words.insert(words.end(), arguments.begin(), arguments.end());
        Program program(words, options);
        ASSERT_TRUE(program.wait_for_output("epoch  2/12")) << backend;
        const std::vector<pid_t> ranks = children_named(program.pid(), "train");
        ASSERT_EQ(ranks.size(), 2u);
        ::kill(ranks[1], SIGKILL);
        const Outcome outcome = program.wait();
        EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
        EXPECT_THAT(outcome.err, HasSubstr("] recovered after ")) << backend;
        const Json log = json_file(directory_.file(backend));
        EXPECT_EQ(log["parameters_sha256"], undisturbed["parameters_sha256"]) << backend;
        EXPECT_EQ(log["epochs"][11]["loss"], undisturbed["epochs"][11]["loss"]) << backend;
        EXPECT_EQ(log["epochs"][1]["loss"], undisturbed["epochs"][1]["loss"]) << backend;
    }
}

TEST_F(TrainJob, AStagedRunRefusesAGraphBeforeItBegins) {
    const Outcome outcome = start(2, {"--device=cuda", "--cuda-graph"}, {"FAKE_CUDA_DEVICES=1"});
    EXPECT_EQ(outcome.status, 64) << outcome.out << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("--cuda-graph: backend staged"));
    EXPECT_THAT(outcome.out, Not(HasSubstr("epoch")));
}

TEST_F(TrainJob, ACheckpointOfEitherDeviceResumesOnTheOther) {
    const Json whole = train("whole", 2, {"--device=cpu", "--epochs=6"});
    train("first", 2, {"--device=cpu", "--epochs=2", "--checkpoint-dir=shared"});
    train("second", 2, {"--device=cuda", "--epochs=4", "--checkpoint-dir=shared", "--resume"});
    EXPECT_THAT(out_, HasSubstr("resuming from shared/"));
    const Json third =
        train("third", 2, {"--device=cpu", "--epochs=6", "--checkpoint-dir=shared", "--resume"});
    ASSERT_EQ(third["epochs"].size(), 2u);
    for (const std::size_t e : {0u, 1u}) {
        const double loss = whole["epochs"][e + 4]["loss"].get<double>();
        EXPECT_NEAR(third["epochs"][e]["loss"].get<double>(), loss, 1e-3 * loss);
    }
}

TEST_F(TrainJob, AResumedRunIsBitwiseEqualInLowPrecision) {
    for (const std::string precision : {"fp16", "bf16"}) {
        const std::string device = "--precision=" + precision, place = "--checkpoint-dir=" + precision;
        const Json whole = train("whole", 2, {device, "--epochs=4", "--checkpoint-dir=whole-" + precision});
        train("half", 2, {device, "--epochs=2", place});
        const Json rest = train("rest", 2, {device, "--epochs=4", place, "--resume"});
        EXPECT_EQ(whole["parameters_sha256"], rest["parameters_sha256"]) << precision;
    }
}

TEST_F(TrainJob, ThePlaceOfTheSamplesDoesNotChangeTheResult) {
    const Json device = train("device", 2, {"--device=cuda", "--epochs=2", "--keep-data=device"});
    EXPECT_THAT(out_, HasSubstr("samples on the device"));
    const Json host = train("host", 2, {"--device=cuda", "--epochs=2", "--keep-data=host"});
    EXPECT_THAT(out_, HasSubstr("samples in host memory"));
    EXPECT_EQ(device["parameters_sha256"], host["parameters_sha256"]);
    EXPECT_EQ(device["epochs"][1]["loss"], host["epochs"][1]["loss"]);
}

TEST_F(TrainJob, StepsInAGraphDoNotChangeTheResult) {
    for (const std::string precision : {"fp32", "fp16"}) {
        const std::string wanted = "--precision=" + precision;
        const Json eager = train("eager", 2, {"--device=cuda", wanted, "--epochs=2"});
        EXPECT_THAT(out_, Not(HasSubstr("graph")));
        const Json graph = train("graph", 2, {"--device=cuda", wanted, "--epochs=2", "--cuda-graph"});
        EXPECT_THAT(out_, HasSubstr("steps in a graph"));
        EXPECT_EQ(eager["parameters_sha256"], graph["parameters_sha256"]) << precision;
        EXPECT_EQ(eager["epochs"][1]["loss"], graph["epochs"][1]["loss"]) << precision;
    }
}

TEST_F(TrainJob, ClippingAndAccumulationMatchTheCpuAndAreTheSameInAGraph) {
    const Words options = {"--epochs=3", "--clip=0.3", "--accumulate=2"};
    const auto with = [&](const std::string& name, Words more) {
        more.insert(more.end(), options.begin(), options.end());
        return train(name, 2, more);
    };
    const Json cpu = with("cpu", {"--device=cpu"});
    const Json unclipped = train("unclipped", 2, {"--device=cpu", "--epochs=3", "--accumulate=2"});
    EXPECT_NE(cpu["epochs"][2]["loss"], unclipped["epochs"][2]["loss"]) << "there was something to clip";
    for (const auto& [precision, tolerance] :
         std::map<std::string, double>{{"fp32", 1e-4}, {"bf16", 5e-2}, {"fp16", 2e-2}}) {
        const std::string wanted = "--precision=" + precision;
        const Json eager = with(precision, {"--device=cuda", wanted});
        expect_curve(eager, cpu, tolerance);
        EXPECT_THAT(out_, HasSubstr("parameters are bitwise equal on 2 workers"));
        EXPECT_EQ(with("graph-" + precision, {"--cuda-graph", wanted})["parameters_sha256"],
                  eager["parameters_sha256"])
            << precision;
    }
}

TEST_F(TrainJob, EndsIfAClippedNormIsNotFinite) {
    const Outcome outcome = start(2, {"--device=cuda", "--lr=1e30", "--clip=1e30", "--epochs=2"});
    EXPECT_EQ(outcome.status, 1) << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr("--clip: the norm of the gradients was not finite in "));
}

TEST_F(TrainJob, WithoutADeviceAutoUsesTheCpuAndCudaFails) {
    const Outcome asked = start(2, {"--device=cuda"}, {"FAKE_CUDA_DEVICES=0"});
    EXPECT_EQ(asked.status, 69) << asked.err;
    EXPECT_THAT(asked.err,
                HasSubstr("--device cuda: counting CUDA devices: no CUDA-capable device is detected"));
    train("auto", 2, {"--epochs=1"}, {"FAKE_CUDA_DEVICES=0"});
    EXPECT_THAT(out_,
                HasSubstr("on the CPU (auto: counting CUDA devices: no CUDA-capable device is detected"));
}

TEST_F(TrainJob, NamesTheMissingLibrary) {
    const std::string missing = directory_.file("libcublas.so");
    const Outcome outcome = start(1, {"--precision=bf16"}, {"DDP_CUBLAS_LIBRARY=" + missing});
    EXPECT_EQ(outcome.status, 69) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("--precision bf16: "));
    EXPECT_THAT(outcome.err, HasSubstr(missing));
}

TEST_F(TrainJob, TheProgramForTheComparisonWithPyTorchWritesAPass) {
    RunOptions options;
    options.directory = directory_.path();
    // Larger products take minutes on a fake under a sanitizer.
    const Outcome outcome = run({path_of("TRAIN_GRADIENTS"), "pass", "bf16", "35,48,64,33,10"}, options);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.out, HasSubstr("pass: cuBLAS 13.1.0, bf16"));
    options.environment = {"FAKE_CUDA_DEVICES=0"};
    const Outcome skipped = run({path_of("TRAIN_GRADIENTS"), "pass", "fp32"}, options);
    EXPECT_EQ(skipped.status, 77) << skipped.err;
    EXPECT_THAT(skipped.out,
                HasSubstr("skipped: --device cuda: counting CUDA devices: no CUDA-capable device"));
}

}  // namespace
}  // namespace ddprun::test
