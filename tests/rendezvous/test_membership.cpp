#include <gtest/gtest.h>

#include "rendezvous/serve/membership.h"

namespace ddprun::rdzv {
namespace {

using namespace std::chrono_literals;

const TimePoint t0{1000s};

MembershipSpec fixed(int nodes) { return {nodes, nodes, 600s, 30s}; }
MembershipSpec elastic(int min, int max) { return {min, max, 600s, 30s}; }
Joiner node(const std::string& host, std::optional<int> node_rank = std::nullopt) {
    return {host, 100, node_rank, 4};
}

std::vector<AgentId> agents(const std::vector<Membership::Member>& world) {
    std::vector<AgentId> ids;
    for (const auto& member : world) ids.push_back(member.agent);
    return ids;
}

TEST(Membership, ReportsWhatItWaitsFor) {
    Membership job(fixed(3), t0);
    ASSERT_TRUE(job.join(1, node("a"), t0));
    const Verdict verdict = job.decide(t0 + 10s);
    EXPECT_EQ(verdict.kind, Verdict::Wait);
    EXPECT_EQ(verdict.why, "1 of 3 nodes joined, 9 min 50 s left");
    EXPECT_EQ(job.next_change(t0 + 10s), t0 + 600s);
}

TEST(Membership, IsReadyAtOnceWhenAllNodesHaveJoined) {
    Membership job(fixed(2), t0);
    ASSERT_TRUE(job.join(1, node("a"), t0));
    ASSERT_TRUE(job.join(2, node("b"), t0));
    EXPECT_EQ(job.decide(t0).kind, Verdict::Ready);
    EXPECT_EQ(job.next_change(t0), kNever);
}

TEST(Membership, FailsAfterTheJoinTimeoutNamingTheMissingNodeRanks) {
    Membership job(fixed(4), t0);
    ASSERT_TRUE(job.join(1, node("a", 0), t0));
    ASSERT_TRUE(job.join(2, node("c", 2), t0));
    EXPECT_EQ(job.decide(t0 + 600s - 1ns).kind, Verdict::Wait);
    EXPECT_EQ(job.missing_ranks(), "; missing: node rank 1, 3");
    const Verdict verdict = job.decide(t0 + 600s);
    EXPECT_EQ(verdict.kind, Verdict::Failed);
    EXPECT_EQ(verdict.why, "2 of 4 nodes joined within 10 min; missing: node rank 1, 3");
}

TEST(Membership, OrdersTheFirstWorldByNodeRankElseByHostName) {
    for (const bool y_is_first : {false, true}) {
        Membership job(fixed(4), t0);
        for (const AgentId id : y_is_first ? std::vector<AgentId>{13, 11} : std::vector<AgentId>{11, 13})
            ASSERT_TRUE(job.join(id, node(id == 11 ? "x" : "y"), t0));
        ASSERT_TRUE(job.join(12, node("head", 0), t0));
        ASSERT_TRUE(job.join(14, node("z", 2), t0));
        EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{12, 11, 14, 13})) << y_is_first;
    }
}

TEST(Membership, OrdersHostNamesByTheirNumbers) {
    const std::vector<std::string> ordered{"gpu-2-10", "gpu-10-1", "n",   "n0",     "n02",
                                           "n2",       "n9.site",  "n10", "n10-ib", "n18446744073709551616",
                                           "na"};
    Membership job(fixed(static_cast<int>(ordered.size())), t0);
    for (std::size_t i = ordered.size(); i-- > 0;) ASSERT_TRUE(job.join(i + 1, node(ordered[i]), t0));
    std::vector<std::string> hosts;
    for (const Membership::Member& member : job.settle()) hosts.push_back(member.joiner.host);
    EXPECT_EQ(hosts, ordered);
}

TEST(Membership, NodesOfOneHostKeepTheOrderInWhichTheyJoined) {
    Membership job(fixed(3), t0);
    for (const AgentId id : {7, 5, 6}) ASSERT_TRUE(job.join(id, node(id == 6 ? "a" : "b"), t0));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{6, 7, 5}));
}

TEST(Membership, LaterPlacesGoToNodesInTheOrderInWhichTheyJoined) {
    Membership job(fixed(2), t0);
    for (AgentId id = 1; id <= 2; ++id) ASSERT_TRUE(job.join(id, node("b" + std::to_string(id)), t0));
    job.settle();
    ASSERT_TRUE(job.join(3, node("c"), t0));
    ASSERT_TRUE(job.join(4, node("a"), t0));
    job.leave(1, t0);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{3, 2}));
}

/// With so many nodes an algorithm that visits all nodes or places for each node takes minutes, and exceeds
/// the time limit of the test program.
TEST(Membership, SixteenThousandNodesJoinWithADecisionAfterEach) {
    constexpr int kNodes = 16384;
    Membership job(fixed(kNodes), t0);
    for (int i = kNodes - 1; i >= 0; --i) {
        EXPECT_EQ(job.decide(t0).kind, Verdict::Wait);
        ASSERT_TRUE(job.join(static_cast<AgentId>(kNodes - i), node("n" + std::to_string(i), i), t0));
    }
    EXPECT_EQ(job.decide(t0).kind, Verdict::Ready);
    const std::vector<Membership::Member> world = job.settle();
    ASSERT_EQ(world.size(), static_cast<std::size_t>(kNodes));
    EXPECT_EQ(world.front().joiner.host, "n0");
    EXPECT_EQ(world.back().joiner.host, "n16383");
    for (int i = 0; i < kNodes; ++i) job.leave(static_cast<AgentId>(i + 1), t0);
    EXPECT_EQ(job.joined(), 0);
}

TEST(Membership, ANodeRankIsFreeAfterItsNodeHasLeft) {
    Membership job(fixed(3), t0);
    ASSERT_TRUE(job.join(1, node("a", 0), t0));
    ASSERT_TRUE(job.join(2, node("b", 1), t0));
    EXPECT_FALSE(job.join(3, node("c", 1), t0));
    job.leave(2, t0);
    EXPECT_EQ(job.missing_ranks(), "; missing: node rank 1-2");
    ASSERT_TRUE(job.join(4, node("c", 1), t0));
    EXPECT_EQ(job.missing_ranks(), "; missing: node rank 2");
}

TEST(Membership, RefusesASecondNodeWithTheSameRankNamingBoth) {
    Membership job(fixed(2), t0);
    ASSERT_TRUE(job.join(1, {"node07", 12, 1, 4}, t0));
    const Status twin = job.join(2, {"node09", 44, 1, 4}, t0);
    ASSERT_FALSE(twin);
    EXPECT_EQ(twin.error(),
              (Error{Errc::Mismatch, "node rank 1 is claimed by node07 (pid 12) and by node09 (pid 44)", 0}));
    EXPECT_EQ(job.joined(), 1);
}

TEST(Membership, ANodeStartedAgainBeforeItsLossIsNoticedHasItsRankAfterIt) {
    Membership job(fixed(2), t0);
    ASSERT_TRUE(job.join(1, node("a", 0), t0));
    ASSERT_TRUE(job.join(2, node("b", 1), t0));
    job.settle();
    ASSERT_TRUE(job.join(3, node("b", 1), t0));
    EXPECT_EQ(job.spares(), std::vector<AgentId>{3});
    EXPECT_FALSE(job.join(4, node("c", 1), t0)) << "another host never has its place";
    job.leave(2, t0);
    EXPECT_FALSE(job.join(4, node("c", 1), t0));
    const std::vector<Membership::Member> world = job.settle();
    ASSERT_EQ(world.size(), 2U);
    EXPECT_EQ(world[1].agent, 3U);
    EXPECT_EQ(world[1].place, 1);
}

TEST(Membership, RefusesNegativeNodeRanksAndNodesWithoutWorkers) {
    Membership job(fixed(2), t0);
    EXPECT_EQ(job.join(1, node("a", -1), t0).error().code, Errc::InvalidArgument);
    EXPECT_EQ(job.join(1, {"a", 1, std::nullopt, 0}, t0).error().code, Errc::InvalidArgument);
    EXPECT_EQ(job.joined(), 0);
}

TEST(Membership, RefusesANodeWithDifferentOptionsWithATableOfBoth) {
    MembershipSpec spec = fixed(2);
    spec.head = "node00";
    spec.terms = {"ddprun=0.1.0", "--nnodes=2:4", "program of role default=train.py"};
    Membership job(spec, t0);
    Joiner joiner = node("node03");
    joiner.terms = {"ddprun=0.1.0", "--nnodes=3:3", "program of role default=eval.py", "--fabric=ib"};
    EXPECT_EQ(job.join(2, joiner, t0).error(),
              (Error{Errc::Mismatch,
                     "node03 (pid 100) was started otherwise than this job:\n"
                     "                           this job (node00)  node03\n"
                     "  --nnodes                 2:4                3:3\n"
                     "  program of role default  train.py           eval.py",
                     0}));
    joiner.terms = {"ddprun=0.1.0", "--nnodes=2:4", "program of role reader=read.py"};
    EXPECT_TRUE(job.join(2, joiner, t0)) << "another role runs another program";
    EXPECT_EQ(job.join(3, node("node04"), t0).error().code, Errc::Mismatch)
        << "who says nothing does not agree";
}

TEST(Membership, WaitsForTheLastCallWhenEnoughNodesHaveJoined) {
    Membership job(elastic(2, 4), t0);
    ASSERT_TRUE(job.join(1, node("a"), t0));
    ASSERT_TRUE(job.join(2, node("b"), t0 + 5s));
    EXPECT_EQ(job.decide(t0 + 5s).kind, Verdict::Wait);
    EXPECT_EQ(job.next_change(t0 + 5s), t0 + 35s);
    EXPECT_EQ(job.decide(t0 + 34s).why, "2 nodes joined, enough to start; waiting 1 s for up to 4");
    EXPECT_EQ(job.decide(t0 + 35s).kind, Verdict::Ready);
    EXPECT_EQ(job.next_change(t0 + 35s), kNever);
}

TEST(Membership, BeginsTheLastCallAgainWhenANodeLeavesBeforeTheStart) {
    Membership job(elastic(2, 4), t0);
    ASSERT_TRUE(job.join(1, node("a"), t0));
    ASSERT_TRUE(job.join(2, node("b"), t0));
    job.leave(1, t0 + 20s);
    EXPECT_EQ(job.decide(t0 + 40s).kind, Verdict::Wait);
    ASSERT_TRUE(job.join(3, node("c"), t0 + 40s));
    EXPECT_EQ(job.decide(t0 + 69s).kind, Verdict::Wait);
    EXPECT_EQ(job.decide(t0 + 70s).kind, Verdict::Ready);
}

TEST(Membership, GivesAFreePlaceToTheHostThatReturns) {
    Membership job(fixed(3), t0);
    for (const auto& [id, host] : {std::pair(1, "a"), std::pair(2, "b"), std::pair(3, "c")}) {
        ASSERT_TRUE(job.join(static_cast<AgentId>(id), node(host), t0));
    }
    job.settle();
    job.leave(1, t0 + 60s);
    job.leave(2, t0 + 60s);
    job.reopen(t0 + 60s, 600s);
    ASSERT_TRUE(job.join(4, node("b"), t0 + 61s));
    ASSERT_TRUE(job.join(5, node("a"), t0 + 62s));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{5, 4, 3}));
}

TEST(Membership, GivesAFreePlaceToASpareWhileOthersKeepTheirRanks) {
    Membership job(fixed(3), t0);
    for (AgentId id = 1; id <= 4; ++id) ASSERT_TRUE(job.join(id, node("host" + std::to_string(id)), t0));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 2, 3}));
    EXPECT_EQ(job.spares(), std::vector<AgentId>{4});
    job.leave(2, t0 + 60s);
    job.reopen(t0 + 60s, 600s);
    EXPECT_EQ(job.decide(t0 + 60s).kind, Verdict::Ready);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 4, 3}));
    EXPECT_TRUE(job.spares().empty());
}

TEST(Membership, RenumbersRanksWhenAPlaceStaysFree) {
    Membership job(elastic(2, 4), t0);
    for (AgentId id = 1; id <= 4; ++id) ASSERT_TRUE(job.join(id, node("host" + std::to_string(id)), t0));
    job.settle();
    job.leave(2, t0 + 60s);
    job.reopen(t0 + 60s, 600s);
    EXPECT_EQ(job.decide(t0 + 90s).kind, Verdict::Ready);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 3, 4}));
}

TEST(Membership, AcceptsARequestedNodeRankAfterRanksWereRenumbered) {
    Membership job(elastic(2, 3), t0);
    for (int rank = 0; rank < 3; ++rank)
        ASSERT_TRUE(job.join(static_cast<AgentId>(rank + 1), node("h", rank), t0));
    job.settle();
    job.leave(2, t0 + 1s);
    job.reopen(t0 + 1s, 600s);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 3}));
    ASSERT_TRUE(job.join(9, node("h", 1), t0 + 2s));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 9, 3}));
}

TEST(Membership, ANodeThatReturnsAfterRanksWereRenumberedGetsItsPlaceBack) {
    Membership job(elastic(2, 4), t0);
    for (AgentId id = 1; id <= 4; ++id) ASSERT_TRUE(job.join(id, node("host" + std::to_string(id)), t0));
    job.settle();
    job.leave(2, t0 + 1s);
    job.reopen(t0 + 1s, 600s);
    job.settle();
    EXPECT_EQ(job.admissible(), 0);
    ASSERT_TRUE(job.join(9, node("host2"), t0 + 2s));
    EXPECT_EQ(job.admissible(), 1);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 9, 3, 4}));
}

TEST(Membership, AReturningNodeDoesNotDisplaceTheSpareInItsPlace) {
    Membership job(fixed(3), t0);
    for (int rank = 0; rank < 4; ++rank)
        ASSERT_TRUE(job.join(static_cast<AgentId>(rank + 1), node("h" + std::to_string(rank), rank), t0));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 2, 3}))
        << "a node rank beyond the last is a spare's";
    job.leave(2, t0);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 4, 3}));
    ASSERT_TRUE(job.join(9, node("h1", 1), t0));
    EXPECT_EQ(job.admissible(), 0);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 4, 3}));
    job.leave(3, t0);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 4, 9}));
}

TEST(Membership, FormsNoWorldWithoutTheHeadsNode) {
    MembershipSpec spec = elastic(1, 2);
    spec.awaits_head = true;
    Membership job(spec, t0);
    for (AgentId id = 1; id <= 3; ++id) ASSERT_TRUE(job.join(id, node("a"), t0));
    EXPECT_EQ(job.decide(t0 + 60s).kind, Verdict::Wait);
    Joiner head = node("head", 0);
    head.is_head = true;
    ASSERT_TRUE(job.join(4, head, t0 + 60s));
    EXPECT_EQ(job.decide(t0 + 60s).kind, Verdict::Ready);
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{4, 1}));
}

TEST(Membership, FormsANextWorldOfEnoughNodesWithoutALastCall) {
    Membership job(elastic(2, 4), t0);
    for (AgentId id = 1; id <= 3; ++id) ASSERT_TRUE(job.join(id, node("a"), t0));
    job.settle();
    job.leave(3, t0 + 60s);
    job.reopen(t0 + 60s, 600s);
    EXPECT_EQ(job.decide(t0 + 60s).kind, Verdict::Ready);
    job.leave(2, t0 + 61s);
    job.reopen(t0 + 61s, 600s);
    ASSERT_TRUE(job.join(4, node("b"), t0 + 70s));
    EXPECT_EQ(job.decide(t0 + 70s).kind, Verdict::Wait) << "too few for a while: where one comes, others may";
    EXPECT_EQ(job.decide(t0 + 100s).kind, Verdict::Ready);
}

TEST(Membership, NamesMissingNodesIfTheExpectedOnesAreKnown) {
    MembershipSpec spec = fixed(3);
    spec.hosts = {"head", "cn7", "cn8"};
    Membership job(spec, t0);
    ASSERT_TRUE(job.join(1, node("head", 0), t0));
    EXPECT_EQ(job.missing_ranks(), "; missing: cn7, cn8");
}

TEST(Membership, ReopeningGrantsAFullJoinTimeout) {
    Membership job(fixed(2), t0);
    ASSERT_TRUE(job.join(1, node("a"), t0));
    ASSERT_TRUE(job.join(2, node("b"), t0));
    job.settle();
    job.leave(2, t0 + 3600s);
    job.reopen(t0 + 3600s, 600s);
    EXPECT_EQ(job.decide(t0 + 4000s).kind, Verdict::Wait);
    EXPECT_EQ(job.decide(t0 + 4200s).kind, Verdict::Failed);
}

TEST(Membership, IgnoresUnknownAgents) {
    Membership job(fixed(1), t0);
    job.leave(77, t0);
    EXPECT_EQ(job.joined(), 0);
}

TEST(Membership, ANodeKeepsItsPlaceOfALostControllerIfItIsFree) {
    Membership job(elastic(2, 3), t0);
    const auto with_kept = [](const char* host, int place) {
        Joiner joiner = node(host);
        joiner.kept_place = place;
        return joiner;
    };
    ASSERT_TRUE(job.join(1, with_kept("c", 2), t0));
    ASSERT_TRUE(job.join(2, with_kept("b", 1), t0));
    ASSERT_TRUE(job.join(3, with_kept("x", 1), t0));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{3, 2, 1}))
        << "the lost head's place is for whoever has none";
}

TEST(Membership, NodesWithoutAPlaceUnderALostControllerFollowByHostName) {
    Membership job(elastic(2, 4), t0);
    Joiner standby = node("x");
    standby.kept_place = 0;
    for (const AgentId id : {3, 2}) ASSERT_TRUE(job.join(id, node("spare" + std::to_string(id)), t0));
    ASSERT_TRUE(job.join(1, standby, t0));
    EXPECT_EQ(agents(job.settle()), (std::vector<AgentId>{1, 2, 3}));
}

RankTable uneven() { return *RankTable::from({{"a", 2, "train"}, {"b", 1, "eval"}, {"c", 3, "train"}}); }

TEST(RankTable, NumbersWorkersNodeByNode) {
    const RankTable table = uneven();
    EXPECT_EQ(table.world_size(), 6);
    EXPECT_EQ(table.worker(0), (WorkerRanks{0, 0, 0, 0}));
    EXPECT_EQ(table.worker(1), (WorkerRanks{1, 1, 0, 1}));
    EXPECT_EQ(table.worker(2), (WorkerRanks{2, 0, 1, 0}));
    EXPECT_EQ(table.worker(3), (WorkerRanks{3, 0, 2, 2}));
    EXPECT_EQ(table.worker(5), (WorkerRanks{5, 2, 2, 4}));
}

TEST(RankTable, CountsRolesAcrossNodes) {
    const RankTable table = uneven();
    EXPECT_EQ(table.node(0), (NodeRanks{0, 0, 2, 0, 5}));
    EXPECT_EQ(table.node(1), (NodeRanks{1, 2, 1, 0, 1}));
    EXPECT_EQ(table.node(2), (NodeRanks{2, 3, 3, 2, 5}));
    EXPECT_EQ(table.host(2), "c");
}

TEST(RankTable, RefusesANodeWithoutWorkersAndAWorldTooLarge) {
    EXPECT_FALSE(RankTable::from({{"a", 1, "r"}, {"b", 0, "r"}}));
    EXPECT_FALSE(RankTable::from({{"a", -4, "r"}}));
    const Result<RankTable> huge = RankTable::from({{"a", 1 << 24, "r"}, {"b", 1, "r"}});
    ASSERT_FALSE(huge);
    EXPECT_NE(huge.error().what.find("b brings 1"), std::string::npos);
}

TEST(RankTable, AThousandNodesAreFoundByRank) {
    std::vector<NodeSlots> nodes;
    for (int i = 0; i < 1024; ++i) nodes.push_back({"n", 1 + i % 8, "r"});
    const RankTable table = *RankTable::from(nodes);
    int rank = 0;
    for (int node = 0; node < 1024; ++node) {
        for (int local = 0; local < 1 + node % 8; ++local, ++rank) {
            EXPECT_EQ(table.worker(rank), (WorkerRanks{rank, local, node, rank}));
        }
    }
    EXPECT_EQ(rank, table.world_size());
}

}  // namespace
}  // namespace ddprun::rdzv
