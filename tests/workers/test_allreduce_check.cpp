#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "check/measure.h"
#include "ddp/testing.h"
#include "tests/workers/failures.h"

namespace check {
namespace {

using ddp::testing::failures_of_ranks;
using ddp::testing::message_of;
using ddp::testing::run_ranks;
using ::testing::HasSubstr;

constexpr std::size_t kBytes = 4096;

TEST(AllreduceCheck, AcceptsRightSumsAndMeasures) {
    run_ranks(3, [](ddp::ProcessGroup& group) {
        Values values(group, kBytes);
        verify_sums(group, values);
        const Measurement result = measure(group, values, std::chrono::milliseconds(5));
        EXPECT_GE(result.rounds, 1u);
        EXPECT_GT(result.seconds, 0);
        verify_sums(group, values);
    });
}

TEST(AllreduceCheck, NamesAWrongSumWithItsPlaceAndBothValues) {
    const auto failures = failures_of_ranks(2, [](ddp::ProcessGroup& group) {
        Values values(group, kBytes);
        if (group.rank() == 0) return verify_sums(group, values);
        // The other rank gives zeros instead of its part of the sum.
        values.fill(std::vector<float>(values.buffer().count, 0.0F));
        group.all_reduce(values.buffer()).synchronize();
    });
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("rank 0: all-reduce gave 1 in place of 3 at element 1 of 1024"));
}

TEST(AllreduceCheck, AllRanksMakeTheSameNumberOfRounds) {
    std::array<std::uint64_t, 2> rounds{};
    run_ranks(2, [&](ddp::ProcessGroup& group) {
        Values values(group, kBytes);
        // The ranks' numbers differ, and rank 0's counts; otherwise one would wait for ever.
        const auto span = std::chrono::milliseconds(group.rank() == 0 ? 2 : 50);
        rounds[static_cast<std::size_t>(group.rank())] = measure(group, values, span).rounds;
    });
    EXPECT_EQ(rounds[0], rounds[1]);
}

TEST(AllreduceCheck, BusBandwidthIsThatOfEachLink) {
    const Measurement result{.rounds = 10, .seconds = 2};
    EXPECT_DOUBLE_EQ(result.gigabytes_per_second(1'000'000'000), 5);
    EXPECT_DOUBLE_EQ(result.bus_gigabytes_per_second(1'000'000'000, 4), 7.5);
    EXPECT_DOUBLE_EQ(result.bus_gigabytes_per_second(1'000'000'000, 1), 0);
}

}  // namespace
}  // namespace check
