#include "env/line_budget.h"

#include <gtest/gtest.h>

namespace ddprun {
namespace {

using namespace std::chrono_literals;

constexpr TimePoint t0{1000s};

LineBudget three_lines() { return LineBudget("connections", {3, 10s}); }

/// Takes `count` lines at `now`; returns the written ones.
std::vector<std::string> flood(LineBudget& budget, int lines, TimePoint now) {
    std::vector<std::string> written;
    for (int i = 0; i < lines; ++i) {
        if (const auto line = budget.take("closed 10.0.0." + std::to_string(i), now))
            written.push_back(*line);
    }
    return written;
}

TEST(LineBudget, WritesAFewLinesUnchanged) {
    LineBudget budget = three_lines();
    EXPECT_EQ(flood(budget, 3, t0),
              (std::vector<std::string>{"closed 10.0.0.0", "closed 10.0.0.1", "closed 10.0.0.2"}));
    EXPECT_EQ(budget.due(), kNever) << "nothing is held back";
    EXPECT_FALSE(budget.total());
}

TEST(LineBudget, WritesOneLinePerIntervalWithTheCountOfAFlood) {
    LineBudget budget = three_lines();
    EXPECT_EQ(flood(budget, 1000, t0).size(), 3U);
    EXPECT_EQ(budget.due(), t0 + 10s);
    EXPECT_FALSE(budget.sum_up(t0 + 9s)) << "not yet";
    EXPECT_EQ(
        flood(budget, 1000, t0 + 10s),
        (std::vector<std::string>{"connections: 997 more lines like this one in 10 s: closed 10.0.0.999"}));
    EXPECT_EQ(flood(budget, 1000, t0 + 20s).size(), 1U) << "no new allowance before an interval was quiet";
}

TEST(LineBudget, WritesTheSumEvenIfNoOtherLineArrives) {
    LineBudget budget = three_lines();
    flood(budget, 5, t0);
    ASSERT_TRUE(budget.sum_up(budget.due()));
    EXPECT_EQ(budget.due(), kNever);
    EXPECT_FALSE(budget.sum_up(t0 + 100s));
}

TEST(LineBudget, WritesLinesUnchangedAgainAfterAQuietInterval) {
    LineBudget budget = three_lines();
    flood(budget, 5, t0);
    budget.sum_up(t0 + 10s);
    EXPECT_EQ(flood(budget, 3, t0 + 20s).size(), 3U);
}

TEST(LineBudget, WritesASingleHeldBackLineItself) {
    LineBudget budget = three_lines();
    flood(budget, 4, t0);
    EXPECT_EQ(budget.sum_up(t0 + 10s), "closed 10.0.0.3");
    EXPECT_FALSE(budget.total()) << "all four were written";
}

TEST(LineBudget, LosesNothingInTheTotal) {
    LineBudget budget = three_lines();
    flood(budget, 1000, t0);
    flood(budget, 1000, t0 + 10s);
    EXPECT_EQ(budget.total(), "connections: 2000 lines in all, 1996 of them not shown");
}

}  // namespace
}  // namespace ddprun
