#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "env/io/file.h"
#include "env/json.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

/// The verification script for GPU machines, over the programs of this build.
class GpuRunScript : public ::testing::Test {
  protected:
    void SetUp() override {
        if (::access("/usr/bin/python3", X_OK) != 0 && ::access("/usr/local/bin/python3", X_OK) != 0)
            GTEST_SKIP() << "needs python3";
    }
    Outcome verify(std::vector<std::string> options) {
        std::vector<std::string> command{path_of("RUN_SCRIPT"), "--binaries", path_of("BUILD_ROOT"),
                                         "--output", directory_.file("out")};
        command.insert(command.end(), options.begin(), options.end());
        RunOptions run_options;
        run_options.timeout = std::chrono::seconds(200);
        return run(command, run_options);
    }
    [[nodiscard]] std::string content(const std::string& name) const {
        return read_file(directory_.file("out/" + name), 1 << 20).value_or("");
    }
    [[nodiscard]] Json summary() const { return parse_json(content("summary.json")).value_or(Json()); }

    TemporaryDirectory directory_;
};

TEST_F(GpuRunScript, SkipsEveryGpuStepWithTheReasonWithoutAGpu) {
    const Outcome outcome = verify({"--no-gpu", "--only",
                                    "versions,kernels,all_reduce_nccl_1,train_nccl_1,killed_rank_nccl,"
                                    "memcheck,bench_kernels,bench_train_torch"});
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    const Json json = summary();
    ASSERT_TRUE(json.is_object()) << content("summary.json");
    ASSERT_EQ(json["steps"].size(), 8u);
    for (const Json& step : json["steps"]) {
        if (step["name"] == "versions") continue;
        EXPECT_EQ(step["outcome"], "skipped") << step;
        EXPECT_EQ(step["detail"], "skipped: no GPU (--no-gpu)") << step;
    }
    EXPECT_THAT(content("summary.md"), HasSubstr("| memcheck | skipped | 0 | skipped: no GPU (--no-gpu) |"));
}

TEST_F(GpuRunScript, ContinuesAfterAFailedStep) {
    // A doctor that finds faults must not stop the other steps.
    const Outcome outcome = verify(
        {"--fake", "--only",
         "doctor,all_reduce_nccl_1,all_reduce_staged_2,trace_step,trace_graph,killed_rank_staged,recovery_staged,"
         "all_reduce_nccl_4,killed_rank_nccl,recovery_nccl"});
    const Json json = summary();
    ASSERT_TRUE(json.is_object()) << outcome.out << outcome.err << content("summary.json");
    ASSERT_EQ(json["steps"].size(), 10u) << outcome.out;
    for (std::size_t at = 1; at < 10; ++at) {
        const Json& step = json["steps"][at];
        EXPECT_EQ(step["outcome"], "passed")
            << step << content("logs/" + step["name"].get<std::string>() + ".log");
    }
    for (const std::size_t at : {3u, 4u})
        EXPECT_THAT(json["steps"][at]["detail"].get<std::string>(),
                    HasSubstr(", 0 of them wait for the device; "));
    for (const char* recovery : {"recovery_staged", "recovery_nccl"})
        EXPECT_EQ(json[recovery]["ms"].size(), 1u) << recovery;
    EXPECT_TRUE(json["doctor"]["findings"].is_array());
    EXPECT_THAT(json["gpu"].get<std::string>(), HasSubstr("nothing here was measured"));
    EXPECT_EQ(outcome.status, json["failures"] == 0 ? 0 : 1);
}

TEST_F(GpuRunScript, TheTraceShowsATrainingThatWaitsInEveryStep) {
    // Staged collectives wait for the host in every step: the fault that the step "trace_step" looks for.
    const std::string fake = path_of("BUILD_ROOT") + "/tests/support/fake_nccl/fake-nccl.so";
    RunOptions options;
    options.environment.push_back("DDP_CUBLAS_LIBRARY=" + fake);
    options.environment.push_back("FAKE_CUDA_TRACE=" + directory_.file("trace"));
    const Outcome trained =
        run({path_of("BUILD_ROOT") + "/launcher/ddprun", "--standalone", "--nproc-per-node=1", "--no-python",
             path_of("BUILD_ROOT") + "/tests/over_fakes/train", "--device=cuda", "--backend=staged",
             "--data=synthetic:1600,16,4", "--hidden=16", "--epochs=1", "--batch-size=8",
             "--keep-data=device", "--checkpoint-dir=" + directory_.file("checkpoints")},
            options);
    ASSERT_EQ(trained.status, 0) << trained.out << trained.err;
    const Outcome checked = run({path_of("CHECK_TRACE"), directory_.file("trace")});
    EXPECT_EQ(checked.status, 1) << checked.out << checked.err;
    EXPECT_THAT(checked.out, HasSubstr("\nFAILED: "));
    EXPECT_THAT(checked.out, HasSubstr("calls wait for the device in 159 steps: "));
}

TEST_F(GpuRunScript, HasAHarmlessErrorForTheSanitizerToFind) {
    const Outcome outcome =
        run({path_of("BUILD_ROOT") + "/tests/over_fakes/gpu_kernel_test", "--out-of-bounds"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, "wrote 64 elements into memory of 1\n");
}

TEST_F(GpuRunScript, ExplainsAWrongCommandLine) {
    EXPECT_EQ(verify({"--fast"}).status, 64);
    EXPECT_EQ(verify({"--minutes", "x"}).status, 64);
    const Outcome no_python = verify({"--python", directory_.file("python")});
    EXPECT_EQ(no_python.status, 64);
    EXPECT_THAT(no_python.err,
                HasSubstr("--python: there is no program '" + directory_.file("python") + "'"));
    const Outcome outcome = run({path_of("RUN_SCRIPT"), "--binaries", directory_.path()});
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err, HasSubstr("no launcher/ddprun in " + directory_.path()));
}

}  // namespace
}  // namespace ddprun::test
