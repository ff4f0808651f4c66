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

SpinBudget after_tries_in_vain(int count) {
    SpinBudget budget;
    for (int i = 0; i < count; ++i) budget = update_budget(budget, {false, allowed_spin(budget, kNow)}, kNow);
    return budget;
}

TEST(SpinBudget, BeginsWithTheLongestSpin) { EXPECT_EQ(allowed_spin({}, kNow), SpinBudget::kLongest); }

TEST(SpinBudget, ShrinksWithEveryFailureUntilItSleepsAtOnce) {
    EXPECT_EQ(after_tries_in_vain(1).limit, SpinBudget::kLongest / 2);
    EXPECT_EQ(after_tries_in_vain(2).limit, SpinBudget::kLongest / 4);
    EXPECT_EQ(allowed_spin(after_tries_in_vain(6), kNow), kNone);
}

TEST(SpinBudget, GrowsWithEverySuccess) {
    const SpinBudget shorter{.limit = microseconds(5)};
    const SpinBudget longer = update_budget(shorter, {true, microseconds(1)}, kNow);
    EXPECT_EQ(longer.limit, microseconds(10));
    EXPECT_EQ(update_budget(shorter, {true, microseconds(4)}, kNow).limit, microseconds(16))
        << "the spin took most of the limit";
    EXPECT_EQ(update_budget({}, {true, microseconds(90)}, kNow).limit, SpinBudget::kLongest)
        << "the longest spin is the limit";
}

TEST(SpinBudget, IsZeroWhenTheCoreWasLostWhateverTheResult) {
    for (const bool met : {false, true}) {
        const SpinBudget resting = update_budget({}, {met, milliseconds(3)}, kNow);
        EXPECT_EQ(allowed_spin(resting, kNow), kNone);
        EXPECT_EQ(allowed_spin(resting, kNow + milliseconds(100)), kNone)
            << "an expensive spin is not repeated soon";
        EXPECT_EQ(allowed_spin(resting, kNow + milliseconds(200)), SpinBudget::kLongest);
    }
}

TEST(SpinBudget, ReturnsAfterOneSuccessfulTrial) {
    const SpinBudget resting = update_budget({}, {false, milliseconds(3)}, kNow);
    const TimePoint later = kNow + seconds(1);
    SpinBudget budget = update_budget(resting, {true, microseconds(1)}, later);
    EXPECT_EQ(budget.limit, microseconds(4));
    for (int i = 0; i < 5; ++i) budget = update_budget(budget, {true, microseconds(1)}, later);
    EXPECT_EQ(budget.limit, SpinBudget::kLongest);
}

TEST(SpinBudget, UsesAFiftiethOfTheTimeAtMostWhenSpinsFail) {
    for (const nanoseconds cost : {nanoseconds(microseconds(100)), nanoseconds(milliseconds(4))}) {
        SpinBudget budget;
        nanoseconds wasted{0};
        const TimePoint end = kNow + seconds(10);
        for (TimePoint now = kNow; now < end;
             now += microseconds(5)) {  // a wait every 5 us that a sleep ends
            const nanoseconds limit = allowed_spin(budget, now);
            if (limit == kNone) continue;
            const nanoseconds took = std::max(limit, cost);
            wasted += took;
            now += took;
            budget = update_budget(budget, {false, took}, now);
        }
        EXPECT_LT(wasted, (end - kNow) / SpinBudget::kShareOfTime + 2 * cost + milliseconds(1));
        EXPECT_GT(wasted, milliseconds(100)) << "trials go on";
    }
}

struct CountedPause {
    static constexpr int turns = 1;
    int* count;
    void operator()() const { ++*count; }
};

TEST(SpinBudget, ChecksOnceAndSleepsWhileItIsZero) {
    SpinBudget resting = update_budget({}, {false, seconds(1)}, ddprun::MonotonicClock::now());
    int looks = 0, pauses = 0;
    EXPECT_FALSE(spin_until(
        resting, [&] { return ++looks, false; }, CountedPause{&pauses}));
    EXPECT_EQ(looks, 1);
    EXPECT_EQ(pauses, 0);
    EXPECT_TRUE(spin_until(
        resting, [] { return true; }, CountedPause{&pauses}));
}

TEST(SpinBudget, EndsASpinAtItsLimitAndUpdatesItself) {
    SpinBudget budget;
    int pauses = 0;
    EXPECT_FALSE(spin_until(
        budget, [] { return false; }, CountedPause{&pauses}));
    EXPECT_GT(pauses, 0);
    EXPECT_LT(budget.limit, SpinBudget::kLongest);
}

}  // namespace
