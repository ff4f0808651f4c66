#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "env/file.h"
#include "tests/support/run_program.h"
#include "tests/support/temporary_directory.h"

namespace ddprun::test {
namespace {

using ::testing::HasSubstr;

/// The verification script of GPU machines, over the programs of this build.
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
    [[nodiscard]] nlohmann::json summary() const {
        return nlohmann::json::parse(content("summary.json"), nullptr, false);
    }

    TemporaryDirectory directory_;
};

TEST_F(GpuRunScript, WithoutAGpuEveryGpuStepSaysSoAndTheFilesComeOut) {
    const Outcome outcome = verify({"--no-gpu", "--only",
                                    "versions,kernels,all_reduce_nccl_1,train_nccl_1,killed_rank_nccl,"
                                    "memcheck,bench_kernels,bench_train_torch"});
    EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
    const nlohmann::json json = summary();
    ASSERT_TRUE(json.is_object()) << content("summary.json");
    ASSERT_EQ(json["steps"].size(), 8u);
    for (const nlohmann::json& step : json["steps"]) {
        if (step["name"] == "versions") continue;
        EXPECT_EQ(step["outcome"], "skipped") << step;
        EXPECT_EQ(step["detail"], "skipped: no GPU (--no-gpu)") << step;
    }
    EXPECT_THAT(content("summary.md"), HasSubstr("| memcheck | skipped | 0 | skipped: no GPU (--no-gpu) |"));
}

TEST_F(GpuRunScript, RunsItsStepsAndGoesOnAfterAFailure) {
    // The doctor of a machine that is out of order must not keep the others from running.
    const Outcome outcome =
        verify({"--fake", "--only",
                "doctor,all_reduce_nccl_1,all_reduce_staged_2,killed_rank_staged,killed_rank_nccl"});
    const nlohmann::json json = summary();
    ASSERT_TRUE(json.is_object()) << outcome.out << outcome.err << content("summary.json");
    ASSERT_EQ(json["steps"].size(), 5u) << outcome.out;
    for (std::size_t at = 1; at < 5; ++at) {
        const nlohmann::json& step = json["steps"][at];
        EXPECT_EQ(step["outcome"], "passed") << step << content("logs/" + std::string(step["name"]) + ".log");
    }
    EXPECT_TRUE(json["doctor"]["findings"].is_array());
    EXPECT_THAT(std::string(json["gpu"]), HasSubstr("nothing here was measured"));
    EXPECT_EQ(outcome.status, json["failures"] == 0 ? 0 : 1);
}

TEST_F(GpuRunScript, SaysWhatIsWrongWithItsCommandLine) {
    EXPECT_EQ(verify({"--fast"}).status, 64);
    EXPECT_EQ(verify({"--minutes", "x"}).status, 64);
    const Outcome outcome = run({path_of("RUN_SCRIPT"), "--binaries", "/nonexistent"});
    EXPECT_EQ(outcome.status, 64);
    EXPECT_THAT(outcome.err, HasSubstr("no launcher/ddprun in /nonexistent"));
}

}  // namespace
}  // namespace ddprun::test
