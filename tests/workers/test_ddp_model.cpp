#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/optimizer.h"
#include "ddp/reduce/loops.h"
#include "ddp/sampler.h"
#include "ddp/testing.h"
#include "env/io/socket.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/on_nodes.h"

namespace {

using ddp::DistributedDataParallel;
using ddp::ProcessGroup;
using ddp::Tensor;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;
using ddp::testing::thrown_by;
using ddprun::test::TemporaryDirectory;

constexpr std::size_t kSamples = 96, kInputs = 5;

float input(std::size_t sample, std::size_t feature) {
    const auto n = static_cast<float>(sample * kInputs + feature + 1);
    return std::sin(n * n);  // squared, so that the features are linearly independent
}
float target(std::size_t sample) { return 0.5F * input(sample, 0) - 2.0F * input(sample, 3) + 0.25F; }

/// y = w x + b under mean squared error.
struct Regression : ddp::Stateful {
    mutable std::vector<float> w = std::vector<float>(kInputs, 0.0F), b = {0.0F};
    std::vector<Tensor> parameters() const {
        return {ddp::tensor_of("w", std::span(w), {1, kInputs}), ddp::tensor_of("b", std::span(b), {1})};
    }
    std::vector<Tensor> state() const override { return parameters(); }
    void backward(DistributedDataParallel& model, std::span<const std::size_t> batch) const {
        const std::span<float> gw = model.gradient_as<float>(0), gb = model.gradient_as<float>(1);
        std::fill(gw.begin(), gw.end(), 0.0F);
        gb[0] = 0;
        const float scale = 2.0F / static_cast<float>(batch.size());
        for (const std::size_t sample : batch) {
            float error = b[0] - target(sample);
            for (std::size_t i = 0; i < kInputs; ++i) error += w[i] * input(sample, i);
            gb[0] += scale * error;
            for (std::size_t i = 0; i < kInputs; ++i) gw[i] += scale * error * input(sample, i);
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
    }
};

/// Trains epochs [from, to) with an effective batch of 24 samples.
void train(ProcessGroup& group, Regression& regression, ddp::Optimizer& optimizer, std::uint64_t from,
           std::uint64_t to) {
    DistributedDataParallel model(group, regression.parameters());
    ddp::DistributedSampler sampler(kSamples, group.size(), group.rank(), {.seed = 3});
    const std::size_t batch = 24 / static_cast<std::size_t>(group.size());
    for (std::uint64_t epoch = from; epoch < to; ++epoch) {
        sampler.set_epoch(epoch);
        const std::vector<std::size_t> mine = sampler.indices();
        for (std::size_t at = 0; at + batch <= mine.size(); at += batch) {
            regression.backward(model, std::span(mine).subspan(at, batch));
            optimizer.step(model.gradients());
        }
    }
    model.verify_equal_parameters();
}

Regression trained_by(int ranks, std::uint64_t epochs) {
    Regression result;
    run_ranks(ranks, [&](ProcessGroup& group) {
        Regression mine;
        const auto sgd = ddp::make_sgd(mine.parameters(), {.learning_rate = 0.1, .momentum = 0.9});
        train(group, mine, *sgd, 0, epochs);
        if (group.rank() == 0) result = mine;
    });
    return result;
}

TEST(DistributedDataParallel, TrainsAsOneRankDoesOnTheWholeBatch) {
    const Regression alone = trained_by(1, 40);
    EXPECT_NEAR(alone.w[3], -2.0F, 0.1F);  // training has converged
    for (const int ranks : {2, 3, 4}) {
        const Regression together = trained_by(ranks, 40);
        for (std::size_t i = 0; i < kInputs; ++i) EXPECT_NEAR(together.w[i], alone.w[i], 1e-5) << ranks;
        EXPECT_NEAR(together.b[0], alone.b[0], 1e-5);
    }
}

TEST(DistributedDataParallel, GivesTheSameBitsInEveryRun) {
    const Regression first = trained_by(4, 3), second = trained_by(4, 3);
    EXPECT_EQ(first.w, second.w);
    EXPECT_EQ(first.b, second.b);
}

TEST(DistributedDataParallel, EndsWithTheSameBitsWhenResumedFromACheckpoint) {
    for (const bool adam : {false, true}) {
        const TemporaryDirectory temporary;
        Regression whole, resumed;
        const auto make = [adam](Regression& regression) {
            return adam ? ddp::make_adamw(regression.parameters(), {.learning_rate = 0.05})
                        : ddp::make_sgd(regression.parameters(), {.learning_rate = 0.05, .momentum = 0.9});
        };
        run_ranks(2, [&](ProcessGroup& group) {
            Regression mine;
            const auto optimizer = make(mine);
            train(group, mine, *optimizer, 0, 4);
            if (group.rank() == 0) whole = mine;
        });
        std::string checkpoint;
        run_ranks(2, [&](ProcessGroup& group) {
            Regression mine;
            const auto optimizer = make(mine);
            train(group, mine, *optimizer, 0, 2);
            ddp::DistributedSampler sampler(8, group.size(), group.rank());
            sampler.set_epoch(2);
            const std::string path =
                ddp::CheckpointDirectory(temporary.path()).save(group, {mine, *optimizer, sampler});
            if (group.rank() == 0) checkpoint = path;
        });
        run_ranks(2, [&](ProcessGroup& group) {
            Regression mine;
            const auto optimizer = make(mine);
            // Only rank 0 has the position, and sends it to the others.
            ddp::DistributedSampler sampler(8, group.size(), group.rank());
            const ddp::TrainingState state =
                ddp::load_checkpoint(group, group.rank() == 0 ? checkpoint : "", {mine, *optimizer, sampler});
            EXPECT_EQ(state.epoch, 2U);
            EXPECT_EQ(sampler.state().epoch, 2U);
            train(group, mine, *optimizer, state.epoch, 4);
            if (group.rank() == 0) resumed = mine;
        });
        EXPECT_EQ(resumed.w, whole.w);
        EXPECT_EQ(resumed.b, whole.b);
    }
}

TEST(DistributedDataParallel, TrainsAModelWithAParameterWithoutElements) {
    const TemporaryDirectory temporary;
    run_ranks(2, [&](ProcessGroup& group) {
        std::vector<float> none, w = {1, 1};
        const std::vector<Tensor> parameters = {ddp::tensor_of("none", std::span(none), {0, 4}),
                                                ddp::tensor_of("w", std::span(w), {2}),
                                                ddp::tensor_of("none.too", std::span(none), {0})};
        DistributedDataParallel model(group, parameters);
        const auto adamw = ddp::make_adamw(parameters, {.learning_rate = 0.5, .weight_decay = 0});
        for (int step = 0; step < 2; ++step) {
            for (const std::size_t i : {2, 1, 0}) {
                for (float& slope : model.gradient_as<float>(i)) slope = 1;
                model.mark_ready(i);
            }
            model.finish();
            adamw->step(model.gradients());
        }
        EXPECT_NEAR(w[0], 0, 1e-6);
        model.verify_equal_parameters();
        if (group.rank() != 0) return;
        const std::string path =
            ddp::CheckpointDirectory(temporary.path()).save(parameters, adamw->state(), {0, 2, {}, {}});
        EXPECT_EQ(ddp::load_checkpoint(path, parameters, adamw->state()).step, 2U);
    });
}

TEST(DistributedDataParallel, StartsFromRankZerosParameters) {
    run_ranks(3, [](ProcessGroup& group) {
        Regression mine;
        mine.w.assign(kInputs, static_cast<float>(group.rank() + 1));
        DistributedDataParallel model(group, mine.parameters());
        EXPECT_EQ(mine.w, std::vector<float>(kInputs, 1.0F));
    });
}

TEST(DistributedDataParallel, AccumulatesInsideNoSync) {
    run_ranks(2, [](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        {
            const auto guard = model.no_sync();
            mine.backward(model, std::array<std::size_t, 1>{static_cast<std::size_t>(group.rank())});
        }
        EXPECT_EQ(model.statistics().steps, 0U);
        mine.backward(model, std::array<std::size_t, 1>{static_cast<std::size_t>(group.rank())});
        EXPECT_EQ(model.statistics().steps, 1U);
    });
}

TEST(DistributedDataParallel, RefusesTwoParametersWithSharedMemory) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> values(6), other(6);
        const auto parameters = [&](std::span<float> second) {
            return std::vector{ddp::tensor_of("embedding", std::span(values), {6}),
                               ddp::tensor_of("between", std::span(other), {6}),
                               ddp::tensor_of("head", second, {std::ssize(second)})};
        };
        const std::string why =
            "InvalidInput: parameters 'embedding' and 'head' share memory, which would be stepped twice: list a parameter that two "
            "layers share once, and add up its gradients";
        for (const std::span<float> second : {std::span(values), std::span(values).last(1)}) {
            EXPECT_EQ(thrown_by([&] { DistributedDataParallel model(group, parameters(second)); }), why);
            EXPECT_EQ(thrown_by([&] { (void)ddp::make_sgd(parameters(second), {}); }), why);
        }
        std::vector<float> both(12);
        const std::span<float> halves(both);
        EXPECT_NO_THROW((void)ddp::make_adamw({ddp::tensor_of("first half", halves.first(6), {6}),
                                               ddp::tensor_of("second half", halves.last(6), {6}),
                                               ddp::tensor_of("nothing", halves.subspan(3, 0), {0})},
                                              {}));
    });
}

TEST(DistributedDataParallel, RefusesAParameterThatDoesNotExist) {
    run_ranks(1, [](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        const std::string expected =
            "InvalidInput: rank 0: there is no parameter 7; the model has 2, counted from 0 (those of its construction: "
            "for others make another DistributedDataParallel)";
        EXPECT_EQ(thrown_by([&] { model.mark_ready(7); }), expected);
        EXPECT_EQ(thrown_by([&] { static_cast<void>(model.gradient(7)); }), expected);
        EXPECT_EQ(thrown_by([&] { static_cast<void>(model.gradient_as<float>(7)); }), expected);
        EXPECT_EQ(thrown_by([&] { static_cast<void>(model.is_used(7)); }), expected);
        EXPECT_EQ(thrown_by([&] { model.mark_ready(SIZE_MAX); }).substr(0, 12), "InvalidInput");
        // The refused calls have no effect.
        mine.backward(model, std::array<std::size_t, 1>{0});
        EXPECT_EQ(model.statistics().steps, 1U);
    });
}

TEST(DistributedDataParallel, TakesAHookOnlyBeforeTheFirstStep) {
    run_ranks(2, [](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        model.set_hook(ddp::bf16_compression());
        model.set_hook({});
        model.mark_ready(1);
        EXPECT_EQ(thrown_by([&] { model.set_hook(ddp::bf16_compression()); }).substr(0, 6), "Error:");
        model.mark_ready(0);
        model.finish();
        EXPECT_EQ(thrown_by([&] { model.set_hook(ddp::bf16_compression()); }),
                  "Error: rank " + std::to_string(group.rank()) +
                      ": the communication hook must be set before the first step; 1 are done");
    });
}

std::string message_of(const std::exception_ptr& failure) {
    try {
        if (failure) std::rethrow_exception(failure);
    } catch (const ddp::MismatchError& error) {
        return error.what();
    } catch (const std::exception& error) {
        return std::string("not a MismatchError: ") + error.what();
    }
    return "no failure";
}

class ParallelTraining : public ddp::testing::OnNodes {};
INSTANTIATE_TEST_SUITE_P(, ParallelTraining, ddp::testing::three_ranks(), ddp::testing::name_of_nodes);

TEST_P(ParallelTraining, NamesADifferentParameterAndBothShapesOnAllRanks) {
    const auto failed = failures([](ProcessGroup& group) {
        std::vector<float> w(12), b(4);
        const bool odd = group.rank() == 2;
        DistributedDataParallel model(group, {ddp::tensor_of("w", std::span(w), {odd ? 4 : 3, odd ? 3 : 4}),
                                              ddp::tensor_of("b", std::span(b), {4})});
    });
    for (const auto& failure : failed)
        EXPECT_EQ(message_of(failure),
                  "rank 2's parameters differ from rank 0's: parameter 0 is 'w' (float32[4, 3]) there, "
                  "'w' (float32[3, 4]) on rank 0");
}

TEST_P(ParallelTraining, NamesTheFirstParameterOnAllRanksWhenTheOrderDiffers) {
    const auto failed = failures([](ProcessGroup& group) {
        std::vector<float> w(4), b(4);
        std::vector<Tensor> parameters = {ddp::tensor_of("w", w, {4}), ddp::tensor_of("b", b, {4})};
        if (group.rank() == 1) std::swap(parameters[0], parameters[1]);
        DistributedDataParallel model(group, parameters);
    });
    for (const auto& failure : failed)
        EXPECT_EQ(
            message_of(failure),
            "rank 1's parameters differ from rank 0's: parameter 0 is 'b' (float32[4]) there, 'w' (float32[4]) on rank 0");
}

TEST_P(ParallelTraining, FailsOnAllRanksWhenTheNumberOfParametersDiffers) {
    const auto failed = failures([](ProcessGroup& group) {
        std::vector<float> w(12);
        std::vector<Tensor> parameters = {ddp::tensor_of("w", std::span(w), {12})};
        if (group.rank() == 1) parameters.clear();
        DistributedDataParallel model(group, parameters);
    });
    for (const auto& failure : failed)
        EXPECT_EQ(message_of(failure),
                  "rank 1's parameters differ from rank 0's: 0 parameters there, 1 on rank 0; "
                  "parameter 0 is none there, 'w' (float32[12]) on rank 0");
}

TEST(DistributedDataParallel, ComputesTheSha256OfTheParametersBytes) {
    run_ranks(2, [](ProcessGroup& group) {
        Regression mine;
        mine.w = {1, 2, 3, 4, 5};
        mine.b = {0.25F};
        DistributedDataParallel model(group, mine.parameters());
        // Python: hashlib.sha256(struct.pack("<6f", 1, 2, 3, 4, 5, 0.25)).hexdigest()
        EXPECT_EQ(model.verify_equal_parameters(),
                  "3d9643c24bc39309d40533c43618be81b2fd89f34a12e08afae384f393eb7805");
    });
}

TEST_P(ParallelTraining, DetectsOneDifferentBitInTheParameters) {
    const auto failed = failures([](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        model.verify_equal_parameters();
        if (group.rank() == 1) mine.b[0] = -0.0F;
        model.verify_equal_parameters();
    });
    for (const auto& failure : failed)
        EXPECT_EQ(
            message_of(failure),
            "parameters on rank 1 are not bitwise equal to rank 0's after 0 steps; the first that differs is 'b' (float32[1])");
}

TEST_P(ParallelTraining, NamesTheRankThatMissesAGradientOnTheOthers) {
    const auto failed = failures([](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters(),
                                      {.reducer = {.limits = {.first_bytes = 1, .cap_bytes = 1}}});
        group.barrier().wait();
        const ddp::TimeoutScope limit(group, std::chrono::milliseconds(500));
        if (group.rank() != 1) model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
    });
    EXPECT_THAT(
        message_of(failed[1]),
        ::testing::HasSubstr(
            "rank 1: no gradient for 1 of 2 parameters in this step: 'b'; if that is meant, set find_unused"));
    for (const int rank : {0, 2}) {
        EXPECT_TRUE(ddp::testing::is<ddp::TimeoutError>(failed[static_cast<std::size_t>(rank)]));
        EXPECT_THAT(message_of(failed[static_cast<std::size_t>(rank)]),
                    ::testing::HasSubstr(rank == 0 || GetParam().size() == 1 ? "rank 1" : "rank 0 on "));
    }
}

TEST_P(ParallelTraining, NamesANanGradientOfOneRankOnAllBeforeItReachesTheParameters) {
    for (const int odd : {0, 2}) {
        const auto failed = failures([odd](ProcessGroup& group) {
            Regression mine;
            DistributedDataParallel model(group, mine.parameters());
            if (group.rank() == odd) model.gradient_as<float>(0)[3] = NAN;
            model.mark_ready(1);
            model.mark_ready(0);
            model.finish();
            ddp::clip_grad_norm(model.gradients(), 1.0);
        });
        for (const auto& failure : failed)
            EXPECT_THAT(message_of(failure), ::testing::HasSubstr("gradient 0"));
    }
}

TEST(DistributedDataParallel, GivesNoGradientsToAnOptimizerBeforeTheyAreAveraged) {
    run_ranks(1, [](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        model.mark_ready(1);
        model.mark_ready(0);
        try {
            static_cast<void>(model.gradients());
            FAIL();
        } catch (const ddp::Error& error) {
            EXPECT_THAT(error.what(), ::testing::HasSubstr("call finish()"));
        }
        model.finish();
        EXPECT_EQ(model.gradients().size(), 2U);
    });
}

/// The parameters of rank 1 change between the second step and the third.
void train_with_different_parameters(ProcessGroup& group) {
    Regression mine;
    DistributedDataParallel model(group, mine.parameters(), {.verify_every = 2});
    const auto sgd = ddp::make_sgd(mine.parameters(), {});
    for (int step = 0; step < 4; ++step) {
        if (step == 2 && group.rank() == 1) mine.w[4] += 1;
        mine.backward(model, std::array<std::size_t, 1>{0});
        sgd->step(model.gradients());
        EXPECT_LT(step, 3) << "the fourth finish() compares";
    }
}

TEST(DistributedDataParallel, ComparesParametersAfterEveryVerifyEverySteps) {
    for (const auto& failure : failures_of_ranks(2, train_with_different_parameters))
        EXPECT_EQ(
            message_of(failure),
            "parameters are not bitwise equal after 4 steps, and no more than 1 of 2 ranks agree, so that the right "
            "ones are not known; the first that differs is 'w' (float32[1, 5])");
}

TEST(DistributedDataParallel, EndsTheRankWhoseParametersDifferFromThoseOfMost) {
    try {
        run_ranks(3, train_with_different_parameters);
        FAIL();
    } catch (const ddp::MismatchError& error) {
        EXPECT_EQ(error.what(), "parameters of rank 1 on " + ddprun::host_name() +
                                    " are not bitwise equal to those of the other 2 ranks after 4 steps; the "
                                    "first that differs is 'w' (float32[1, 5])");
    }
}

TEST(HashOfParameters, DiffersWhenAnyBitFlips) {
    for (const std::size_t bytes : {6U, 64U, 300U}) {
        std::string text(bytes, 'x');
        const std::uint64_t hash = ddp::hash_of(text, 1);
        EXPECT_NE(ddp::hash_of(text, 2), hash);
        for (std::size_t bit = 0; bit < 8 * bytes; ++bit) {
            const auto flip = [&] { text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8)); };
            flip();
            EXPECT_NE(ddp::hash_of(text, 1), hash) << bit;
            flip();
        }
    }
}

/// A parameter, and buffers such as those of a normalisation.
struct Normalised {
    std::vector<float> w = {0}, mean = {0, 0};
    std::vector<std::int64_t> batches = {0};
    std::vector<Tensor> parameters() { return {ddp::tensor_of("w", std::span(w), {1})}; }
    std::vector<Tensor> buffers() {
        return {ddp::tensor_of("mean", std::span(mean), {2}),
                ddp::tensor_of("batches", std::span(batches), {})};
    }
    /// Sets the buffers to values that only this rank has seen.
    void pass(DistributedDataParallel& model, float seen) {
        mean.assign(2, seen);
        ++batches[0];
        model.gradient_as<float>(0)[0] = 1;
        model.mark_ready(0);
        model.finish();
    }
};

TEST(DistributedDataParallel, SendsRankZerosBuffersToAllRanksBeforeAForwardPass) {
    run_ranks(3, [](ProcessGroup& group) {
        Normalised mine;
        const auto rank = static_cast<float>(group.rank());
        mine.mean[1] = rank + 5;
        DistributedDataParallel model(group, mine.parameters(), {.buffers = mine.buffers()});
        EXPECT_EQ(mine.mean[1], 5) << "at construction";
        EXPECT_EQ(model.state().size(), 3U);
        model.begin_forward();
        mine.pass(model, rank + 1);
        EXPECT_EQ(mine.mean[0], rank + 1);
        model.begin_forward();
        EXPECT_EQ(mine.mean[0], 1);
        EXPECT_EQ(mine.batches[0], 1);
    });
}

// PyTorch's require_forward_param_sync.
TEST(DistributedDataParallel, KeepsBuffersInTheForwardPassAfterOneInNoSync) {
    run_ranks(2, [](ProcessGroup& group) {
        Normalised mine;
        DistributedDataParallel model(group, mine.parameters(), {.buffers = mine.buffers()});
        const auto rank = static_cast<float>(group.rank());
        const auto pass_sees = [&](float local, bool accumulates) {
            const auto accumulating = model.no_sync(accumulates);
            model.begin_forward();
            const float seen = mine.mean[0];
            mine.pass(model, local);
            return seen;
        };
        pass_sees(rank + 1, false);
        EXPECT_EQ(pass_sees(rank + 2, true), 1) << "after a synchronised pass";
        EXPECT_EQ(pass_sees(rank + 3, true), rank + 2);
        EXPECT_EQ(pass_sees(rank + 4, false), rank + 3);
        EXPECT_EQ(pass_sees(rank + 5, false), 4);
    });
}

TEST(DistributedDataParallel, KeepsBuffersWithoutBroadcastBuffers) {
    run_ranks(2, [](ProcessGroup& group) {
        Normalised mine;
        DistributedDataParallel model(group, mine.parameters(),
                                      {.buffers = mine.buffers(), .broadcast_buffers = false});
        const auto rank = static_cast<float>(group.rank());
        mine.pass(model, rank + 1);
        model.begin_forward();
        EXPECT_EQ(mine.mean[0], rank + 1);
        model.broadcast_buffers(1);
        EXPECT_EQ(mine.mean[0], 2);
    });
}

TEST(DistributedDataParallel, BroadcastsAThousandParametersInFewCalls) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<std::vector<float>> values;
        std::vector<Tensor> parameters;
        for (std::size_t i = 0; i < 1000; ++i) {
            values.emplace_back(i % 7, static_cast<float>(group.rank() + 1) * static_cast<float>(i));
            parameters.push_back(ddp::tensor_of("p" + std::to_string(i), std::span(values.back()),
                                                {static_cast<std::int64_t>(i % 7)}));
        }
        values.emplace_back(300'000, static_cast<float>(group.rank()));  // too large for a coalesced bucket
        parameters.push_back(ddp::tensor_of("large", std::span(values.back()), {300'000}));
        DistributedDataParallel model(group, parameters);
        for (std::size_t i = 0; i < 1000; ++i)
            EXPECT_EQ(values[i], std::vector<float>(i % 7, static_cast<float>(i)));
        EXPECT_EQ(values.back(), std::vector<float>(300'000, 0));
        EXPECT_EQ(model.verify_equal_parameters().size(), 64U);
    });
}

TEST(DistributedDataParallel, AccumulatesOnlyWhileNoSyncSaysSo) {
    run_ranks(2, [](ProcessGroup& group) {
        Regression mine;
        DistributedDataParallel model(group, mine.parameters());
        for (int part = 0; part < 6; ++part) {
            const auto accumulating = model.no_sync(part % 3 != 2);
            mine.backward(model, std::array<std::size_t, 1>{0});
        }
        EXPECT_EQ(model.statistics().steps, 2U);
        {
            auto outer = model.no_sync();
            const auto moved = std::move(outer);
            const auto inner = model.no_sync(false);
            mine.backward(model, std::array<std::size_t, 1>{0});
        }
        EXPECT_EQ(model.statistics().steps, 2U) << "an inner guard does not end an outer one";
        mine.backward(model, std::array<std::size_t, 1>{0});
        EXPECT_EQ(model.statistics().steps, 3U);
    });
}

// For example the bias of a layer without one, or a table without rows.
TEST(DistributedDataParallel, TrainsParametersThatHaveNoElements) {
    run_ranks(3, [](ProcessGroup& group) {
        std::vector<float> w{1, 2, 3}, nothing, none;
        const std::vector<Tensor> parameters{ddp::tensor_of("w", std::span(w), {3}),
                                             ddp::tensor_of("none", std::span(none), {0}),
                                             ddp::tensor_of("nothing", std::span(nothing), {4, 0})};
        DistributedDataParallel model(group, parameters);
        const auto sgd = ddp::make_sgd(parameters, {.learning_rate = 0.5, .momentum = 0.9});
        const auto adamw = ddp::make_adamw(parameters, {.learning_rate = 0});
        const std::span<float> gradient = model.gradient_as<float>(0);
        std::fill(gradient.begin(), gradient.end(), static_cast<float>(group.rank() + 1));
        for (const std::size_t parameter : {2, 1, 0}) model.mark_ready(parameter);
        model.finish();
        EXPECT_EQ(model.gradient_as<float>(0)[2], 2);
        EXPECT_TRUE(model.gradient_as<float>(1).empty());
        sgd->step(model.gradients());
        EXPECT_EQ(w, (std::vector<float>{0, 1, 2}));
        adamw->step(model.gradients());
        model.verify_equal_parameters();
    });
}

TEST(DistributedDataParallel, AveragesNextToAnEmptyBucket) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> w{1};
        std::vector<double> none;
        DistributedDataParallel model(
            group, {ddp::tensor_of("w", std::span(w), {1}), ddp::tensor_of("none", std::span(none), {0})});
        model.gradient_as<float>(0)[0] = static_cast<float>(2 * group.rank());
        for (const std::size_t parameter : {1, 0}) model.mark_ready(parameter);
        model.finish();
        EXPECT_EQ(model.gradient_as<float>(0)[0], 1);
    });
}

}  // namespace
