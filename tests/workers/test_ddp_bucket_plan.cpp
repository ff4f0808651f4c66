#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "ddp/ddp.h"

namespace {

using ddp::BucketLimits;
using ddp::BucketPlan;
using ddp::DType;
using ddp::GradientSpec;
using ddp::plan_buckets;

std::vector<GradientSpec> of_bytes(const std::vector<std::size_t>& bytes) {
    std::vector<GradientSpec> specs;
    for (const std::size_t b : bytes) specs.push_back({b, DType::F32, {}});
    return specs;
}

// The tables in this file are the results of torch 2.15's _compute_bucket_assignment_by_size, reversed as
// DistributedDataParallel does.

TEST(BucketPlan, ClosesABucketWithTheGradientThatReachesTheLimit) {
    EXPECT_EQ(plan_buckets(of_bytes({40, 40, 40, 40, 40, 40}), {80, 160}),
              (BucketPlan{{2, 3, 4, 5}, {0, 1}}));
}

TEST(BucketPlan, GivesAGradientAboveTheLimitABucketOfItsOwn) {
    EXPECT_EQ(plan_buckets(of_bytes({400, 800, 1200, 400}), {400, 400}), (BucketPlan{{3}, {2}, {1}, {0}}));
}

TEST(BucketPlan, LetsABucketExceedItsLimitByItsLastGradient) {
    EXPECT_EQ(plan_buckets(of_bytes({40, 1000, 40}), {80, 80}), (BucketPlan{{2}, {0, 1}}));
}

TEST(BucketPlan, FollowsTheOrderOfArrivalWhenKnown) {
    const std::vector<std::size_t> arrival = {5, 4, 3, 2, 1, 0};
    EXPECT_EQ(plan_buckets(of_bytes({40, 40, 40, 40, 40, 40}), arrival, {80, 160}),
              (BucketPlan{{5, 4}, {3, 2, 1, 0}}));
}

TEST(BucketPlan, NeverMixesTypesAndHasLimitsPerType) {
    std::vector<GradientSpec> specs = of_bytes({40, 80, 40, 80, 40, 40});
    specs[1].dtype = specs[3].dtype = DType::F64;
    EXPECT_EQ(plan_buckets(specs, {80, 160}), (BucketPlan{{4, 5}, {3}, {1}, {0, 2}}));
    const std::vector<std::size_t> arrival = {5, 4, 3, 2, 1, 0};
    EXPECT_EQ(plan_buckets(specs, arrival, {80, 160}), (BucketPlan{{5, 4}, {3}, {1}, {2, 0}}));
}

TEST(BucketPlan, NeverMixesDevices) {
    std::vector<GradientSpec> specs = of_bytes({4, 4, 4});
    specs[1].device = {ddp::Device::Kind::Cuda, 0};
    EXPECT_EQ(plan_buckets(specs, {}), (BucketPlan{{1}, {0, 2}}));
}

TEST(BucketPlan, HasNoBucketWithoutGradients) { EXPECT_TRUE(plan_buckets({}, BucketLimits{}).empty()); }

TEST(BucketPlan, HoldsEveryGradientOnceForAnySizesAndOrder) {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        std::vector<GradientSpec> specs(random() % 40);
        for (GradientSpec& spec : specs)
            spec = {random() % 300, random() % 3 == 0 ? DType::F64 : DType::F32, {}};
        std::vector<std::size_t> arrival(specs.size());
        std::iota(arrival.begin(), arrival.end(), std::size_t{0});
        std::shuffle(arrival.begin(), arrival.end(), random);
        for (const BucketPlan& plan :
             {plan_buckets(specs, {100, 500}), plan_buckets(specs, arrival, {100, 500})}) {
            std::vector<std::size_t> seen;
            for (const auto& bucket : plan) {
                ASSERT_FALSE(bucket.empty());
                for (const std::size_t i : bucket) EXPECT_EQ(specs[i].dtype, specs[bucket[0]].dtype);
                seen.insert(seen.end(), bucket.begin(), bucket.end());
            }
            std::sort(seen.begin(), seen.end());
            std::vector<std::size_t> all = arrival;
            std::sort(all.begin(), all.end());
            ASSERT_EQ(seen, all);
        }
    }
}

}  // namespace
