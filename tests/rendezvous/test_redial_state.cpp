#include <gtest/gtest.h>

#include "rendezvous/client/redial_state.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;
using namespace redial_event;

constexpr TimePoint kStart{1h};
constexpr TimePoint kLost = kStart + 10s;

const Error kRefused{Errc::System, "connect", 0}, kSlow{Errc::Timeout, "connect", 0};

RedialState lost(Outage outage) {
    RedialState state({3s}, kStart);
    EXPECT_EQ(step(state, Closed{outage}, kLost), RedialAction::Dial);
    return state;
}

TEST(RedialState, GivesADeadProcessAFewDialsWithinTheShortGrace) {
    RedialState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost), RedialAction::None);
    EXPECT_EQ(state.timer(), kLost + 3ms);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 2ms), RedialAction::None);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 3ms), RedialAction::Dial);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 15ms), RedialAction::EndAsLost);
}

TEST(RedialState, WaitsBeyondTheGraceForADialThatSomebodyHasAccepted) {
    RedialState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, Accepted{}, kLost + 1ms), RedialAction::None);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 15ms), RedialAction::None);
    EXPECT_EQ(step(state, DialFailed{kSlow}, kLost + 1s), RedialAction::None) << "a slow process lives";
    EXPECT_EQ(step(state, TimePassed{}, kLost + 1s), RedialAction::Dial);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost + 2s), RedialAction::EndAsLost);
}

TEST(RedialState, WaitsForAnUnreachableNetworkAsLongAsForSilence) {
    RedialState state = lost(Outage::Unreachable);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost), RedialAction::None);
    EXPECT_EQ(state.timer(), kLost + 250ms);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 250ms), RedialAction::Dial);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 3s), RedialAction::EndAsLost);
}

TEST(RedialState, DialsBesideASilentConnectionOnceAtATime) {
    RedialState state({3s}, kStart);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 999ms), RedialAction::None);
    EXPECT_EQ(state.check_at, kStart + 1s);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 1s), RedialAction::Dial);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, state.check_at), RedialAction::None);
    EXPECT_EQ(step(state, Closed{Outage::Broken}, kStart + 2s), RedialAction::Dial)
        << "the first got nowhere";
    EXPECT_EQ(step(state, Resumed{}, kStart + 2s), RedialAction::None);
    EXPECT_EQ(state.timer(), kNever);
}

TEST(RedialState, EndsAfterTheWholeTimeoutOfSilence) {
    RedialState state({3s}, kStart);
    (void)step(state, SilenceChecked{kStart}, kStart + 2800ms);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 3s), RedialAction::None);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 3s), RedialAction::EndAsSilent);
}

TEST(RedialState, EndsWhenTheControllerHasEndedTheSession) {
    RedialState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, DialFailed{{Errc::StaleGeneration, "over", 0}}, kLost), RedialAction::EndAsRefused);
}

TEST(RedialState, TakesAConnectionClosedAfterItsOwnStandstillForASilentOne) {
    RedialState state({3s}, kStart);
    (void)step(state, Beat{}, kStart + 1min);
    (void)step(state, Closed{Outage::Broken}, kStart + 1min + 1s);
    EXPECT_EQ(state.outage, Outage::Unreachable);
}

}  // namespace
}  // namespace ddprun::rdzv
