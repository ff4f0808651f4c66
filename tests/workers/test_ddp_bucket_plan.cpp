#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "ddp/ddp.h"
#include "ddp/reduce/flat_layout.h"

namespace {

using ddp::BucketLimits;
using ddp::BucketPlan;
using ddp::DType;
using ddp::Extent;
using ddp::FlatLayout;
using ddp::GradientSpec;
using ddp::in_slots;
using ddp::lay_out;
using ddp::most_open_buckets;
using ddp::plan_buckets;

std::vector<GradientSpec> of_bytes(const std::vector<std::size_t>& bytes) {
    std::vector<GradientSpec> specs;
    for (const std::size_t b : bytes) specs.push_back({b, DType::F32, {}});
    return specs;
}

TEST(BucketPlan, FillsBucketsFromTheLastGradientOnAndClosesThemAtTheLimit) {
    EXPECT_EQ(plan_buckets(of_bytes({40, 40, 40, 40, 40, 40}), {80, 160}),
              (BucketPlan{{5, 4}, {3, 2, 1, 0}}));
}

TEST(BucketPlan, GivesAGradientAboveTheLimitABucketOfItsOwn) {
    EXPECT_EQ(plan_buckets(of_bytes({400, 800, 1200, 400}), {400, 400}), (BucketPlan{{3}, {2}, {1}, {0}}));
}

TEST(BucketPlan, LetsABucketExceedItsLimitByItsLastGradient) {
    EXPECT_EQ(plan_buckets(of_bytes({40, 1000, 40}), {80, 80}), (BucketPlan{{2, 1}, {0}}));
}

TEST(BucketPlan, NeverMixesTypesAndHasLimitsPerType) {
    std::vector<GradientSpec> specs = of_bytes({40, 80, 40, 80, 40, 40});
    specs[1].dtype = specs[3].dtype = DType::F64;
    EXPECT_EQ(plan_buckets(specs, {80, 160}), (BucketPlan{{5, 4}, {3}, {1}, {2, 0}}));
}

TEST(BucketPlan, NeverMixesDevices) {
    std::vector<GradientSpec> specs = of_bytes({4, 4, 4});
    specs[1].device = {ddp::Device::Kind::Cuda, 0};
    EXPECT_EQ(plan_buckets(specs, {}), (BucketPlan{{1}, {2, 0}}));
}

TEST(BucketPlan, NeverMixesUnits) {
    std::vector<GradientSpec> specs = of_bytes({4, 4, 4, 4});
    specs[2].unit = specs[3].unit = 1;
    EXPECT_EQ(plan_buckets(specs, {}), (BucketPlan{{3, 2}, {1, 0}}));
}

TEST(BucketPlan, HasNoBucketWithoutGradients) { EXPECT_TRUE(plan_buckets({}, BucketLimits{}).empty()); }

TEST(BucketPlan, HoldsEveryGradientOnceForAnySizesAndOrder) {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        std::vector<GradientSpec> specs(random() % 40);
        for (GradientSpec& spec : specs)
            spec = {random() % 300, random() % 3 == 0 ? DType::F64 : DType::F32, {}};
        std::vector<std::size_t> seen;
        for (const auto& bucket : plan_buckets(specs, {100, 500})) {
            ASSERT_FALSE(bucket.empty());
            for (const std::size_t i : bucket) EXPECT_EQ(specs[i].dtype, specs[bucket[0]].dtype);
            seen.insert(seen.end(), bucket.begin(), bucket.end());
        }
        std::sort(seen.begin(), seen.end());
        std::vector<std::size_t> all(specs.size());
        std::iota(all.begin(), all.end(), std::size_t{0});
        ASSERT_EQ(seen, all);
    }
}

std::vector<GradientSpec> mixed(std::mt19937& random) {
    std::vector<GradientSpec> specs(1 + random() % 40);
    for (GradientSpec& spec : specs)
        spec = {random() % 300 * 8, random() % 3 == 0 ? DType::F64 : DType::F32, {}};
    return specs;
}

TEST(FlatLayout, PlacesTensorsApartOnAlignedOffsetsInTheirBuckets) {
    std::mt19937 random(2);
    for (int round = 0; round < 100; ++round) {
        const std::vector<GradientSpec> specs = mixed(random);
        const FlatLayout layout = lay_out(specs, plan_buckets(specs, {500, 1000}), 3 * FlatLayout::kChunk);
        std::size_t end = 0;
        for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
            EXPECT_EQ(layout.buckets[b].begin, end);
            EXPECT_EQ(layout.buckets[b].bytes % (3 * FlatLayout::kChunk), 0U);
            std::size_t at = end;
            for (const std::size_t i : layout.plan[b]) {
                EXPECT_GE(layout.tensors[i].begin, at);
                EXPECT_EQ(layout.tensors[i].begin % FlatLayout::kAlignment, 0U);
                EXPECT_EQ(layout.tensors[i].bytes, specs[i].bytes);
                EXPECT_EQ(layout.types[b], specs[i].dtype);
                EXPECT_EQ(layout.bucket_of[i], b);
                at = layout.tensors[i].end();
            }
            end = layout.buckets[b].end();
            EXPECT_LE(at, end);
        }
        EXPECT_EQ(layout.bytes, end);
    }
}

TEST(FlatLayout, HasSlicesThatCoverEachBucketOnce) {
    const FlatLayout layout = lay_out(of_bytes({20000}), {{0}}, 3 * FlatLayout::kChunk);
    ASSERT_EQ(layout.bytes, 6 * FlatLayout::kChunk);
    EXPECT_EQ(layout.slice(0, 0, 3), (Extent{0, 8192}));
    EXPECT_EQ(layout.slice(0, 2, 3), (Extent{16384, 8192}));
    EXPECT_EQ(intersection(layout.tensors[0], layout.slice(0, 2, 3)), (Extent{16384, 3616}));
    EXPECT_EQ(intersection({0, 10}, layout.slice(0, 2, 3)), (Extent{0, 0}));
}

TEST(FlatLayout, InSlotsSharesMemoryOnlyBetweenBucketsThatFarApart) {
    std::mt19937 random(3);
    for (int round = 0; round < 100; ++round) {
        const std::vector<GradientSpec> specs = mixed(random);
        const FlatLayout whole = lay_out(specs, plan_buckets(specs, {500, 1000}));
        const FlatLayout folded = in_slots(whole, 3);
        for (std::size_t b = 0; b < folded.buckets.size(); ++b) {
            EXPECT_EQ(folded.buckets[b].bytes, whole.buckets[b].bytes);
            EXPECT_LE(folded.buckets[b].end(), folded.bytes);
            for (std::size_t near = b + 1; near < std::min(b + 3, folded.buckets.size()); ++near)
                EXPECT_EQ(intersection(folded.buckets[b], folded.buckets[near]).bytes, 0U);
            for (const std::size_t i : folded.plan[b])
                EXPECT_EQ(folded.tensors[i].begin - folded.buckets[b].begin,
                          whole.tensors[i].begin - whole.buckets[b].begin);
        }
    }
}

TEST(FlatLayout, CountsBucketsThatFillSideBySide) {
    std::vector<GradientSpec> specs = of_bytes({40, 40, 40, 40});
    EXPECT_EQ(most_open_buckets(lay_out(specs, plan_buckets(specs, {40, 40}))), 1U);
    specs[1].dtype = specs[3].dtype = DType::F64;
    EXPECT_EQ(most_open_buckets(lay_out(specs, plan_buckets(specs, {80, 80}))), 2U);
}

}  // namespace
