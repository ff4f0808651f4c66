#include <gtest/gtest.h>

#include "ddp/shm/waiting.h"

namespace {

using namespace ddp::cpu;
using ddprun::TimePoint;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr TimePoint kNow{seconds(1000)};
constexpr nanoseconds kNone{0};

Attention after_tries_in_vain(int count) {
    Attention attention;
    for (int i = 0; i < count; ++i) attention = after(attention, {false, allowed(attention, kNow)}, kNow);
    return attention;
}

TEST(Attention, BeginsWithTriesOfFullLength) { EXPECT_EQ(allowed({}, kNow), Attention::kMost); }

TEST(Attention, ShrinksWithEveryTryInVainUntilItSleepsAtOnce) {
    EXPECT_EQ(after_tries_in_vain(1).limit, Attention::kMost / 2);
    EXPECT_EQ(after_tries_in_vain(2).limit, Attention::kMost / 4);
    EXPECT_EQ(allowed(after_tries_in_vain(6), kNow), kNone);
}

TEST(Attention, GrowsWithEveryTryThatBringsSomething) {
    const Attention shorter{.limit = microseconds(5)};
    const Attention longer = after(shorter, {true, microseconds(1)}, kNow);
    EXPECT_EQ(longer.limit, microseconds(10));
    EXPECT_EQ(after(shorter, {true, microseconds(4)}, kNow).limit, microseconds(16))
        << "it was a close thing";
    EXPECT_EQ(after({}, {true, microseconds(90)}, kNow).limit, Attention::kMost) << "and never beyond";
}

TEST(Attention, IsOverAtOnceWhenTheCoreIsTakenAwayWhateverTheTryBrought) {
    for (const bool met : {false, true}) {
        const Attention resting = after({}, {met, milliseconds(3)}, kNow);
        EXPECT_EQ(allowed(resting, kNow), kNone);
        EXPECT_EQ(allowed(resting, kNow + milliseconds(100)), kNone) << "it was dear: not soon again";
        EXPECT_EQ(allowed(resting, kNow + milliseconds(200)), Attention::kMost);
    }
}

TEST(Attention, ComesBackWithOneTrialThatBringsSomething) {
    const Attention resting = after({}, {false, milliseconds(3)}, kNow);
    const TimePoint later = kNow + seconds(1);
    Attention attention = after(resting, {true, microseconds(1)}, later);
    EXPECT_EQ(attention.limit, microseconds(4));
    for (int i = 0; i < 5; ++i) attention = after(attention, {true, microseconds(1)}, later);
    EXPECT_EQ(attention.limit, Attention::kMost);
}

TEST(Attention, ThatNeverBringsAnythingTakesAFiftiethOfTheTimeAtMost) {
    for (const nanoseconds cost : {nanoseconds(microseconds(100)), nanoseconds(milliseconds(4))}) {
        Attention attention;
        nanoseconds wasted{0};
        const TimePoint end = kNow + seconds(10);
        for (TimePoint now = kNow; now < end;
             now += microseconds(5)) {  // a wait every 5 us that a sleep ends
            const nanoseconds limit = allowed(attention, now);
            if (limit == kNone) continue;
            const nanoseconds took = std::max(limit, cost);
            wasted += took;
            now += took;
            attention = after(attention, {false, took}, now);
        }
        EXPECT_LT(wasted, (end - kNow) / Attention::kShareOfTime + 2 * cost + milliseconds(1));
        EXPECT_GT(wasted, milliseconds(100)) << "and it does try again";
    }
}

struct CountedPause {
    static constexpr int turns = 1;
    int* count;
    void operator()() const { ++*count; }
};

TEST(Attention, ThatRestsLooksOnceAndGoesToSleep) {
    Attention resting = after({}, {false, seconds(1)}, ddprun::MonotonicClock::now());
    int looks = 0, pauses = 0;
    EXPECT_FALSE(look_for(
        resting, [&] { return ++looks, false; }, CountedPause{&pauses}));
    EXPECT_EQ(looks, 1);
    EXPECT_EQ(pauses, 0);
    EXPECT_TRUE(look_for(
        resting, [] { return true; }, CountedPause{&pauses}));
}

TEST(Attention, EndsATryAtItsLimitAndRemembersIt) {
    Attention attention;
    int pauses = 0;
    EXPECT_FALSE(look_for(
        attention, [] { return false; }, CountedPause{&pauses}));
    EXPECT_GT(pauses, 0);
    EXPECT_LT(attention.limit, Attention::kMost);
}

}  // namespace
