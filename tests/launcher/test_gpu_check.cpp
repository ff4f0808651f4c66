#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launcher/machine/gpu/gpu_health.h"

namespace ddprun {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

NvidiaFacts two_gpus() {
    NvidiaFacts facts;
    facts.gpus.resize(2);
    facts.gpus[0].uuid = "GPU-a";
    facts.gpus[1].uuid = "GPU-b";
    facts.gpus[1].index = 1;
    return facts;
}

JobSpec with(GpuCheck check) {
    JobSpec spec;
    spec.gpu_check = check;
    return spec;
}

TEST(GpuCheck, RunsWhenTheJobAsksForGpus) {
    int gpus = 2;
    JobSpec spec;
    EXPECT_FALSE(checks_gpus(spec, gpus)) << "a count says nothing about GPUs";
    spec.workers.kind = WorkerCount::Kind::Gpu;
    EXPECT_TRUE(checks_gpus(spec, gpus));
    spec.workers.kind = WorkerCount::Kind::Auto;
    EXPECT_TRUE(checks_gpus(spec, gpus));
    gpus = 0;
    EXPECT_FALSE(checks_gpus(spec, gpus));
    EXPECT_TRUE(checks_gpus(with(GpuCheck::Warn), gpus));
    EXPECT_TRUE(checks_gpus(with(GpuCheck::Refuse), gpus));
    gpus = 2;
    spec.gpu_check = GpuCheck::Off;
    EXPECT_FALSE(checks_gpus(spec, gpus));
}

TEST(GpuCheck, HealthyGpusAreNotMentioned) {
    for (const GpuCheck check : {GpuCheck::Auto, GpuCheck::Warn, GpuCheck::Refuse})
        EXPECT_EQ(judge_job_gpus(with(check), 2, two_gpus(), std::nullopt), GpuVerdict{});
}

TEST(GpuCheck, AutoRefusesADefectiveGpuAndNamesItsRankAndTheOverride) {
    NvidiaFacts facts = two_gpus();
    facts.gpus[1].remap_failed = true;
    const GpuVerdict verdict = judge_job_gpus(with(GpuCheck::Auto), 2, facts, std::nullopt);
    EXPECT_THAT(
        verdict.refusals,
        ElementsAre("GPU 1 (local rank 1): defective memory rows could not be replaced: take the node out of "
                    "service and have the GPU replaced; --gpu-check=warn starts all the same"));
    EXPECT_THAT(verdict.warnings, IsEmpty());
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Warn), 2, facts, std::nullopt).refusals, IsEmpty());
    EXPECT_EQ(judge_job_gpus(with(GpuCheck::Warn), 2, facts, std::nullopt).warnings.size(), 1u);
}

TEST(GpuCheck, AGpuThatNoWorkerTakesDoesNotMatter) {
    NvidiaFacts facts = two_gpus();
    facts.gpus[1].lost = "fell off";
    EXPECT_EQ(judge_job_gpus(with(GpuCheck::Auto), 1, facts, std::nullopt), GpuVerdict{});
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Auto), 1, facts, "GPU-a"), GpuVerdict{});
    facts.gpus[1].lost = "";
    facts.gpus[1].uncorrected_now = 1;
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Auto), 1, facts, "1,0").refusals,
                ElementsAre(HasSubstr("GPU 1 (local rank 0)")));
}

TEST(GpuCheck, AGpuInUseIsAWarningUnlessAsked) {
    NvidiaFacts facts = two_gpus();
    facts.gpus[0].processes = {{4171, 5ULL << 30, "python3"}};
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Auto), 2, facts, std::nullopt).warnings,
                ElementsAre(HasSubstr("in use by python3 4171")));
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Refuse), 2, facts, std::nullopt).refusals,
                ElementsAre(HasSubstr("in use by python3 4171")));
    facts.gpus[0].processes[0].program = "nvidia-cuda-mps";
    EXPECT_EQ(judge_job_gpus(with(GpuCheck::Refuse), 2, facts, std::nullopt), GpuVerdict{})
        << "MPS is there to be shared";
}

TEST(GpuCheck, TooFewGpusAreReported) {
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Warn), 4, two_gpus(), std::nullopt).warnings,
                ElementsAre(HasSubstr("4 workers and 2 visible GPUs")));
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Refuse), 2, two_gpus(), "").refusals,
                ElementsAre(HasSubstr("2 workers and 0 visible GPUs")));
}

TEST(GpuCheck, ADriverThatDoesNotFitIsRefusedAndNoDriverIsNot) {
    NvidiaFacts facts;
    facts.problem = "no NVIDIA driver is loaded";
    EXPECT_EQ(judge_job_gpus(with(GpuCheck::Auto), 2, facts, std::nullopt), GpuVerdict{});
    facts.problem = "the libraries and the kernel module differ";
    facts.mismatch = true;
    EXPECT_THAT(judge_job_gpus(with(GpuCheck::Auto), 2, facts, std::nullopt).refusals,
                ElementsAre(HasSubstr("kernel module differ")));
}

}  // namespace
}  // namespace ddprun
