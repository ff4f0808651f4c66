#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <vector>

#include "ddp/recovery/transfer.h"

namespace ddp {

static void PrintTo(const Transfer& one, std::ostream* out) { *out << one.from << "->" << one.to; }

namespace {

using Rounds = std::vector<TransferRound>;

constexpr Holder kNew{}, kOld{.commits = 7, .is_whole = true}, kNewest{.commits = 8, .is_whole = true};

Holder on_node(std::uint32_t node, Holder holder) {
    holder.node = node;
    return holder;
}

std::vector<Holder> after(std::vector<Holder> ranks, const TransferRound& round) {
    for (const Transfer& one : round) ranks[one.to] = ranks[one.from];
    return ranks;
}

TEST(PlanTransfers, NeedsNoneWhereAllRanksHaveTheNewestState) {
    EXPECT_EQ(plan_transfers(std::vector{kNewest, kNewest}), Rounds{});
}

TEST(PlanTransfers, HasNoneWhereNobodyIsWhole) {
    const std::vector<Holder> ranks = {{.commits = 8}, {.commits = 8}};
    EXPECT_EQ(newest_state(ranks), 0u);
    EXPECT_EQ(plan_transfers(ranks), Rounds{});
}

TEST(PlanTransfers, TakesTheStateOfWholeRanksOnly) {
    EXPECT_EQ(newest_state(std::vector<Holder>{kOld, {.commits = 8}}), 7u);
}

TEST(PlanTransfers, ServesRanksWithoutAStateBeforeOlderOnes) {
    EXPECT_EQ(plan_transfers(std::vector{kOld, kNewest, kOld, kNew}), (Rounds{{{1, 3}}, {{1, 0}}, {{1, 2}}}));
}

TEST(PlanTransfers, LetsReceiversGiveInTheNextRound) {
    EXPECT_EQ(plan_transfers(std::vector{kNewest, kNew, kNew, kNew, kNew}),
              (Rounds{{{0, 1}}, {{0, 2}, {1, 3}}, {{0, 4}}}));
}

TEST(PlanTransfers, ServesAtMostHalfOfTheOlderRanksAtATime) {
    const std::vector<Holder> ranks = {kNewest, kNewest, kNewest, kNewest, kOld, kOld, kOld, kOld};
    EXPECT_EQ(plan_transfers(ranks), (Rounds{{{0, 4}, {1, 5}}, {{0, 6}, {1, 7}}}));
}

TEST(PlanTransfers, PrefersAHolderOfTheReceiversNode) {
    const std::vector<Holder> ranks = {on_node(0, kNewest), on_node(1, kNewest), on_node(1, kNew),
                                       on_node(0, kNew)};
    EXPECT_EQ(plan_transfers(ranks), (Rounds{{{0, 3}, {1, 2}}}));
}

TEST(PlanTransfers, SendsTheStateToANodeOnce) {
    const std::vector<Holder> ranks = {on_node(0, kNewest), on_node(0, kNewest), on_node(1, kNew),
                                       on_node(1, kNew),    on_node(2, kNew),    on_node(1, kNew)};
    EXPECT_EQ(plan_transfers(ranks), (Rounds{{{0, 2}, {1, 4}}, {{2, 3}}, {{2, 5}}}));
}

/// Ranks that take part in a round as receivers are not whole, and the lost rank is gone.
bool some_are_whole_without(const std::vector<Holder>& ranks, const TransferRound& round, std::size_t lost) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const bool receives =
            std::any_of(round.begin(), round.end(), [&](const Transfer& one) { return one.to == rank; });
        if (rank != lost && ranks[rank].is_whole && !receives) return true;
    }
    return false;
}

TEST(PlanTransfers, LeavesAWholeRankWhicheverRankIsLostInAnyRound) {
    for (unsigned code = 0; code < 3 * 3 * 3 * 3 * 3; ++code) {
        std::vector<Holder> ranks;
        for (unsigned rest = code, i = 0; i < 5; ++i, rest /= 3)
            ranks.push_back(on_node(i / 2, rest % 3 == 0 ? kNew : rest % 3 == 1 ? kOld : kNewest));
        const auto whole =
            std::count_if(ranks.begin(), ranks.end(), [](const Holder& one) { return one.is_whole; });
        for (const TransferRound& round : plan_transfers(ranks)) {
            for (std::size_t lost = 0; whole > 1 && lost < ranks.size(); ++lost)
                EXPECT_TRUE(some_are_whole_without(ranks, round, lost))
                    << "code " << code << ", rank " << lost;
            ranks = after(std::move(ranks), round);
        }
        for (const Holder& one : ranks) EXPECT_EQ(one.commits, newest_state(ranks)) << "code " << code;
    }
}

}  // namespace
}  // namespace ddp
