#include <gtest/gtest.h>

#include "rendezvous/serve/rank_table.h"

namespace ddprun::rdzv {
namespace {

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
