#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>

#include "ddp/checkpoint.h"
#include "ddp/model.h"
#include "ddp/reduce/flat_layout.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"
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
using ddp::testing::thrown_by;

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
    bool skips = false;      ///< each rank leaves parameters out, and one is left out by all
    bool is_static = false;  ///< ... the same ones in every step
    bool groups = false;     ///< parameter groups of the optimizer
    int steps = 4;
    bool overlaps = false;

    [[nodiscard]] ModelOptions options(const Division& division) const {
        return {.shard = division.shard,
                .share_weights = division.share_weights,
                .accumulates = passes > 1,
                .overlaps_gather = overlaps,
                .limits = kSmallBuckets,
                .find_unused_parameters = skips && !is_static,
                .static_graph = is_static};
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
            const bool unused =
                skips && (i == 3 || (i + static_cast<std::size_t>(rank + (is_static ? 0 : step))) % 4 == 0);
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
        for (int step = 0; step < steps; ++step) one_step(model, *stepper, group.rank(), step);
        EXPECT_EQ(stepper->steps(), static_cast<std::uint64_t>(steps));
        return model.verify_equal_parameters();
    }
    void one_step(Model& model, ddp::Optimizer& stepper, int rank, int step) const {
        if (passes > 1) model.zero_gradients();
        for (int number = 0; number < passes; ++number) pass(model, rank, step, number);
        // The first norms are above the limit, and the later ones below it.
        if (clips) ddp::clip_grad_norm(model, step < 2 ? 1.0 : 1e6);
        stepper.step();
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
// The gathers of the units come between the buckets, which are complete at other times on other ranks.
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithUnusedParametersInManyUnits) {
    for (const bool is_static : {false, true}) {
        Training training{.skips = true, .is_static = is_static};
        for (std::size_t i = 0; i < training.specs.size(); ++i) training.specs[i].unit = i;
        expect_the_bits_of_unsharded(training);
    }
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWithParameterGroups) {
    expect_the_bits_of_unsharded({.groups = true});
}
TEST_P(ShardedModel, HasTheBitsOfAnUnshardedOneWhereGathersOverlap) {
    Training training{.clips = true, .overlaps = true};
    for (std::size_t i = 0; i < training.specs.size(); ++i) training.specs[i].unit = i / 3;
    expect_the_bits_of_unsharded(training);
}

TEST_P(ShardedModel, HasTheWeightsOfAFileOnAllRanks) {
    const ddprun::test::TemporaryDirectory place;
    const Training training;
    {
        Model whole(kMixed);
        training.fill(whole);
        const std::vector<Tensor> all = whole.state();
        ddp::write_safetensors(place.file("weights"), std::span(all).first(all.size() - 1));
    }
    run([&](ProcessGroup& group) {
        const auto digest_of = [&](const Division& division, bool has_optimizer) {
            Model model(group, kMixed, training.options(division));
            if (group.rank() == 0) std::ranges::fill(model.weights<float>(9), 7.0F);
            const auto optimizer = has_optimizer ? training.optimizer(model) : nullptr;
            const auto unmatched = ddp::load_weights(group, place.file("weights"), model);
            EXPECT_EQ(unmatched.missing, std::vector<std::string>{"head.bias"});
            EXPECT_EQ(unmatched.unused, std::vector<std::string>{});
            return model.verify_equal_parameters();
        };
        Model expected(group, kMixed);
        training.fill(expected);
        std::ranges::fill(expected.weights<float>(9), 7.0F);
        const std::string digest = expected.verify_equal_parameters();
        for (const bool has_optimizer : {false, true}) {
            EXPECT_EQ(digest_of({Shard::None}, has_optimizer), digest);
            for (const Division& division : kDivisions) {
                if (GetParam().size() > 1 && division.share_weights) continue;
                EXPECT_EQ(digest_of(division, has_optimizer), digest) << name_of(division.shard);
            }
        }
    });
}

TEST(Model, GetsTheErrorOfTheRankThatCannotReadAFile) {
    const auto failures = ddp::testing::failures_of_ranks(2, [](ProcessGroup& group) {
        Model model(group, kMixed, {.shard = Shard::Optimizer});
        (void)ddp::load_weights(group, "/dev/null/none", model);
    });
    for (const auto& failure : failures) EXPECT_TRUE(ddp::testing::is<ddp::Error>(failure));
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

/// Two parameters that are each longer than a slice.
const std::vector<TensorSpec> kTwo = {{"a", {3000}}, {"b", {5000}}};

TEST(Model, HasZeroesAtAlignedAddressesThatNeverChange) {
    run_ranks(2, [](ProcessGroup& group) {
        for (const Shard shard : {Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Parameters}) {
            Model model(group, kMixed, {.shard = shard, .limits = kSmallBuckets});
            const auto adamw = ddp::make_adamw(model, {});
            std::vector<void*> places;
            for (int step = 0; step < 3; ++step) {
                for (std::size_t i = kMixed.size(), at = 0; i-- > 0;) {
                    const Buffer weights = model.parameters()[i].memory, gradient = model.gradient(i);
                    for (void* const place : {weights.data, gradient.data}) {
                        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(place) % 64, 0U);
                        if (step == 0) places.push_back(place);
                        EXPECT_EQ(place, places[at++]);
                    }
                    EXPECT_TRUE(weights.count == 0 || load(weights, weights.count - 1) == 0);
                    std::memset(gradient.data, 0, gradient.bytes());
                    model.mark_ready(i);
                }
                model.finish();
                adamw->step();
            }
        }
    });
}

TEST(Model, StartsFromRankZerosWeights) {
    for (const Division& division : kDivisions) {
        run_ranks(3, [&](ProcessGroup& group) {
            Model model(group, kTwo, {.shard = division.shard, .share_weights = division.share_weights});
            if (group.rank() == 0) std::ranges::fill(model.weights<float>(1), 7.0F);
            const auto sgd = ddp::make_sgd(model, {});
            EXPECT_EQ(model.weights<float>(1).back(), 7.0F) << name_of(division.shard);
            EXPECT_EQ(model.weights<float>(0).back(), 0.0F);
        });
    }
}

/// Unsharded gradients end with padding, here a line of its own, for a request to stop.
constexpr std::size_t kTail = ddp::FlatLayout::kAlignment;

TEST(Model, HoldsAPartOfTheOptimizersStateOnEachRank) {
    run_ranks(4, [](ProcessGroup& group) {
        const std::vector<TensorSpec> specs(1, {"w", {1 << 18}});
        const auto bytes = [&](Shard shard) {
            Model model(group, specs, {.shard = shard});
            const auto adamw = ddp::make_adamw(model, {});
            return model.memory();
        };
        EXPECT_EQ(bytes(Shard::None).weights, (std::size_t{1} << 20) + kTail);
        EXPECT_LE(4 * bytes(Shard::Optimizer).optimizer, bytes(Shard::None).optimizer * 105 / 100);
        EXPECT_LE(4 * bytes(Shard::Parameters).weights, bytes(Shard::None).weights * 105 / 100);
    });
}

TEST(Model, HoldsAFewBucketsOfGradientsUnderShardGradients) {
    run_ranks(4, [](ProcessGroup& group) {
        std::vector<TensorSpec> specs;
        for (int i = 0; i < 40; ++i) specs.push_back({"w" + std::to_string(i), {4096}});
        const auto bytes = [&](const ModelOptions& options) {
            return Model(group, specs, options).memory().gradients;
        };
        const ddp::BucketLimits limits{.first_bytes = 16384, .cap_bytes = 16384};
        EXPECT_EQ(bytes({.limits = limits}), 40U * 16384 + kTail);
        EXPECT_EQ(bytes({.shard = Shard::Gradients, .limits = limits}), (4U + 10U) * 16384);
        EXPECT_EQ(bytes({.shard = Shard::Gradients, .accumulates = true, .limits = limits}), 40U * 16384);
    });
}

TEST(Model, ListsThePartsOfEachTensorAndGathersThemAfterALoad) {
    run_ranks(3, [](ProcessGroup& group) {
        Model model(group, kMixed, {.shard = Shard::Optimizer, .limits = kSmallBuckets});
        const auto adamw = ddp::make_adamw(model, {});
        std::vector<Tensor> all = model.state();
        std::vector<Tensor> of_optimizer = adamw->state();
        all.insert(all.end(), of_optimizer.begin(), of_optimizer.end());
        ddp::check_tensors(all);
        for (const Tensor& tensor : all) {
            std::size_t whole = 1;
            for (const std::int64_t extent : tensor.shape) whole *= static_cast<std::size_t>(extent);
            EXPECT_EQ(tensor.part_begin.has_value(), !tensor.name.starts_with("step"));
            std::vector<std::uint32_t> owners(whole + 1);
            for (std::size_t e = 0; e < tensor.memory.count; ++e) ++owners[tensor.part_begin.value_or(0) + e];
            group.all_reduce(ddp::Buffer{owners.data(), owners.size(), DType::I32, {}}).wait();
            for (std::size_t e = 0; e < whole && tensor.part_begin; ++e)
                ASSERT_EQ(owners[e], 1U) << tensor.name << " element " << e;
        }
        const Tensor part = model.state()[0];
        for (std::size_t e = 0; e < part.memory.count; ++e)
            store(part.memory, e, static_cast<double>(*part.part_begin + e));
        model.state_loaded();
        for (std::size_t e = 0; e < 6300; ++e) ASSERT_EQ(model.weights<float>(0)[e], static_cast<float>(e));
    });
}

TEST(Model, TrainsInAJoinAsAnUnshardedOneDoes) {
    run_ranks(3, [](ProcessGroup& group) {
        const auto digest = [&](const Division& division, bool by_initial_size) {
            Model model(
                group, kTwo,
                {.shard = division.shard, .share_weights = division.share_weights, .limits = kSmallBuckets});
            const auto adamw = ddp::make_adamw(model, {.learning_rate = 0.1});
            ddp::Join join(model, {.divide_by_initial_world_size = by_initial_size});
            for (int batch = 0; batch < 1 + group.rank(); ++batch) {
                model.begin_forward();
                for (const std::size_t i : {1, 0}) {
                    std::ranges::fill(model.gradient_as<float>(i), static_cast<float>(batch + group.rank()));
                    model.mark_ready(i);
                }
                model.finish();
                adamw->step();
            }
            join.finish([&] { adamw->step(); });
            return model.verify_equal_parameters();
        };
        for (const bool by_initial_size : {true, false}) {
            const std::string expected = digest({Shard::None}, by_initial_size);
            for (const Division& division : kDivisions)
                EXPECT_EQ(digest(division, by_initial_size), expected) << name_of(division.shard);
        }
        Model model(group, kTwo, {.shard = Shard::Optimizer});
        ddp::Join join(model);
        EXPECT_EQ(thrown_by([&] { join.finish(); }),
                  "InvalidInput: Join::finish: every rank steps its part of a sharded model: pass [&] { "
                  "optimizer->step(); }");
    });
}

TEST(Model, ClipsByTheNormOfAllGradientsAndNamesTheOneThatIsNotFinite) {
    run_ranks(3, [](ProcessGroup& group) {
        for (const Shard shard : {Shard::None, Shard::Gradients}) {
            Model model(group, kTwo, {.shard = shard, .limits = kSmallBuckets});
            const auto backward = [&](float value) {
                for (const std::size_t i : {1, 0}) {
                    std::ranges::fill(model.gradient_as<float>(i), 2.0F);
                    if (i == 0) model.gradient_as<float>(i)[2999] = value;
                    model.mark_ready(i);
                }
                model.finish();
            };
            backward(2.0F);
            EXPECT_DOUBLE_EQ(ddp::clip_grad_norm(model, 1.0), 2 * std::sqrt(8000.0));
            EXPECT_NEAR(ddp::clip_grad_norm(model, 2.0), 1.0, 1e-6);
            backward(INFINITY);
            EXPECT_EQ(
                thrown_by([&] { ddp::clip_grad_norm(model, 1.0); }),
                "Error: clip_grad_norm: the norm of the gradients is inf, that of 'a' is the first that is not "
                "finite; lower the learning rate, or skip such steps (NonFiniteNorm::Leave)");
            EXPECT_EQ(ddp::clip_grad_norm(model, 1.0, ddp::NonFiniteNorm::Leave), INFINITY);
            EXPECT_EQ(thrown_by([&] { ddp::clip_grad_norm(model, 0); }).substr(0, 12), "InvalidInput");
        }
    });
}

TEST(Model, RefusesWhatItsMemoryDoesNotAllow) {
    run_ranks(2, [](ProcessGroup& group) {
        const std::string rank = "rank " + std::to_string(group.rank());
        std::vector<TensorSpec> specs;
        for (int i = 0; i < 12; ++i) specs.push_back({"w" + std::to_string(i), {1000}});
        Model model(group, specs, {.shard = Shard::Gradients, .limits = {1, 1}});
        const auto sgd = ddp::make_sgd(model, {});
        EXPECT_EQ(
            thrown_by([&] { auto guard = model.no_sync(); }),
            "Error: " + rank +
                ": no_sync: the gradients of a step share memory, so several passes cannot be added up; set "
                "ModelOptions::accumulates");
        EXPECT_EQ(
            thrown_by([&] { model.mark_ready(8); }),
            "Error: " + rank +
                ": the gradient of parameter 'w8' came before those of 'w11', with which it shares memory; "
                "write gradients in the reverse of the parameters' order, or set ModelOptions::accumulates");
        EXPECT_EQ(
            thrown_by([&] { static_cast<void>(model.gradients()); }),
            "Error: " + rank +
                ": a sharded model has no whole average of a gradient: use an optimizer over the model, and "
                "its step()");
        EXPECT_EQ(
            thrown_by([&] { model.set_hook(ddp::bf16_compression()); }),
            "InvalidInput: " + rank + ": a communication hook needs whole gradients: leave Shard::None");
        EXPECT_EQ(thrown_by([&] { model.gather(3); }),
                  "InvalidInput: " + rank + ": the model has no parameter of unit 3");
        EXPECT_EQ(thrown_by([&] { static_cast<void>(model.weights<double>(0)); }).substr(0, 12),
                  "InvalidInput");
        model.mark_ready(11);
        EXPECT_EQ(thrown_by([&] { sgd->step(); }).substr(0, 6), "Error:");
        std::vector<float> borrowed(3);
        EXPECT_EQ(
            thrown_by([&] { ddp::make_sgd({ddp::tensor_of("w", borrowed, {3})}, {})->step(); }),
            "Error: optimizer: step() without gradients is for an optimizer over a Model: make_sgd(model, ...)");
    });
}

/// Models and optimizers of ranks whose groups end before them.
struct Survivors {
    explicit Survivors(Training what) : training(std::move(what)) {
        for (int rank = 0; rank < 3; ++rank)
            models.push_back(std::make_unique<Model>(training.specs, training.options({Shard::None})));
        training.fill(*models[0]);
        optimizers.resize(3);
    }
    /// Trains steps [from, to) in a group of its own; model m has rank (m + turn) % 3. A model that `fails`
    /// ends the group inside the last step.
    void train(int from, int to, int turn = 0, int fails = -1) {
        run_ranks(3, [&](ProcessGroup& group) {
            const int m = (group.rank() + 3 - turn) % 3;
            Model& model = *models[static_cast<std::size_t>(m)];
            auto& optimizer = optimizers[static_cast<std::size_t>(m)];
            model.attach(group, from == 0);
            if (!optimizer) optimizer = training.optimizer(model);
            for (int step = from; step < to; ++step) {
                if (m == fails && step + 1 == to) {
                    model.mark_ready(training.specs.size() - 1);
                    throw std::runtime_error("killed");
                }
                training.one_step(model, *optimizer, group.rank(), step);
            }
            const std::string found = model.verify_equal_parameters();
            if (m == 0) digest = found;
        });
    }
    [[nodiscard]] std::string undisturbed() const {
        std::string expected;
        run_ranks(3, [&](ProcessGroup& group) {
            const std::string found = training.run(group, {Shard::None});
            if (group.rank() == 0) expected = found;
        });
        return expected;
    }
    Training training;
    std::vector<std::unique_ptr<Model>> models;
    std::vector<std::unique_ptr<ddp::Optimizer>> optimizers;
    std::string digest;
};

TEST(ModelWithoutAGroup, TrainsOverSeveralGroupsToTheBitsOfOne) {
    for (const bool skips : {false, true}) {
        Survivors all({.clips = true, .passes = 2, .skips = skips, .groups = true, .steps = 6});
        const void* const place = all.models[1]->weights<float>(0).data();
        all.train(0, 2);
        all.train(2, 5, 1);
        all.train(5, 6, 2);
        EXPECT_EQ(all.digest, all.undisturbed());
        EXPECT_EQ(all.models[1]->weights<float>(0).data(), place);
    }
}

TEST(ModelWithoutAGroup, RepeatsTheStepInWhichItsGroupFailed) {
    Survivors all({.clips = true, .passes = 2, .steps = 4});
    EXPECT_THROW(all.train(0, 3, 0, 1), std::runtime_error);
    EXPECT_THROW(all.train(2, 3, 0, 0), std::runtime_error);
    all.train(2, 4);
    EXPECT_EQ(all.digest, all.undisturbed());
}

TEST(ModelWithoutAGroup, HasWeightsAndOptimizersBeforeItsFirstGroup) {
    Survivors all({.specs = kTwo, .steps = 3});
    for (std::size_t m = 0; m < 3; ++m) all.optimizers[m] = all.training.optimizer(*all.models[m]);
    all.train(0, 3);
    EXPECT_EQ(all.digest, all.undisturbed());
}

TEST(ModelWithoutAGroup, TrainsInAGroupOfAnotherSize) {
    Survivors all({.steps = 4});
    all.train(0, 2);
    run_ranks(2, [&](ProcessGroup& group) {
        const auto m = static_cast<std::size_t>(group.rank());
        all.models[m]->attach(group, false);
        all.training.one_step(*all.models[m], *all.optimizers[m], group.rank(), 2);
        EXPECT_NE(all.models[m]->verify_equal_parameters(), all.digest);
    });
}

TEST(ModelWithoutAGroup, SaysWhatNeedsOne) {
    Model model(kMixed), sharded(kTwo, {.shard = Shard::Optimizer});
    for (Model* const each : {&model, &sharded}) {
        EXPECT_EQ(thrown_by([&] { each->mark_ready(0); }),
                  "Error: the model has no group yet: call attach() first");
        EXPECT_EQ(
            thrown_by([&] { ddp::make_adamw(*each, {}); }),
            "Error: the optimizer copies 16-bit weights, and takes memory from the group of a sharded model: "
            "attach the model first");
    }
    EXPECT_EQ(model.weights<float>(0).back(), 0.0F);
    EXPECT_EQ(thrown_by([&] { static_cast<void>(model.weights<float>(10)); }),
              "InvalidInput: there is no parameter 10; the model has 10, counted from 0");
    EXPECT_EQ(thrown_by([&] { static_cast<void>(sharded.weights<float>(0)); }),
              "Error: the model has no group yet: call attach() first");
}

TEST(ModelWithoutAGroup, IsRefusedASecondOneWhereItIsSharded) {
    std::vector<std::unique_ptr<Model>> models;
    for (int rank = 0; rank < 2; ++rank)
        models.push_back(std::make_unique<Model>(kTwo, ModelOptions{.shard = Shard::Gradients}));
    const auto attach = [&](ProcessGroup& group) {
        models[static_cast<std::size_t>(group.rank())]->attach(group);
    };
    run_ranks(2, attach);
    for (const auto& failure : ddp::testing::failures_of_ranks(2, attach))
        EXPECT_EQ(ddp::testing::message_of(failure),
                  "optimizer state is sharded: a failure restarts from the last checkpoint");
}

class ModelsThatDiffer : public ddp::testing::OnNodes {
  protected:
    static void expect_on_all_ranks(const std::function<void(ProcessGroup&)>& call, const std::string& why) {
        for (const auto& failure : failures(call)) EXPECT_EQ(ddp::testing::message_of(failure), why);
    }
};
INSTANTIATE_TEST_SUITE_P(, ModelsThatDiffer, ddp::testing::three_ranks(), ddp::testing::name_of_nodes);

TEST_P(ModelsThatDiffer, AreRefusedOnAllRanks) {
    expect_on_all_ranks(
        [](ProcessGroup& group) {
            Model(group, kTwo, {.shard = group.rank() == 1 ? Shard::Gradients : Shard::Optimizer});
        },
        "the model's shard is gradients on rank 1, optimizer on rank 0");
    const std::pair<const char*, void (*)(ModelOptions&)> options[] = {
        {"overlaps_gather is true", [](ModelOptions& one) { one.overlaps_gather = true; }},
        {"broadcast_buffers is false", [](ModelOptions& one) { one.broadcast_buffers = false; }},
        {"verify_every is 5", [](ModelOptions& one) { one.verify_every = 5; }}};
    for (const auto& [what, change] : options) {
        for (const auto& failure : failures([&, change = change](ProcessGroup& group) {
                 ModelOptions own;
                 if (group.rank() == 1) change(own);
                 Model(group, kTwo, own);
             }))
            EXPECT_TRUE(ddp::testing::message_of(failure).starts_with(std::string("the model's ") + what +
                                                                      " on rank 1, "));
    }
    expect_on_all_ranks(
        [](ProcessGroup& group) {
            Model(group, {{"a", {3000}}, {"b", {group.rank() == 2 ? 1 : 2}}}, {.shard = Shard::Optimizer});
        },
        "rank 2's parameters differ from rank 0's: parameter 1 is 'b' (float32[1]) there, 'b' (float32[2]) on rank 0");
    expect_on_all_ranks(
        [](ProcessGroup& group) {
            Model(group, {{group.rank() == 1 ? "c" : "a", {3000}}}, {});
        },
        "rank 1's parameters differ from rank 0's: parameter 0 is 'c' (float32[3000]) there, 'a' (float32[3000]) on "
        "rank 0");
    expect_on_all_ranks(
        [](ProcessGroup& group) {
            Model(group, {{"a", {1}, DType::F32, static_cast<std::size_t>(group.rank())}}, {});
        },
        "the list of the parameters' units is 1 on rank 1, 0 on rank 0");
}

TEST_P(ModelsThatDiffer, FailOnAllRanksWhenTheyCannotBeTrained) {
    const auto refused = [](std::vector<TensorSpec> specs, ModelOptions options, const std::string& why) {
        expect_on_all_ranks([&](ProcessGroup& group) { Model(group, specs, options); }, why);
    };
    refused({}, {}, "the model has no parameter to train");
    refused({{"a", {1}}, {"a", {2}}}, {}, "two tensors are named 'a'");
    refused({{"", {1}}}, {}, "a tensor has no name");
    refused({{"n", {3}, DType::I64}}, {}, "parameter 'n' is int64[3]: only floating types can be trained");
    refused({{"a", {4, -1}}}, {}, "parameter 'a': float32[4, -1] is not a shape of a tensor in memory");
    refused({{"a", {std::int64_t{1} << 62}}}, {},
            "parameter 'a': float32[4611686018427387904] is larger than the address space");
    refused(kTwo, {.shard = static_cast<Shard>(77)}, "there is no Shard 77");
    refused(kTwo, {.share_weights = true},
            "share_weights: each rank steps its part of the weights, which needs another Shard than None");
    if (GetParam().size() == 1) return;
    for (const auto& failure : failures([&](ProcessGroup& group) {
             Model(group, kTwo, {.shard = Shard::Optimizer, .share_weights = true});
         }))
        EXPECT_TRUE(
            ddp::testing::message_of(failure).starts_with("share_weights: the ranks share no memory over "));
}

}  // namespace
