#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/group/split.h"
#include "ddp/testing.h"

namespace {

using namespace ddp;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

double sum_over(ProcessGroup& group, double value) {
    std::vector<double> values{value};
    group.all_reduce(buffer_of(std::span(values))).wait();
    return values[0];
}

TEST(Division, OrdersByKeyAndThenByRank) {
    const std::vector<SplitRequest> requests{{1, 5}, {0, 0}, {1, 2}, {1, 5}, {-1, 0}};
    EXPECT_THAT(members_of(1, requests), ElementsAre(2, 0, 3));
    EXPECT_THAT(members_of(0, requests), ElementsAre(1));
    EXPECT_THAT(members_of(7, requests), IsEmpty());
}

TEST(Split, MakesAGroupPerColorInTheOrderOfTheKeys) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [ranks](ProcessGroup& world) {
            const auto half = world.split(world.rank() % 2, -world.rank());
            ASSERT_NE(half, nullptr);
            const int others = (ranks + (world.rank() % 2 == 0 ? 1 : 0)) / 2;
            EXPECT_EQ(half->size(), others);
            EXPECT_EQ(half->rank(), others - 1 - world.rank() / 2);
            double expected = 0;
            for (int r = world.rank() % 2; r < ranks; r += 2) expected += r;
            EXPECT_EQ(sum_over(*half, world.rank()), expected);
            EXPECT_EQ(sum_over(world, 1), ranks);
        });
    }
}

TEST(Split, GivesRanksOfANegativeColorNoGroup) {
    run_ranks(3, [](ProcessGroup& world) {
        const auto part = world.split(world.rank() == 1 ? -1 : 4, 0);
        EXPECT_EQ(part == nullptr, world.rank() == 1);
        if (part) {
            EXPECT_EQ(sum_over(*part, 10), 20);
        }
    });
}

TEST(CreatePart, IsCalledByItsMembersOnlyInTheirOrder) {
    run_ranks(4, [](ProcessGroup& world) {
        if (world.rank() % 2 == 0) return;  // and makes no call at all
        const auto pair = world.create_part({3, 1}, "pair");
        EXPECT_EQ(pair->size(), 2);
        EXPECT_EQ(pair->rank(), world.rank() == 3 ? 0 : 1);
        EXPECT_EQ(sum_over(*pair, world.rank()), 4);
    });
}

TEST(CreatePart, MayOverlapAnotherAndOutliveItsParent) {
    run_ranks(5, [](ProcessGroup& world) {
        std::unique_ptr<ProcessGroup> first, second;
        if (world.rank() <= 2) first = world.create_part({0, 1, 2}, "first");
        if (world.rank() >= 2) second = world.create_part({2, 3, 4}, "second");
        const auto alone = world.create_part({world.rank()}, "alone");
        EXPECT_EQ(sum_over(world, 1), 5);
        if (first) {
            EXPECT_EQ(sum_over(*first, world.rank()), 3);
            const auto within = first->rank() == 1 ? nullptr : first->create_part({2, 0}, "within");
            first.reset();
            if (within) {
                EXPECT_EQ(sum_over(*within, world.rank()), 2);
            }
        }
        if (second) {
            EXPECT_EQ(sum_over(*second, world.rank()), 9);
        }
        EXPECT_EQ(sum_over(*alone, 7), 7);
    });
}

TEST(CreatePart, NamesBothSidesWhenMembersDisagreeAndKeepsTheGroup) {
    run_ranks(2, [](ProcessGroup& world) {
        try {
            (void)world.create_part({0, 1}, world.rank() == 0 ? "left" : "right");
            ADD_FAILURE() << "rank " << world.rank() << " made a group";
        } catch (const MismatchError& error) {
            EXPECT_THAT(error.what(), HasSubstr("'left' of ranks 0, 1"));
            EXPECT_THAT(error.what(), HasSubstr("'right' of ranks 0, 1"));
        }
        EXPECT_EQ(sum_over(world, 1), 2);
    });
}

TEST(CreatePart, RefusesRanksThatMakeNoGroup) {
    run_ranks(2, [](ProcessGroup& world) {
        const int me = world.rank();
        for (const std::vector<int>& ranks : {std::vector<int>{}, {1 - me}, {me, me}, {me, 2}, {-1, me}})
            EXPECT_THROW((void)world.create_part(ranks, "none"), InvalidInput);
    });
}

TEST(Split, CanBeSplitAgainAndOutlivesItsParent) {
    run_ranks(6, [](ProcessGroup& world) {
        auto half = world.split(world.rank() / 3, world.rank());
        const auto single = half->split(half->rank() == 0 ? 0 : 1, 0);
        half.reset();
        EXPECT_EQ(sum_over(*single, 1), single->size());
        EXPECT_EQ(single->size(), world.rank() % 3 == 0 ? 1 : 2);
    });
}

TEST(Split, RunsEveryCollectiveOnItsOwnRanks) {
    run_ranks(4, [](ProcessGroup& world) {
        const auto pair = world.split(world.rank() / 2, 0);
        const float base = world.rank() < 2 ? 0.0F : 10.0F;
        std::vector<float> one{base + static_cast<float>(pair->rank())}, both(2), back(1);
        pair->all_gather(buffer_of(std::span(both)), buffer_of(std::span(one))).wait();
        EXPECT_THAT(both, ElementsAre(base, base + 1));
        pair->reduce_scatter(buffer_of(std::span(back)), buffer_of(std::span(both))).wait();
        EXPECT_EQ(back[0], 2 * both[static_cast<std::size_t>(pair->rank())]);
        pair->broadcast(buffer_of(std::span(one)), 1).wait();
        EXPECT_EQ(one[0], base + 1);
        pair->rank() == 0 ? pair->send(buffer_of(std::span(back)), 1).wait()
                          : pair->recv(buffer_of(std::span(back)), 0).wait();
        EXPECT_EQ(back[0], 2 * base);
        const auto region = pair->allocate_shared(1 << 20);
        const std::span values(reinterpret_cast<float*>(region.data()), 1 << 18);
        std::fill(values.begin(), values.end(), base);
        pair->all_reduce(buffer_of(values)).wait();
        EXPECT_EQ(values[12345], 2 * base);
        EXPECT_THAT(pair->all_gather_bytes(std::string(1, static_cast<char>('a' + world.rank()))),
                    world.rank() < 2 ? ElementsAre("a", "b") : ElementsAre("c", "d"));
    });
}

TEST(Split, FreesItsShareSoThatAnyNumberMayFollow) {
    run_ranks(2, [](ProcessGroup& world) {
        for (int round = 0; round < 100; ++round) {
            const auto part = world.split(0, 0);
            const auto region = part->allocate_shared(5000);
            ASSERT_EQ(region[17], std::byte{0}) << "memory of an earlier group";
            region[17] = std::byte{1};
            ASSERT_EQ(sum_over(*part, 1), 2);
        }
    });
}

TEST(Split, RefusesTooManyGroupsOnAllRanksAndKeepsTheOthers) {
    run_ranks(3, [](ProcessGroup& world) {
        std::vector<std::unique_ptr<ProcessGroup>> kept;
        for (int made = 0; made < 16; ++made) kept.push_back(world.split(world.rank(), 0));  // 3 each time
        try {
            world.split(world.rank(), 0);
            ADD_FAILURE() << "48 groups and 3 more";
        } catch (const InvalidInput& error) {
            EXPECT_THAT(error.what(), HasSubstr("48 sub-groups"));
        }
        EXPECT_EQ(sum_over(*kept.back(), 2), 2);
        world.barrier().wait();
        kept.clear();
        world.barrier().wait();
        EXPECT_NE(world.split(0, 0), nullptr);
    });
}

TEST(Split, NamesRanksOfTheWorldInErrors) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::milliseconds(200);
    const auto failures = failures_of_ranks(
        4,
        [](ProcessGroup& world) {
            const auto pair = world.split(world.rank() / 2, 0);
            if (world.rank() == 3) {
                world.barrier().wait();
                return;
            }
            if (world.rank() == 2) pair->barrier().wait();
        },
        options);
    ASSERT_TRUE(failures[2]);
    try {
        std::rethrow_exception(failures[2]);
    } catch (const std::exception& error) {
        EXPECT_THAT(
            error.what(),
            HasSubstr("rank 2: barrier #1 did not finish within 200 ms: rank 3 missing: rank 3 has called "
                      "no collective yet"));
    }
}

TEST(Split, CountsAllRanksOfTheNodeForItsCores) {
    // 4 ranks on 1 core, in parts of 1 and 3: a part that counts only its own ranks would see a core per
    // rank.
    ddp::testing::RankOptions options;
    options.cpus = 1;
    run_ranks(
        4,
        [](ProcessGroup& world) {
            EXPECT_THAT(world.describe(), HasSubstr("waiting by sleeping"));
            const auto part = world.split(world.rank() == 0 ? 0 : 1, 0);
            EXPECT_EQ(part->describe(), world.describe());
            EXPECT_EQ(part->split(part->rank(), 0)->describe(), world.describe());
        },
        options);
}

// Runs every collective in parts of a node with more ranks than cores.
TEST(Split, WorksOnOverloadedCores) {
    ddp::testing::RankOptions options;
    options.cpus = 2;
    run_ranks(
        8,
        [](ProcessGroup& world) {
            const auto half = world.split(world.rank() % 2, 0);
            for (int round = 0; round < 50; ++round) {
                ASSERT_EQ(sum_over(*half, world.rank() + round),
                          half->size() * (round + 3 + world.rank() % 2));
                std::vector<std::int64_t> mine(20'000, world.rank()), all(80'000);
                half->all_gather(buffer_of(std::span(all)), buffer_of(std::span(mine))).wait();
                for (int r = 0; r < 4; ++r)
                    ASSERT_EQ(all[static_cast<std::size_t>(r) * 20'000 + 19'999], 2 * r + world.rank() % 2);
                std::vector<std::int64_t> turned(80'000);
                half->all_to_all(buffer_of(std::span(turned)), buffer_of(std::span(all))).wait();
                ASSERT_EQ(turned[25'000], 2 * half->rank() + world.rank() % 2);
            }
            ASSERT_EQ(sum_over(world, 1), 8);
        },
        options);
}

TEST(Split, HasAProgressThreadLikeItsParent) {
    ddp::testing::RankOptions options;
    options.group.progress = ProcessGroupOptions::Progress::Thread;
    run_ranks(
        4,
        [](ProcessGroup& world) {
            const auto pair = world.split(world.rank() % 2, 0);
            EXPECT_THAT(pair->describe(), HasSubstr("progress thread"));
            EXPECT_EQ(sum_over(*pair, 3), 6);
        },
        options);
}

}  // namespace
