#include "rendezvous/serve/strangers.h"

#include <gtest/gtest.h>

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{};

TEST(Strangers, HaveRoomUpToTheLimit) {
    Strangers strangers(2);
    strangers.arrived(1, kStart);
    EXPECT_EQ(strangers.room_at(), TimePoint::min());
    strangers.arrived(2, kStart);
    EXPECT_TRUE(strangers.is_crowded());
    EXPECT_EQ(strangers.room_at(), kStart + Strangers::kPatience);
}

TEST(Strangers, ThatSentBytesAMomentAgoAreKept) {
    Strangers strangers(2);
    strangers.arrived(1, kStart);
    strangers.arrived(2, kStart + 10ms);
    strangers.spoke(1, kStart + 50ms);
    EXPECT_EQ(strangers.next_to_go(), 2U);
    EXPECT_EQ(strangers.room_at(), kStart + 10ms + Strangers::kPatience);
    strangers.spoke(2, kStart + 60ms);
    EXPECT_EQ(strangers.next_to_go(), 1U);
}

TEST(Strangers, ThatWereRefusedAreClosedFirst) {
    Strangers strangers(2);
    strangers.arrived(1, kStart);
    strangers.arrived(2, kStart);
    strangers.refused(2);
    EXPECT_TRUE(strangers.is_crowded()) << "it is still there";
    EXPECT_EQ(strangers.next_to_go(), 2U);
    EXPECT_EQ(strangers.room_at(), TimePoint::min());
    EXPECT_EQ(strangers.in_handshake(), 1U);
}

TEST(Strangers, EndWithTheProof) {
    Strangers strangers(1);
    strangers.arrived(1, kStart);
    EXPECT_TRUE(strangers.left(1));
    EXPECT_FALSE(strangers.left(1));
    strangers.spoke(1, kStart + 1s);
    strangers.refused(1);
    EXPECT_FALSE(strangers.next_to_go());
    EXPECT_FALSE(strangers.is_crowded());
}

}  // namespace
}  // namespace ddprun::rdzv
