#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "ddp/net/layout.h"

namespace {

using namespace ddp::net;
using ::testing::ElementsAre;

TEST(LayoutOfNodes, ListsRanksByNodeInTheOrderOfTheirFirstRank) {
    const Layout layout = Layout::of({7, 3, 7, 7, 3}, 4);
    EXPECT_THAT(layout.nodes, ElementsAre(ElementsAre(0, 2, 3), ElementsAre(1, 4)));
    EXPECT_EQ(layout.node(), 1U);
    EXPECT_EQ(layout.place(), 1U);
    EXPECT_EQ(layout.lanes(), 2U);
    EXPECT_EQ(layout.holder(3, 1), 0U) << "the third rank of three, on a node of two";
    EXPECT_EQ(layout.holder(3, 0), layout.place_of[3]) << "on its own node the rank itself";
}

TEST(TreeOfNodes, ReachesEveryNodeOnceFromEveryRoot) {
    for (std::uint32_t n = 1; n <= 17; ++n) {
        for (std::uint32_t root = 0; root < n; ++root) {
            std::set<std::uint32_t> reached{root};
            for (std::uint32_t node = 0; node < n; ++node) {
                for (const std::uint32_t child : children_in_tree(node, root, n)) {
                    EXPECT_EQ(parent_in_tree(child, root, n), node);
                    EXPECT_TRUE(reached.insert(child).second) << child << " of " << n;
                }
            }
            EXPECT_EQ(reached.size(), n);
        }
    }
}

TEST(RoundsBetweenNodes, AreScatteredOnlyForManyBytesAndMoreThanTwoNodes) {
    EXPECT_EQ(choose_rounds(1 << 20, 2), Rounds::AllToAll);
    EXPECT_EQ(choose_rounds(4096, 16), Rounds::AllToAll);
    EXPECT_EQ(choose_rounds(1 << 20, 3), Rounds::Scattered);
}

TEST(HeaderPayload, AreFewerForMoreNodes) {
    EXPECT_EQ(header_payload_bytes(2), 65536U);
    EXPECT_EQ(header_payload_bytes(3), 32768U);
    EXPECT_EQ(header_payload_bytes(1000), kInlineBytes);
}

}  // namespace
