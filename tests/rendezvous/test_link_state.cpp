#include "rendezvous/client/link_state.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;
using namespace link_event;

constexpr TimePoint kStart{1h};
constexpr TimePoint kLost = kStart + 10s;

const Error kRefused{Errc::System, "connect", 0}, kSlow{Errc::Timeout, "connect", 0};

LinkState joined() {
    LinkState state({3s}, kStart);
    EXPECT_EQ(step(state, TimePassed{}, kStart), LinkAction::Dial);
    EXPECT_EQ(step(state, Connected{}, kStart), LinkAction::None);
    return state;
}

LinkState lost(Outage outage) {
    LinkState state = joined();
    EXPECT_EQ(step(state, Closed{outage}, kLost), LinkAction::Dial);
    return state;
}

TEST(LinkState, RepeatsItsFirstDialAfterLongerAndLongerPausesUntilTheDeadline) {
    LinkState state({3s}, kStart);
    state.connect_by = kStart + 2s;
    EXPECT_EQ(state.timer(), kStart);
    TimePoint now = kStart;
    for (const Duration pause : {20ms, 40ms, 80ms}) {
        EXPECT_EQ(step(state, TimePassed{}, now), LinkAction::Dial);
        EXPECT_EQ(step(state, DialFailed{kRefused}, now), LinkAction::None);
        EXPECT_EQ(state.timer(), now + pause);
        now += pause;
    }
    EXPECT_EQ(step(state, TimePassed{}, kStart + 2s), LinkAction::EndAsAbsent);
}

TEST(LinkState, GivesUpAControllerOfItsOwnProcessThatDoesNotAnswerTwice) {
    const Error unreachable{Errc::Closed, "lost", ENETUNREACH};
    for (const auto& [why, tries] :
         {std::pair(kRefused, 1), std::pair(unreachable, 1), std::pair(kSlow, 2)}) {
        LinkState state({3s}, kStart);
        state.is_ours = true;
        for (int n = 1; n < tries; ++n) EXPECT_EQ(step(state, DialFailed{why}, kStart), LinkAction::None);
        EXPECT_EQ(step(state, DialFailed{why}, kStart), LinkAction::EndAsAbsent);
    }
}

TEST(LinkState, GivesADeadProcessAFewDialsWithinTheShortGrace) {
    LinkState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost), LinkAction::None);
    EXPECT_EQ(state.timer(), kLost + 3ms);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 2ms), LinkAction::None);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 3ms), LinkAction::Dial);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 15ms), LinkAction::EndAsLost);
}

TEST(LinkState, WaitsBeyondTheGraceForADialThatSomebodyHasAccepted) {
    LinkState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, Accepted{}, kLost + 1ms), LinkAction::None);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 15ms), LinkAction::None);
    EXPECT_EQ(step(state, DialFailed{kSlow}, kLost + 1s), LinkAction::None) << "a slow process lives";
    EXPECT_EQ(step(state, TimePassed{}, kLost + 1s), LinkAction::Dial);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost + 2s), LinkAction::EndAsLost);
}

TEST(LinkState, WaitsForAnUnreachableNetworkAsLongAsForSilence) {
    LinkState state = lost(Outage::Unreachable);
    EXPECT_EQ(step(state, DialFailed{kRefused}, kLost), LinkAction::None);
    EXPECT_EQ(state.timer(), kLost + 250ms);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 250ms), LinkAction::Dial);
    EXPECT_EQ(step(state, TimePassed{}, kLost + 3s), LinkAction::EndAsLost);
}

TEST(LinkState, DialsBesideASilentConnectionOnceAtATime) {
    LinkState state = joined();
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 999ms), LinkAction::None);
    EXPECT_EQ(state.check_at, kStart + 1s);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 1s), LinkAction::Dial);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, state.check_at), LinkAction::None);
    EXPECT_EQ(step(state, Closed{Outage::Broken}, kStart + 2s), LinkAction::Dial) << "the first got nowhere";
    EXPECT_EQ(step(state, Connected{}, kStart + 2s), LinkAction::None);
    EXPECT_EQ(state.timer(), kNever);
}

TEST(LinkState, EndsAfterTheWholeTimeoutOfSilence) {
    LinkState state = joined();
    (void)step(state, SilenceChecked{kStart}, kStart + 2800ms);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 3s), LinkAction::None);
    EXPECT_EQ(step(state, SilenceChecked{kStart}, kStart + 3s), LinkAction::EndAsSilent);
}

TEST(LinkState, EndsWhenTheControllerHasEndedTheSession) {
    LinkState state = lost(Outage::Broken);
    EXPECT_EQ(step(state, DialFailed{{Errc::StaleGeneration, "over", 0}}, kLost), LinkAction::EndAsRefused);
}

TEST(LinkState, TakesAConnectionClosedAfterItsOwnStandstillForASilentOne) {
    LinkState state = joined();
    (void)step(state, Beat{}, kStart + 1min);
    (void)step(state, Closed{Outage::Broken}, kStart + 1min + 1s);
    EXPECT_EQ(state.outage, Outage::Unreachable);
}

}  // namespace
}  // namespace ddprun::rdzv
