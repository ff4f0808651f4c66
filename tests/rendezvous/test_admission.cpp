#include "rendezvous/serve/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {
namespace {

using testing::HasSubstr;

Arrival plain_from(const std::string& from) { return {from, "10.0.0.1", 'D', false}; }
Arrival sealed_from(const std::string& from) { return {from, "10.0.0.1", 'D', true}; }

TEST(Admission, AJobWithoutTlsAcceptsPlainConnections) {
    EXPECT_TRUE(admits_speech(plain_from("10.0.0.2"), false));
}

TEST(Admission, AJobWithTlsAcceptsPlainConnectionsFromThisHostOnly) {
    EXPECT_TRUE(admits_speech(plain_from("127.0.0.1"), true));
    EXPECT_TRUE(admits_speech(plain_from("::1"), true));
    EXPECT_TRUE(admits_speech(plain_from("10.0.0.1"), true)) << "its own address";
    EXPECT_TRUE(admits_speech(sealed_from("10.0.0.2"), true));
    const Status refused = admits_speech(plain_from("10.0.0.2"), true);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::Refused);
    EXPECT_THAT(refused.error().what, HasSubstr("give --tls to every node, or to none"));
}

TEST(Admission, ATlsClientOfAJobWithoutTlsIsRefusedWithTheReason) {
    Arrival arrival = plain_from("10.0.0.2");
    arrival.first_byte = kTlsFirstByte;
    const Status refused = admits_speech(arrival, false);
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().what, HasSubstr("the job was started without --tls"));
}

class TorchAdmission : public testing::Test {
  protected:
    const std::set<std::string> nodes_{"10.0.0.2"};
    TorchDoor door_{true, 1, 0, 2, nodes_};
};

TEST_F(TorchAdmission, AcceptsNodesOfTheJobAndThisHostOnly) {
    EXPECT_TRUE(admits_torch(plain_from("10.0.0.2"), door_));
    EXPECT_TRUE(admits_torch(plain_from("10.0.0.1"), door_));
    EXPECT_TRUE(admits_torch(plain_from("127.0.0.1"), door_));
    const Status refused = admits_torch(plain_from("10.0.0.3"), door_);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::Refused);
}

TEST_F(TorchAdmission, IsOpenDuringAGenerationIfTheStoreIsServed) {
    door_.generation = 0;
    EXPECT_FALSE(admits_torch(plain_from("127.0.0.1"), door_));
    door_.generation = 1;
    door_.is_open = false;
    EXPECT_FALSE(admits_torch(plain_from("127.0.0.1"), door_));
}

TEST_F(TorchAdmission, RefusesClientsBeyondTheLimit) {
    door_.clients = 1;
    EXPECT_TRUE(admits_torch(plain_from("127.0.0.1"), door_));
    door_.clients = 2;
    const Status refused = admits_torch(plain_from("127.0.0.1"), door_);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::Limit);
}

using namespace std::chrono_literals;

constexpr TimePoint kStart{};

TEST(Strangers, HaveRoomUpToTheLimit) {
    Strangers strangers(2);
    strangers.arrived(1, kStart);
    EXPECT_EQ(strangers.room_at(), TimePoint::min());
    strangers.arrived(2, kStart);
    EXPECT_TRUE(strangers.is_crowded());
    EXPECT_EQ(strangers.room_at(), kStart + Strangers::kHandshakeSilence);
}

TEST(Strangers, ThatSentBytesAMomentAgoAreKept) {
    Strangers strangers(2);
    strangers.arrived(1, kStart);
    strangers.arrived(2, kStart + 10ms);
    strangers.spoke(1, kStart + 50ms);
    EXPECT_EQ(strangers.next_to_go(), 2U);
    EXPECT_EQ(strangers.room_at(), kStart + 10ms + Strangers::kHandshakeSilence);
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
