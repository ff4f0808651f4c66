#include "rendezvous/serve/held_answers.h"

#include <gtest/gtest.h>

namespace ddprun::rdzv {
namespace {

constexpr std::size_t kFull = kRelayWindow;
constexpr ClientId kAgent = 7;

StoreAnswer answer_to(std::uint64_t client, std::uint32_t request, std::size_t bytes = 1) {
    return {{kAgent, client}, request, Value{Blob(std::string(bytes, 'v'))}};
}

/// The numbers of the requests that are answered when there is room for all.
std::vector<std::uint32_t> rest_of(HeldAnswers& held) {
    std::vector<std::uint32_t> requests;
    while (const std::optional<StoreAnswer> answer = held.next(0)) requests.push_back(answer->request);
    return requests;
}

TEST(HeldAnswers, PassWhileTheSessionHasRoom) {
    HeldAnswers held(100);
    EXPECT_TRUE(held.pass(answer_to(1, 1), kFull - 1));
    EXPECT_FALSE(held.next(0)) << "nothing was held";
}

TEST(HeldAnswers, WaitInOrderForRoom) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 2), 0)) << "behind the first, though there is room by now";
    EXPECT_FALSE(held.next(kFull));
    EXPECT_EQ(rest_of(held), (std::vector<std::uint32_t>{1, 2}));
    EXPECT_TRUE(held.pass(answer_to(1, 3), 0));
}

TEST(HeldAnswers, ToTheAgentItselfNeverWait) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1), kFull));
    EXPECT_TRUE(held.pass(answer_to(0, 2), kFull));
}

TEST(HeldAnswers, ToOneClientHaveALimitThatItIsToldOf) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1, 90), kFull));
    EXPECT_FALSE(held.pass(answer_to(1, 2, 11), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 3, 90), kFull)) << "another client's";
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
    const StoreReply refused = held.next(0)->reply;
    ASSERT_TRUE(std::holds_alternative<Failure>(refused));
    EXPECT_EQ(std::get<Failure>(refused).code, Errc::Limit);
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
}

TEST(HeldAnswers, ToADisconnectedClientAreDropped) {
    HeldAnswers held(100);
    EXPECT_FALSE(held.pass(answer_to(1, 1, 90), kFull));
    EXPECT_FALSE(held.pass(answer_to(2, 2, 90), kFull));
    held.forget(1);
    EXPECT_FALSE(held.pass(answer_to(1, 3, 90), kFull)) << "one that has the number again begins at nothing";
    EXPECT_EQ(held.next(0)->request, 2U);
    EXPECT_TRUE(std::holds_alternative<Value>(held.next(0)->reply));
}

}  // namespace
}  // namespace ddprun::rdzv
