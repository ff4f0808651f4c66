#include <gtest/gtest.h>

#include <bit>

#include "launcher/guard/descriptors.h"

namespace ddprun {
namespace {

constexpr std::size_t kUserLimit = 64 * 1024 * 1024;  // pipe-user-pages-soft: 16384 pages

TEST(PipeSize, FewWorkersGetAMebibyteEach) {
    EXPECT_EQ(pipe_bytes(1), 1024u * 1024);
    EXPECT_EQ(pipe_bytes(16), 1024u * 1024);
}

TEST(PipeSize, AllPipesOfANodeLeaveHalfOfTheUsersLimitToOthers) {
    for (int workers = 1; workers <= 1024; ++workers) {
        const std::size_t bytes = pipe_bytes(workers);
        EXPECT_TRUE(std::has_single_bit(bytes)) << workers;
        EXPECT_LE(2 * static_cast<std::size_t>(workers) * bytes, kUserLimit / 2) << workers;
    }
}

TEST(PipeSize, NeverShrinksBelowFourPages) {
    EXPECT_EQ(pipe_bytes(1024), 16u * 1024);
    EXPECT_EQ(pipe_bytes(1'000'000), 16u * 1024);
}

}  // namespace
}  // namespace ddprun
