#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "ddp/sampler.h"
#include "ddp/types.h"

namespace {

using ddp::DistributedSampler;
using ddp::SamplerOptions;
using Indices = std::vector<std::size_t>;

Indices indices(std::size_t n, int world, int rank, SamplerOptions options, std::uint64_t epoch = 0) {
    DistributedSampler sampler(n, world, rank, options);
    sampler.set_epoch(epoch);
    const Indices mine = sampler.indices();
    EXPECT_EQ(sampler.size(), mine.size());
    return mine;
}

std::uint64_t fnv1a(const Indices& values) {
    std::uint64_t hash = 0xcbf29ce484222325;
    for (const std::size_t value : values) hash = (hash ^ value) * 0x100000001b3;
    return hash;
}

constexpr SamplerOptions kInOrder = {.shuffle = false, .seed = 0, .drop_last = false};

// The golden vectors come from torch.utils.data.DistributedSampler of torch 2.15.0.

TEST(DistributedSampler, GivesPyTorchsIndices) {
    EXPECT_EQ(indices(10, 3, 0, {}), (Indices{4, 5, 0, 2}));
    EXPECT_EQ(indices(10, 3, 1, {}), (Indices{1, 3, 8, 4}));
    EXPECT_EQ(indices(10, 3, 2, {}), (Indices{7, 9, 6, 1}));
    EXPECT_EQ(indices(10, 3, 1, {}, 5), (Indices{4, 3, 2, 1}));
    EXPECT_EQ(indices(10, 3, 2, {.seed = 42, .drop_last = true}, 1), (Indices{9, 1, 2}));
    EXPECT_EQ(indices(16, 4, 3, {.seed = 123456789}, 3), (Indices{5, 2, 13, 8}));
}

TEST(DistributedSampler, GivesPyTorchsIndicesForLargeDataSets) {
    EXPECT_EQ(fnv1a(indices(1797, 4, 2, {})), 0x1c8871dd9369d064);
    EXPECT_EQ(fnv1a(indices(1000, 1, 0, {.seed = 7}, 3)), 0xbd72aeb24cb3c03);
    EXPECT_EQ(fnv1a(indices(100003, 8, 5, {.seed = 1, .drop_last = true}, 9)), 0x5f3b49f024d6b89c);
    EXPECT_EQ(fnv1a(indices(60000, 6, 0, {.seed = 2024}, 11)), 0xd602e47690b200e);
}

// From 214,748,364 samples on, torch shuffles by another rule. That rule gave torch's permutations of
// 214,748,364 and 214,748,365 samples (seed 5, 1.7 GB); the test checks it at smaller sizes.
TEST(RandomPermutation, ChangesItsRuleWherePyTorchDoes) {
    using ddp::ShuffleRule;
    EXPECT_EQ(ddp::shuffle_rule(0), ShuffleRule::With32Bits);
    EXPECT_EQ(ddp::shuffle_rule(214'748'363), ShuffleRule::With32Bits);
    EXPECT_EQ(ddp::shuffle_rule(214'748'364), ShuffleRule::With64Bits);
    EXPECT_EQ(ddp::shuffle_rule(std::size_t{1} << 40), ShuffleRule::With64Bits);
}

TEST(RandomPermutation, ShufflesHugeDataSetsBy64BitsInsideOutLikePyTorch) {
    const auto shuffled = [](std::size_t n, std::uint64_t seed) {
        return ddp::random_permutation(n, seed, ddp::ShuffleRule::With64Bits);
    };
    EXPECT_EQ(shuffled(16, 5), (Indices{12, 10, 4, 11, 6, 0, 15, 13, 1, 3, 9, 8, 7, 2, 14, 5}));
    EXPECT_EQ(fnv1a(shuffled(1000, 9)), 0x222e9ef6aba8ce25);
    EXPECT_TRUE(shuffled(0, 5).empty());
    EXPECT_EQ(shuffled(1, 5), (Indices{0}));
}

TEST(DistributedSampler, UsesTheLow32BitsOfTheSeedLikePyTorch) {
    EXPECT_EQ(indices(16, 1, 0, {.seed = (std::uint64_t{1} << 32) + 5}),
              (Indices{3, 10, 11, 7, 6, 13, 8, 9, 4, 5, 2, 1, 15, 12, 14, 0}));
}

TEST(DistributedSampler, TakesEveryNthSampleInOrderAndPadsFromTheBeginning) {
    EXPECT_EQ(indices(10, 3, 0, kInOrder), (Indices{0, 3, 6, 9}));
    EXPECT_EQ(indices(10, 3, 1, kInOrder), (Indices{1, 4, 7, 0}));
    EXPECT_EQ(indices(10, 3, 2, kInOrder), (Indices{2, 5, 8, 1}));
}

TEST(DistributedSampler, OmitsTheTailWithDropLast) {
    SamplerOptions options = kInOrder;
    options.drop_last = true;
    EXPECT_EQ(indices(10, 3, 0, options), (Indices{0, 3, 6}));
    EXPECT_EQ(indices(10, 3, 2, options), (Indices{2, 5, 8}));
}

TEST(DistributedSampler, RepeatsADataSetSmallerThanTheWorld) {
    EXPECT_EQ(indices(3, 8, 7, {.seed = 7}, 2), (Indices{0}));
    EXPECT_EQ(indices(3, 8, 4, {.seed = 7}, 2), (Indices{0}));
    EXPECT_EQ(indices(3, 8, 5, kInOrder), (Indices{2}));
    EXPECT_TRUE(indices(3, 8, 1, {.drop_last = true}).empty());
}

TEST(DistributedSampler, GivesNothingForAnEmptyDataSet) { EXPECT_TRUE(indices(0, 4, 2, {}).empty()); }

TEST(DistributedSampler, CountsTheBatchesOfThisWorld) {
    DistributedSampler sampler(100, 3, 0);  // 34 samples a rank, with padding
    EXPECT_EQ(sampler.batches_per_epoch(8), 5U);
    EXPECT_EQ(sampler.batches_per_epoch(8, true), 4U);
    EXPECT_EQ(DistributedSampler(100, 3, 0, {.drop_last = true}).batches_per_epoch(33), 1U);
    EXPECT_EQ(sampler.batches_done(8), 0U);
    sampler.advance(9);
    EXPECT_EQ(sampler.batches_per_epoch(8), 5U) << "of a whole epoch";
    EXPECT_EQ(sampler.batches_done(8), 2U);
    EXPECT_EQ(sampler.batches_done(8, true), 1U);
    sampler.set_epoch(2);
    EXPECT_EQ(sampler.batches_done(8, true), 8U);
}

TEST(DistributedSampler, RefusesARankOutsideTheWorld) {
    EXPECT_THROW(DistributedSampler(10, 4, 4), ddp::InvalidInput);
    EXPECT_THROW(DistributedSampler(10, 4, -1), ddp::InvalidInput);
    EXPECT_THROW(DistributedSampler(10, 0, 0), ddp::InvalidInput);
}

TEST(DistributedSampler, CoversTheDataSetWithEqualShares) {
    for (const std::size_t n : {1U, 7U, 64U, 1797U}) {
        for (const int world : {1, 2, 3, 8}) {
            std::map<std::size_t, int> seen;
            for (int rank = 0; rank < world; ++rank) {
                const Indices mine = indices(n, world, rank, {.seed = 3}, 4);
                EXPECT_EQ(mine.size(), indices(n, world, 0, {.seed = 3}, 4).size());
                for (const std::size_t i : mine) ++seen[i];
            }
            EXPECT_EQ(seen.size(), n);
            if (n % static_cast<std::size_t>(world) == 0) {
                for (const auto& [index, times] : seen) EXPECT_EQ(times, 1) << index;
            }
        }
    }
}

TEST(DistributedSampler, ShufflesEachEpochDifferentlyButReproducibly) {
    EXPECT_NE(indices(100, 2, 0, {}, 1), indices(100, 2, 0, {}, 2));
    EXPECT_EQ(indices(100, 2, 0, {}, 1), indices(100, 2, 0, {}, 1));
}

TEST(DistributedSampler, ContinuesInMidEpochWhereItWasSaved) {
    for (const bool drop_last : {false, true}) {
        DistributedSampler first(103, 4, 2, {.seed = 5, .drop_last = drop_last});
        first.set_epoch(3);
        const Indices whole = first.indices();
        first.advance(10);

        DistributedSampler second(103, 4, 2, {.seed = 5, .drop_last = drop_last});
        second.restore(first.state());
        EXPECT_EQ(second.indices(), Indices(whole.begin() + 10, whole.end()));
        EXPECT_EQ(second.size(), whole.size() - 10);
    }
}

TEST(DistributedSampler, ContinuesWithUnseenSamplesInAWorldOfAnotherSize) {
    std::multiset<std::size_t> seen;
    ddp::SamplerState saved;
    for (int rank = 0; rank < 4; ++rank) {
        DistributedSampler sampler(103, 4, rank, {.seed = 5});
        const Indices all = sampler.indices();
        seen.insert(all.begin(), all.begin() + 10);
        sampler.advance(10);
        saved = sampler.state();
    }
    for (int rank = 0; rank < 3; ++rank) {
        DistributedSampler sampler(103, 3, rank, {.seed = 5});
        sampler.restore(saved);
        for (const std::size_t i : sampler.indices()) seen.insert(i);
    }
    EXPECT_EQ(seen.size(), 103U);
    EXPECT_EQ(std::set<std::size_t>(seen.begin(), seen.end()).size(), 103U);
}

TEST(DistributedSampler, RefusesAPositionInTheMiddleOfAnotherOrder) {
    DistributedSampler taken(103, 4, 0, {.seed = 5});
    taken.set_epoch(2);
    taken.advance(10);
    const auto why_not = [&](std::size_t samples, SamplerOptions options) -> std::string {
        try {
            DistributedSampler(samples, 3, 1, options).restore(taken.state());
            return "";
        } catch (const ddp::InvalidInput& error) {
            return error.what();
        }
    };
    EXPECT_EQ(why_not(103, {.seed = 5}), "");
    EXPECT_EQ(
        why_not(103, {.seed = 6}),
        "sampler: the position is sample 40 of an epoch over 103 samples shuffled by seed 5, this sampler's epoch is over 103 samples "
        "shuffled by seed 6: resume with the same, or from the end of an epoch");
    EXPECT_THAT(why_not(102, {.seed = 5}),
                testing::HasSubstr("this sampler's epoch is over 102 samples shuffled by seed 5"));
    EXPECT_THAT(why_not(103, {.shuffle = false, .seed = 5}),
                testing::HasSubstr("this sampler's epoch is over 103 samples in their own order"));

    taken.set_epoch(3);
    EXPECT_EQ(why_not(50, {.seed = 6}), "") << "the epoch has just begun";
    taken.advance(26);
    EXPECT_EQ(why_not(150, {.seed = 6}), "") << "the epoch is complete";
}

/// One epoch that stops repeatedly and continues in worlds of other sizes, with the count of each sample.
struct InterruptedEpoch {
    std::size_t samples;
    SamplerOptions options;
    std::vector<int> seen = std::vector<int>(samples);
    ddp::SamplerState place = {2, 0};
    std::size_t last_world = 1;  ///< the last world with samples left

    /// Every rank uses `most` of its samples, or all.
    void go_on(std::size_t world, std::size_t most) {
        if (place.consumed < samples) last_world = world;
        std::optional<ddp::SamplerState> after;
        for (std::size_t rank = 0; rank < world; ++rank) {
            DistributedSampler sampler(samples, 1, 0, options);
            sampler.set_world(static_cast<int>(world), static_cast<int>(rank));
            sampler.restore(place);
            Indices mine = sampler.indices();
            mine.resize(std::min(mine.size(), most));
            for (const std::size_t index : mine) ++seen.at(index);
            sampler.advance(mine.size());
            EXPECT_EQ(sampler.state(), after.value_or(sampler.state())) << "all ranks have the same position";
            after = sampler.state();
        }
        place = *after;
    }
};

TEST(DistributedSampler, LosesAndRepeatsNoSampleHoweverOftenTheWorldChanges) {
    std::mt19937 random(1);
    for (int trial = 0; trial < 2000; ++trial) {
        const bool drop_last = trial % 2 == 0;
        InterruptedEpoch epoch{random() % 60,
                               {.shuffle = trial % 3 != 0, .seed = random(), .drop_last = drop_last}};
        for (std::size_t stops = random() % 4; stops > 0; --stops)
            epoch.go_on(1 + random() % 9, random() % 8);
        epoch.go_on(1 + random() % 9, SIZE_MAX);
        SCOPED_TRACE(testing::Message() << "trial " << trial << ": " << epoch.samples << " samples");
        std::size_t in_all = 0, never = 0;
        for (const int times : epoch.seen) {
            in_all += static_cast<std::size_t>(times);
            never += times == 0 ? 1 : 0;
            EXPECT_TRUE(times <= 1 || !drop_last);
        }
        // The rest after the last world's even shares is dropped, or padded to fill them.
        ASSERT_LE(never, drop_last ? epoch.last_world - 1 : 0);
        ASSERT_LE(in_all, epoch.samples + (drop_last ? 0 : epoch.last_world - 1));
    }
}

TEST(DistributedSampler, TakesAPositionSlightlyBehindTheEndAsTheEnd) {
    DistributedSampler sampler(10, 2, 0);
    sampler.advance(6);
    EXPECT_EQ(sampler.size(), 0U) << "6 of 5";
    sampler.restore({0, 11});
    EXPECT_EQ(sampler.state().consumed, 10U);
    EXPECT_THROW(sampler.restore({0, 23}), ddp::InvalidInput);
}

TEST(DistributedSampler, HasNothingLeftAtTheEndOfAPaddedEpoch) {
    DistributedSampler sampler(10, 3, 1);
    sampler.advance(sampler.size());
    EXPECT_EQ(sampler.size(), 0U);
    DistributedSampler resumed(10, 3, 1);
    resumed.restore(sampler.state());
    EXPECT_TRUE(resumed.indices().empty());
}

TEST(DistributedSampler, RefusesAPositionFarBehindTheEnd) {
    DistributedSampler sampler(10, 3, 1);
    EXPECT_THROW(sampler.restore({0, 1000}), ddp::InvalidInput);
}

/// Everything that `use` prints on standard error.
template <class Use>
std::string printed_by(const Use& use) {
    ::testing::internal::CaptureStderr();
    use();
    return ::testing::internal::GetCapturedStderr();
}

TEST(DistributedSampler, TellsOnceThatAnEpochBeginsAgainInTheSameOrder) {
    DistributedSampler sampler(10, 2, 0);
    sampler.set_epoch(3);
    EXPECT_EQ(
        printed_by([&] {
            for (int pass = 0; pass < 4; ++pass) static_cast<void>(sampler.indices());
        }),
        "ddp: sampler: epoch 3 begins again, in the same order: call set_epoch(epoch) or next_epoch() before "
        "each epoch\n");
}

TEST(DistributedSampler, TellsOnceThatAnEpochHasNothingLeftForAnotherPass) {
    for (const bool shuffle : {true, false}) {
        DistributedSampler sampler(10, 2, 0, {.shuffle = shuffle});
        EXPECT_EQ(
            printed_by([&] {
                for (int pass = 0; pass < 4; ++pass) sampler.advance(sampler.indices().size());
            }),
            "ddp: sampler: epoch 0 has no samples left for another pass: call set_epoch(epoch) or next_epoch() "
            "before each epoch\n");
    }
}

TEST(DistributedSampler, IsSilentOnOtherRanks) {
    DistributedSampler sampler(10, 2, 1);
    EXPECT_EQ(printed_by([&] {
                  for (int pass = 0; pass < 4; ++pass) static_cast<void>(sampler.indices());
                  for (int pass = 0; pass < 4; ++pass) sampler.advance(sampler.indices().size());
              }),
              "");
}

TEST(DistributedSampler, IsSilentWhenEveryEpochIsSetOrNotShuffled) {
    DistributedSampler shuffled(10, 2, 0), in_order(10, 2, 0, kInOrder), of_one(1, 1, 0), of_none(0, 1, 0);
    EXPECT_EQ(printed_by([&] {
                  for (std::uint64_t epoch = 0; epoch < 3; ++epoch, shuffled.next_epoch())
                      shuffled.advance(shuffled.indices().size());
                  for (int pass = 0; pass < 3; ++pass) {
                      static_cast<void>(in_order.indices());
                      static_cast<void>(of_one.indices());
                      of_none.advance(of_none.indices().size());
                  }
              }),
              "");
}

TEST(DistributedSampler, IsSilentWhenAnEpochIsRepeatedOrResumed) {
    DistributedSampler sampler(10, 2, 0);
    EXPECT_EQ(printed_by([&] {
                  const ddp::SamplerState begin = sampler.state();
                  static_cast<void>(sampler.indices());
                  sampler.restore(begin);
                  static_cast<void>(sampler.indices());
                  sampler.set_world(1, 0);
                  static_cast<void>(sampler.indices());
                  sampler.advance(4);
                  static_cast<void>(sampler.indices());
                  static_cast<void>(sampler.indices());
                  sampler.advance(6);
                  sampler.restore(sampler.state());
                  static_cast<void>(sampler.indices());
              }),
              "");
}

}  // namespace
