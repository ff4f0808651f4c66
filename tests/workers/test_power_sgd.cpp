#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/optimizer.h"
#include "ddp/reduce/reducer.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/failures.h"

namespace {

using ddp::PowerSgdOptions;
using ddp::ProcessGroup;
using ddp::Reducer;
using ddp::Tensor;
using ddp::testing::run_ranks;

constexpr std::size_t kRows = 12, kColumns = 20;

/// A matrix, and a bias that is sent whole.
struct Model {
    std::vector<float> weight = std::vector<float>(kRows * kColumns), bias = std::vector<float>(kRows);
    std::vector<Tensor> parameters() {
        return {ddp::tensor_of("weight", std::span(weight), {kRows, kColumns}),
                ddp::tensor_of("bias", std::span(bias), {kRows})};
    }
};

std::span<float> floats(const ddp::Buffer& buffer) {
    return {static_cast<float*>(buffer.data), buffer.count};
}

/// Writes value(row, column) to the gradient of a Reducer or DistributedDataParallel and ends the step.
template <class Gradients, class Value>
void write_gradients(Gradients& reducer, Value value) {
    const std::span<float> weight = floats(reducer.gradient(0)), bias = floats(reducer.gradient(1));
    for (std::size_t i = 0; i < weight.size(); ++i)
        weight[i] = value(static_cast<float>(i / kColumns), static_cast<float>(i % kColumns));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = value(static_cast<float>(i), 0.0F);
    reducer.mark_ready(1);
    reducer.mark_ready(0);
    reducer.finish();
}
template <class Value>
void step(Reducer& reducer, Value value) {
    write_gradients(reducer, value);
}

/// The error of the averaged matrix, relative to the expected one.
template <class Value>
double distance(const Reducer& reducer, Value value) {
    double square = 0, length = 0;
    const std::span<float> weight = floats(reducer.gradient(0));
    for (std::size_t i = 0; i < weight.size(); ++i) {
        const double right = value(static_cast<float>(i / kColumns), static_cast<float>(i % kColumns));
        square += (double{weight[i]} - right) * (double{weight[i]} - right);
        length += right * right;
    }
    return std::sqrt(square / length);
}

/// A matrix of rank two.
float narrow(float row, float column) {
    return std::sin(row) * (column + 1) + 0.5F * std::cos(2 * row) * std::sin(column);
}

TEST(PowerSgd, AveragesAGradientOfItsRankExactly) {
    run_ranks(3, [](ProcessGroup& group) {
        Model model;
        Reducer reducer(group, model.parameters(), {});
        reducer.set_hook(ddp::power_sgd({.rank = 2, .start_step = 0, .min_compression_rate = 1}));
        for (int t = 0; t < 3; ++t) {
            step(reducer, [&](float row, float column) {
                return static_cast<float>(group.rank()) * narrow(row, column);
            });
            EXPECT_LT(distance(reducer, narrow), 1e-5) << t;
            EXPECT_NEAR(floats(reducer.gradient(1))[3], narrow(3, 0), 1e-6) << "the bias";
        }
    });
}

TEST(PowerSgd, AveragesAGradientOfALowerRankExactly) {
    for (const bool feedback : {true, false}) {
        run_ranks(2, [&](ProcessGroup& group) {
            Model model;
            Reducer reducer(group, model.parameters(), {});
            reducer.set_hook(ddp::power_sgd(
                {.rank = 6, .start_step = 0, .min_compression_rate = 0.5, .error_feedback = feedback}));
            for (int t = 0; t < 10; ++t) {
                step(reducer, narrow);
                EXPECT_LT(distance(reducer, narrow), 1e-5) << t;
            }
        });
    }
}

TEST(PowerSgd, SendsErrorsLaterAndGivesAllRanksTheSameBits) {
    const auto full = [](float row, float column) { return std::sin(row * 7 + column * column); };
    for (const bool feedback : {true, false}) {
        std::mutex mutex;
        std::vector<std::vector<float>> results(2);
        run_ranks(2, [&](ProcessGroup& group) {
            Model model;
            Reducer reducer(group, model.parameters(), {});
            reducer.set_hook(ddp::power_sgd({.start_step = 0, .error_feedback = feedback}));
            std::vector<double> sum(kRows * kColumns);
            constexpr int kSteps = 200;
            for (int t = 0; t < kSteps; ++t) {
                step(reducer, full);
                for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += double{floats(reducer.gradient(0))[i]};
            }
            double square = 0, length = 0;
            for (std::size_t i = 0; i < sum.size(); ++i) {
                const double right = full(static_cast<float>(i / kColumns), static_cast<float>(i % kColumns));
                square += (sum[i] / kSteps - right) * (sum[i] / kSteps - right);
                length += right * right;
            }
            // One direction of twelve is not enough; all of them in turn are.
            EXPECT_EQ(std::sqrt(square / length) < 0.1, feedback);
            const std::span<float> last = floats(reducer.gradient(0));
            const std::lock_guard lock(mutex);
            results[static_cast<std::size_t>(group.rank())].assign(last.begin(), last.end());
        });
        EXPECT_EQ(std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(float)), 0);
    }
}

TEST(PowerSgd, RecoversFromZeroAndNonFiniteGradients) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model;
        Reducer reducer(group, model.parameters(), {});
        reducer.set_hook(ddp::power_sgd({.rank = 2, .start_step = 0, .min_compression_rate = 1}));
        step(reducer, [](float, float) { return 0.0F; });
        EXPECT_EQ(floats(reducer.gradient(0))[7], 0);
        step(reducer, narrow);
        EXPECT_LT(distance(reducer, narrow), 1e-5);
        step(reducer, [&](float row, float) { return group.rank() == 1 && row == 2 ? INFINITY : 1.0F; });
        EXPECT_FALSE(std::isfinite(floats(reducer.gradient(0))[2 * kColumns]));
        step(reducer, narrow);
        EXPECT_LT(distance(reducer, narrow), 1e-5);
    });
}

TEST(PowerSgd, AveragesWholeGradientsBeforeItsFirstStepAndWhenTheyShrinkTooLittle) {
    const auto full = [](float row, float column) { return std::sin(row * 7 + column * column); };
    for (const PowerSgdOptions& options :
         {PowerSgdOptions{.start_step = 2}, PowerSgdOptions{.start_step = 0, .min_compression_rate = 8}}) {
        run_ranks(2, [&](ProcessGroup& group) {
            Model model;
            Reducer reducer(group, model.parameters(), {});
            reducer.set_hook(ddp::power_sgd(options));
            for (int t = 0; t < 2; ++t) {
                step(reducer, full);
                EXPECT_LT(distance(reducer, full), 1e-6);
            }
            step(reducer, full);
            EXPECT_EQ(distance(reducer, full) < 1e-6, options.min_compression_rate > 2);
        });
    }
}

TEST(PowerSgd, ResumesFromACheckpointWithTheBitsOfTheRunThatSavedIt) {
    const auto full = [](int rank, int t) {
        return [=](float row, float column) {
            return std::sin(row * 7 + column * column + static_cast<float>(rank) + static_cast<float>(3 * t));
        };
    };
    const ddprun::test::TemporaryDirectory place;
    std::vector<float> whole, resumed;
    for (const bool resumes : {false, true}) {
        run_ranks(2, [&](ProcessGroup& group) {
            Model model;
            ddp::DistributedDataParallel parallel(group, model.parameters());
            ddp::PowerSgd compression(model.parameters(), {.start_step = 2});
            parallel.set_hook(compression.hook());
            const auto optimizer = ddp::make_sgd(model.parameters(), {.learning_rate = 0.1});
            ddp::DistributedSampler sampler(100, group.size(), group.rank(), {.seed = 1});
            const ddp::Training training{parallel, *optimizer, sampler, {{"power_sgd", &compression}}};
            ddp::CheckpointDirectory checkpoints(place.path());
            if (resumes) checkpoints.load(group, training);
            for (int t = resumes ? 5 : 0; t < 10; ++t) {
                write_gradients(parallel, full(group.rank(), t));
                optimizer->step(parallel.gradients());
                if (t == 4) checkpoints.save(group, training);
            }
            if (group.rank() == 0) (resumes ? resumed : whole) = model.weight;
        });
    }
    EXPECT_EQ(std::memcmp(whole.data(), resumed.data(), whole.size() * sizeof(float)), 0);
}

TEST(PowerSgd, RefusesAGradientOfAnotherShapeInItsPlace) {
    run_ranks(2, [](ProcessGroup& group) {
        const ddp::CommunicationHook hook = ddp::power_sgd({.start_step = 0});
        std::vector<float> small(64 * 64), large(256 * 256);
        Reducer first(group, {ddp::tensor_of("w", std::span(small), {64, 64})}, {});
        first.set_hook(hook);
        first.mark_ready(0);
        first.finish();
        Reducer second(group, {ddp::tensor_of("w", std::span(large), {256, 256})}, {});
        second.set_hook(hook);
        EXPECT_EQ(
            ddp::testing::thrown_by([&] { second.mark_ready(0); }),
            "InvalidInput: power_sgd: 'w' is float32[256, 256], and this hook has seen a gradient of another "
            "shape in its place: make a hook for each model");
    });
}

TEST(PowerSgd, RefusesInvalidOptions) {
    EXPECT_THROW((void)ddp::power_sgd({.rank = 0}), ddp::InvalidInput);
    EXPECT_THROW((void)ddp::power_sgd({.min_compression_rate = 0}), ddp::InvalidInput);
}

}  // namespace
