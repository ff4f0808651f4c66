#include <gtest/gtest.h>

#include "rendezvous/session.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint kStart{1h};

TEST(Heartbeats, AreSpokenSixTimesWithinTheOneLimit) {
    EXPECT_EQ(Heartbeats{}.timeout, 3s);
    EXPECT_EQ(Heartbeats{}.interval, 500ms);
    EXPECT_EQ(Heartbeats{12s}.interval, 2s);
}

TEST(SilenceWatch, LooksAtTheEndOfTheTimeOutAndNotAtTheNextHeartbeat) {
    SilenceWatch watch({3s}, kStart);
    const TimePoint heard = kStart + 100ms;
    EXPECT_EQ(watch.look(kStart + 500ms, heard).next, kStart + 1000ms);
    EXPECT_EQ(watch.look(kStart + 1000ms, heard).next, kStart + 1500ms);
    EXPECT_EQ(watch.look(kStart + 3000ms, heard).next, heard + 3s);
}

TEST(SilenceWatch, LosesNobodyBeforeItHasReadWhatCameMeanwhile) {
    SilenceWatch watch({3s}, kStart);
    (void)watch.look(kStart + 2800ms, kStart);
    const SilenceWatch::Verdict first = watch.look(kStart + 3s, kStart);
    EXPECT_FALSE(first.are_lost);
    EXPECT_EQ(first.next, kStart + 3s) << "the next batch of events";
    EXPECT_FALSE(watch.look(kStart + 3s, kStart + 3s).are_lost) << "it was heard in between";
}

TEST(SilenceWatch, LosesWhoIsSilentAtTheSecondLookToo) {
    SilenceWatch watch({3s}, kStart);
    (void)watch.look(kStart + 2800ms, kStart);
    (void)watch.look(kStart + 3s, kStart);
    const SilenceWatch::Verdict second = watch.look(kStart + 3001ms, kStart);
    EXPECT_TRUE(second.are_lost);
    EXPECT_EQ(second.next, kStart + 3001ms) << "the next one may be due at the same time";
}

TEST(SilenceWatch, GivesTheOthersTimeWhenItWasAwayItself) {
    SilenceWatch watch({3s}, kStart);
    (void)watch.look(kStart + 500ms, kStart);
    const SilenceWatch::Verdict back = watch.look(kStart + 1min, kStart);
    EXPECT_FALSE(back.are_lost);
    EXPECT_EQ(back.next, kStart + 1min + 1s);
    EXPECT_TRUE(watch.look(kStart + 1min + 1s, kStart).are_lost) << "but not for ever";
}

TEST(SilenceWatch, WaitsForTheNextOneWhenNobodyIsThere) {
    SilenceWatch watch({3s}, kStart);
    const SilenceWatch::Verdict verdict = watch.look(kStart + 500ms, kNever);
    EXPECT_FALSE(verdict.are_lost);
    EXPECT_EQ(verdict.next, kStart + 1s);
}

}  // namespace
}  // namespace ddprun::rdzv
