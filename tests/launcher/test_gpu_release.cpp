#include "launcher/node/gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddprun {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

GpuUsage gpu(unsigned index, std::uint64_t used, std::vector<GpuProcessUsage> processes = {}) {
    GpuUsage usage;
    usage.index = index;
    usage.used_bytes = used;
    usage.total_bytes = 80 * kGiB;
    usage.processes = std::move(processes);
    return usage;
}

using Look = std::vector<GpuUsage>;
const std::vector<pid_t> kGone = {4171, 4172};

TEST(GpuRelease, IsFreeWithoutGpus) { EXPECT_TRUE(judge_gpu_release(std::nullopt, {}, kGone).is_free); }

TEST(GpuRelease, AnIdleGpuIsFreeAtTheFirstMeasurement) {
    EXPECT_TRUE(judge_gpu_release(std::nullopt, {gpu(0, kGiB / 2), gpu(1, 0)}, kGone).is_free);
}

TEST(GpuRelease, AnEndedProcessThatIsStillListedIsNamedWithItsMemory) {
    const Look now = {gpu(0, 0), gpu(3, 61 * kGiB, {{99, kGiB}, {4172, 60 * kGiB}})};
    const GpuRelease first = judge_gpu_release(std::nullopt, now, kGone);
    EXPECT_FALSE(first.is_free);
    EXPECT_EQ(first.why, "GPU 3 still holds 60 GiB of process 4172");
    EXPECT_FALSE(judge_gpu_release(now, now, kGone).is_free) << "however long it takes";
}

TEST(GpuRelease, AHolderOfUnknownSizeIsWaitedForToo) {
    EXPECT_THAT(judge_gpu_release(std::nullopt, {gpu(0, 0, {{4171, 0}})}, kGone).why,
                HasSubstr("holds memory of process 4171"));
}

TEST(GpuRelease, MemoryOfOtherProcessesDoesNotMatter) {
    EXPECT_TRUE(judge_gpu_release(std::nullopt, {gpu(0, 70 * kGiB, {{99, 70 * kGiB}})}, kGone).is_free);
}

TEST(GpuRelease, MemoryWithoutAProcessIsWaitedForWhileItShrinks) {
    const Look full = {gpu(0, 60 * kGiB)}, half = {gpu(0, 30 * kGiB)}, done = {gpu(0, kGiB / 4)};
    EXPECT_FALSE(judge_gpu_release(std::nullopt, full, kGone).is_free) << "nothing to compare with";
    EXPECT_FALSE(judge_gpu_release(full, half, kGone).is_free);
    EXPECT_TRUE(judge_gpu_release(half, done, kGone).is_free);
}

TEST(GpuRelease, MemoryWithoutAProcessThatStaysDoesNotMatter) {
    const Look other_container = {gpu(0, 60 * kGiB)};
    EXPECT_TRUE(judge_gpu_release(other_container, other_container, kGone).is_free);
    EXPECT_TRUE(judge_gpu_release(other_container, {gpu(0, 61 * kGiB)}, kGone).is_free)
        << "it grows: somebody works there";
}

}  // namespace
}  // namespace ddprun
