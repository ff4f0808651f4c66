#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>
#include <random>

#include "ddp/model.h"
#include "ddp/testing.h"
#include "tests/workers/on_nodes.h"

namespace {

using ddp::Buffer;
using ddp::DType;
using ddp::Model;
using ddp::ModelOptions;
using ddp::ProcessGroup;
using ddp::Shard;
using ddp::Tensor;
using ddp::TensorSpec;
using ddp::testing::run_ranks;

struct Division {
    Shard shard;
    bool share_weights = false;
};
constexpr Division kDivisions[] = {{Shard::Optimizer},
                                   {Shard::Gradients},
                                   {Shard::Parameters},
                                   {Shard::Optimizer, true},
                                   {Shard::Gradients, true}};
constexpr ddp::BucketLimits kSmallBuckets = {.first_bytes = 1000, .cap_bytes = 4000};

/// A model of several buckets, whose tensors lie in several slices or in one.
const std::vector<TensorSpec> kMixed = {
    {"embedding", {70, 90}}, {"norm", {33}, DType::F64}, {"fc1.weight", {100, 61}, DType::BF16},
    {"fc1.bias", {61}},      {"none", {0, 4}},           {"fc2.weight", {61, 200}},
    {"fc2.bias", {200}},     {"scale", {}, DType::F64},  {"head.weight", {200, 10}, DType::F16},
    {"head.bias", {10}},
};

double load(const Buffer& from, std::size_t at) {
    switch (from.dtype) {
        case DType::F32: return static_cast<const float*>(from.data)[at];
        case DType::F64: return static_cast<const double*>(from.data)[at];
        case DType::BF16:
            return std::bit_cast<float>(
                static_cast<std::uint32_t>(static_cast<const std::uint16_t*>(from.data)[at]) << 16);
        // Bits without a meaning are enough for the gradients of float16.
        default: return static_cast<const std::uint16_t*>(from.data)[at] % 7;
    }
}
void store(const Buffer& to, std::size_t at, double value) {
    switch (to.dtype) {
        case DType::F32: static_cast<float*>(to.data)[at] = static_cast<float>(value); return;
        case DType::F64: static_cast<double*>(to.data)[at] = value; return;
        case DType::BF16:
            static_cast<std::uint16_t*>(to.data)[at] =
                static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
            return;
        default:
            // float16 with an exponent of 2^-2 to 2^-1
            static_cast<std::uint16_t*>(to.data)[at] =
                static_cast<std::uint16_t>(0x3400 + std::abs(static_cast<int>(value * 1000)) % 0x400);
    }
}

/// A training run whose gradients depend on rank, step, pass and weights.
struct Training {
    std::vector<TensorSpec> specs = kMixed;
    bool adam = true;
    bool clips = false;
    int passes = 1;
    bool skips = false;   ///< each rank leaves parameters out, and one is left out by all
    bool groups = false;  ///< parameter groups of the optimizer
    int steps = 4;
    bool overlaps = false;

    [[nodiscard]] ModelOptions options(const Division& division) const {
        return {.shard = division.shard,
                .share_weights = division.share_weights,
                .accumulates = passes > 1,
                .overlaps_gather = overlaps,
                .limits = kSmallBuckets,
                .find_unused_parameters = skips};
    }
    [[nodiscard]] std::unique_ptr<ddp::Optimizer> optimizer(Model& model) const {
        std::vector<ddp::ParameterGroup> own;
        if (groups) own = {{{"fc1.bias", "fc2.bias", "head.bias"}, 0.01, 0.0}, {{"embedding"}, 0.002, 0.1}};
        if (adam) return ddp::make_adamw(model, {.learning_rate = 0.01, .groups = own});
        return ddp::make_sgd(model,
                             {.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 0.01, .groups = own});
    }
    void fill(const Model& model) const {
        for (std::size_t i = 0; i < specs.size(); ++i) {
            const Buffer& memory = model.parameters()[i].memory;
            for (std::size_t e = 0; e < memory.count; ++e)
                store(memory, e, std::sin(static_cast<double>(e + 1) * static_cast<double>(i + 1)));
        }
    }
    void pass(Model& model, int rank, int step, int number) const {
        const auto guard = model.no_sync(number + 1 < passes);
        for (std::size_t i = specs.size(); i-- > 0;) {
            model.gather(specs[i].unit);
            const bool unused = skips && (i == 3 || (i + static_cast<std::size_t>(rank + step)) % 4 == 0);
            const Buffer gradient = model.gradient(i), weights = model.parameters()[i].memory;
            for (std::size_t e = 0; !unused && e < gradient.count; ++e) {
                const double value =
                    std::cos(static_cast<double>(e * 7 + i * 31) + 3.0 * rank + 17.0 * step + 5.0 * number) +
                    0.25 * load(weights, e);
                store(gradient, e, number > 0 ? load(gradient, e) + value : value);
            }
            if (!unused) model.mark_ready(i);
            if (i == 0 || specs[i - 1].unit != specs[i].unit) model.release(specs[i].unit);
        }
        model.finish();
    }
    /// The digest of the weights after all steps.
    [[nodiscard]] std::string run(ProcessGroup& group, const Division& division) const {
        Model model(group, specs, options(division));
        if (group.rank() == 0) fill(model);
        const auto stepper = optimizer(model);
        for (int step = 0; step < steps; ++step) {
            if (passes > 1) model.zero_gradients();
            for (int number = 0; number < passes; ++number) pass(model, group.rank(), step, number);
            // The first norms are above the limit, and the later ones below it.
            if (clips) ddp::clip_grad_norm(model, step < 2 ? 1.0 : 1e6);
            stepper->step();
        }
        EXPECT_EQ(stepper->steps(), static_cast<std::uint64_t>(steps));
        return model.verify_equal_parameters();
    }
};

class ShardedModel : public ddp::testing::OnNodes {
  protected:
    static void expect_the_bits_of_unsharded(const Training& training) {
        std::mutex mutex;
        std::vector<std::string> digests;
        run([&](ProcessGroup& group) {
            std::vector<std::string> mine{training.run(group, {Shard::None})};
            for (const Division& division : kDivisions) {
                if (GetParam().size() == 1 || !division.share_weights)
                    mine.push_back(training.run(group, division));
            }
            const std::lock_guard lock(mutex);
            digests = mine;
        });
        for (std::size_t i = 1; i < digests.size(); ++i)
            EXPECT_EQ(digests[i], digests[0])
                << name_of(kDivisions[i - 1].shard) << (kDivisions[i - 1].share_weights ? ", shared" : "");
    }
};
INSTANTIATE_TEST_SUITE_P(, ShardedModel,
                         ::testing::Values(std::vector<int>{1}, std::vector<int>{2}, std::vector<int>{3},
                                           std::vector<int>{4}, std::vector<int>{5}, std::vector<int>{1, 1},
                                           std::vector<int>{2, 1}, std::vector<int>{2, 3}),
                         [](const auto& nodes) {
                             std::string name = "Ranks";
                             for (const int ranks : nodes.param) name += "_" + std::to_string(ranks);
                             return name;
                         });

TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithAdamW) { expect_the_bits_of_unsharded({}); }
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithSgd) { expect_the_bits_of_unsharded({.adam = false}); }
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithClipping) {
    expect_the_bits_of_unsharded({.clips = true});
    expect_the_bits_of_unsharded({.adam = false, .clips = true});
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithAccumulation) {
    expect_the_bits_of_unsharded({.clips = true, .passes = 3});
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithUnusedParameters) {
    expect_the_bits_of_unsharded({.clips = true, .skips = true});
    expect_the_bits_of_unsharded({.clips = true, .passes = 2, .skips = true});
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithParameterGroups) {
    expect_the_bits_of_unsharded({.groups = true});
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWhereGathersOverlap) {
    Training training{.clips = true, .overlaps = true};
    for (std::size_t i = 0; i < training.specs.size(); ++i) training.specs[i].unit = i / 3;
    expect_the_bits_of_unsharded(training);
}

TEST(ShardedModels, HaveTheBitsOfUnshardedOnesForAnyShapes) {
    std::mt19937 random(11);
    for (int round = 0; round < 12; ++round) {
        Training training{.specs = {},
                          .adam = random() % 2 == 0,
                          .clips = random() % 2 == 0,
                          .passes = 1 + static_cast<int>(random() % 2),
                          .steps = 2};
        for (std::size_t i = 0, count = 1 + random() % 12; i < count; ++i) {
            const DType types[] = {DType::F32, DType::F32, DType::F64, DType::BF16};
            training.specs.push_back({"p" + std::to_string(i),
                                      {static_cast<std::int64_t>(random() % 5000), 1 + round % 2},
                                      types[random() % 4],
                                      i / 4});
        }
        run_ranks(1 + static_cast<int>(random() % 5), [&](ProcessGroup& group) {
            const std::string expected = training.run(group, {Shard::None});
            for (const Division& division : kDivisions)
                EXPECT_EQ(training.run(group, division), expected) << round << name_of(division.shard);
        });
    }
}

}  // namespace
