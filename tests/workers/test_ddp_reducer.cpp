#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "ddp/ddp.h"
#include "ddp/reduce/reducer.h"
#include "ddp/testing.h"

namespace {

using ddp::Buffer;
using ddp::GradientBucket;
using ddp::ProcessGroup;
using ddp::Reducer;
using ddp::ReducerOptions;
using ddp::Tensor;
using ddp::testing::run_ranks;

/// Parameters of these sizes, and the reducer of their gradients.
struct Model {
    std::vector<std::vector<float>> values;
    std::vector<Tensor> parameters;
    explicit Model(const std::vector<std::size_t>& counts) {
        for (const std::size_t count : counts) values.emplace_back(count, 0.0F);
        for (std::size_t i = 0; i < values.size(); ++i)
            parameters.push_back(ddp::tensor_of("layer" + std::to_string(i), std::span(values[i]),
                                                {static_cast<std::int64_t>(values[i].size())}));
    }
};

const std::vector<std::size_t> kCounts = {7, 100, 1, 300, 64, 1000, 3};
constexpr ReducerOptions kSmallBuckets = {.limits = {.first_bytes = 512, .cap_bytes = 1024}};

std::span<float> floats(const Buffer& buffer) { return {static_cast<float*>(buffer.data), buffer.count}; }

/// A gradient whose average over any ranks is exact in float.
float local_value(int rank, std::size_t parameter, std::size_t element, int step) {
    return static_cast<float>((rank + 1) * 8 * static_cast<int>(parameter + element % 5 + 1) + step * 16);
}
float average_value(int world, std::size_t parameter, std::size_t element, int step) {
    float sum = 0;
    for (int r = 0; r < world; ++r) sum += local_value(r, parameter, element, step);
    return sum / static_cast<float>(world);
}

void backward(Reducer& reducer, int rank, int step, const std::vector<std::size_t>& order) {
    for (const std::size_t i : order) {
        const std::span<float> gradient = floats(reducer.gradient(i));
        for (std::size_t e = 0; e < gradient.size(); ++e) gradient[e] = local_value(rank, i, e, step);
        reducer.mark_ready(i);
    }
}

void expect_averages(const Reducer& reducer, int world, int step, std::size_t parameters) {
    for (std::size_t i = 0; i < parameters; ++i) {
        const std::span<float> gradient = floats(reducer.gradient(i));
        for (std::size_t e = 0; e < gradient.size(); ++e)
            ASSERT_EQ(gradient[e], average_value(world, i, e, step))
                << "parameter " << i << ", step " << step;
    }
}

std::vector<std::size_t> shuffled(std::size_t n, std::mt19937& random) {
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    return order;
}

TEST(Reducer, AveragesForAnyOrderOfArrivalOnEachRank) {
    for (const auto progress :
         {ddp::ProcessGroupOptions::Progress::Inline, ddp::ProcessGroupOptions::Progress::Thread}) {
        ddp::testing::RankOptions options;
        options.group.progress = progress;
        run_ranks(
            4,
            [](ProcessGroup& group) {
                Model model(kCounts);
                Reducer reducer(group, model.parameters, kSmallBuckets);
                std::mt19937 random(static_cast<unsigned>(group.rank()));
                for (int step = 0; step < 20; ++step) {
                    backward(reducer, group.rank(), step, shuffled(kCounts.size(), random));
                    reducer.finish();
                    expect_averages(reducer, 4, step, kCounts.size());
                }
                EXPECT_EQ(reducer.statistics().steps, 20U);
            },
            options);
    }
}

TEST(Reducer, StartsTheSameBucketsInTheSameOrderOnEveryRank) {
    std::mutex mutex;
    std::vector<std::vector<std::vector<std::size_t>>> started(3);
    run_ranks(3, [&](ProcessGroup& group) {
        Model model(kCounts);
        Reducer reducer(group, model.parameters, kSmallBuckets);
        const auto rank = static_cast<std::size_t>(group.rank());
        reducer.set_hook([&, rank](ProcessGroup& g, const GradientBucket& bucket) -> ddp::FinishReduction {
            {
                const std::lock_guard lock(mutex);
                started[rank].emplace_back(bucket.parameters.begin(), bucket.parameters.end());
            }
            return [work = g.all_reduce(bucket.buffer, ddp::ReduceOp::Avg)]() mutable { work.wait(); };
        });
        std::mt19937 random(7 * static_cast<unsigned>(rank));
        for (int step = 0; step < 5; ++step) {
            backward(reducer, group.rank(), step, shuffled(kCounts.size(), random));
            reducer.finish();
        }
    });
    EXPECT_GT(started[0].size(), 10U);
    EXPECT_EQ(started[0], started[1]);
    EXPECT_EQ(started[0], started[2]);
}

TEST(Reducer, StartsABucketWhileLaterGradientsAreStillMissing) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({300, 300});
        Reducer reducer(group, model.parameters, kSmallBuckets);
        ASSERT_EQ(reducer.plan(), (ddp::BucketPlan{{1}, {0}}));
        backward(reducer, group.rank(), 0, {1});
        EXPECT_EQ(reducer.statistics().buckets, 1U);
        backward(reducer, group.rank(), 0, {0});
        reducer.finish();
        expect_averages(reducer, 2, 0, 2);
    });
}

TEST(Reducer, NeverMovesAGradient) {
    run_ranks(3, [](ProcessGroup& group) {
        Model model({200, 200, 200, 200});
        Reducer reducer(group, model.parameters, kSmallBuckets);
        EXPECT_EQ(reducer.plan(), (ddp::BucketPlan{{3}, {2, 1}, {0}}));
        std::vector<void*> before;
        for (const Buffer& gradient : reducer.gradients()) before.push_back(gradient.data);
        for (int step = 0; step < 2; ++step) {
            backward(reducer, group.rank(), step, {2, 0, 3, 1});
            reducer.finish();
            expect_averages(reducer, 3, step, 4);
            for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(reducer.gradient(i).data, before[i]);
        }
    });
}

TEST(Reducer, NamesTheParametersWithoutAGradient) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model(kCounts);
        Reducer reducer(group, model.parameters, kSmallBuckets);
        backward(reducer, group.rank(), 0, {6, 4});
        try {
            reducer.finish();
            ADD_FAILURE() << "five gradients are missing";
        } catch (const ddp::Error& error) {
            EXPECT_EQ(std::string(error.what()), "rank " + std::to_string(group.rank()) +
                                                     ": no gradient for 5 of 7 parameters in this step: "
                                                     "'layer0', 'layer1', 'layer2', 'layer3', "
                                                     "...; if that is meant, set find_unused_parameters, or "
                                                     "static_graph where it is the same ones in every step");
        }
    });
}

TEST(Reducer, RefusesAGradientThatIsMarkedTwice) {
    run_ranks(1, [](ProcessGroup& group) {
        Model model(kCounts);
        Reducer reducer(group, model.parameters, kSmallBuckets);
        reducer.mark_ready(3);
        EXPECT_THROW(reducer.mark_ready(3), ddp::Error);
    });
}

TEST(Reducer, RefusesToMarkFromASecondThreadAtTheSameTime) {
    run_ranks(1, [](ProcessGroup& group) {
        Model model({10, 10});
        Reducer reducer(group, model.parameters, {.limits = {.first_bytes = 1, .cap_bytes = 1}});
        std::string refusal;
        const auto mark_other = [&] {
            try {
                reducer.mark_ready(0);
            } catch (const ddp::Error& error) {
                refusal = error.what();
            }
        };
        reducer.set_hook([&](ProcessGroup&, const GradientBucket& bucket) -> ddp::FinishReduction {
            if (bucket.index == 0) std::thread(mark_other).join();
            return [] {};
        });
        reducer.mark_ready(1);
        EXPECT_EQ(
            refusal,
            "rank 0: the gradient of parameter 'layer0' was marked ready by one thread while another was marking one; mark "
            "gradients from one thread, or under a lock");
        reducer.mark_ready(0);
        reducer.finish();
    });
}

TEST(Reducer, AveragesTheExistingGradientsWithUnusedParameters) {
    run_ranks(3, [](ProcessGroup& group) {
        Model model({10, 10, 10});
        Reducer reducer(group, model.parameters, {.limits = {}, .find_unused_parameters = true});
        for (int step = 0; step < 3; ++step) {
            // Parameter 0 has a gradient on all ranks, 1 on rank 1 only, 2 on none.
            backward(reducer, group.rank(), step,
                     group.rank() == 1 ? std::vector<std::size_t>{0, 1} : std::vector<std::size_t>{0});
            reducer.finish();
            EXPECT_EQ(floats(reducer.gradient(0))[2], average_value(3, 0, 2, step));
            EXPECT_EQ(floats(reducer.gradient(1))[2], local_value(1, 1, 2, step) / 3);
            EXPECT_EQ(floats(reducer.gradient(2))[2], 0);
            EXPECT_TRUE(reducer.is_used(0));
            EXPECT_TRUE(reducer.is_used(1));
            EXPECT_FALSE(reducer.is_used(2));
            EXPECT_EQ(reducer.gradients()[2].data, nullptr);
        }
    });
}

std::string message_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const ddp::Error& error) {
        return error.what();
    }
    return "nothing";
}

TEST(Reducer, LooksForUnusedParametersOnlyInTheFirstStepOfAStaticGraph) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({300, 10, 20, 300});
        ReducerOptions options = kSmallBuckets;
        options.static_graph = true;
        Reducer reducer(group, model.parameters, options);
        // Parameter 2 has no gradient on any rank, 1 only on rank 1.
        const std::vector<std::size_t> mine =
            group.rank() == 1 ? std::vector<std::size_t>{0, 3, 1} : std::vector<std::size_t>{0, 3};
        for (int step = 0; step < 3; ++step) {
            backward(reducer, group.rank(), step, mine);
            reducer.finish();
            EXPECT_EQ(floats(reducer.gradient(3))[1], average_value(2, 3, 1, step));
            EXPECT_EQ(floats(reducer.gradient(1))[2], local_value(1, 1, 2, step) / 2)
                << "an old average does not count";
            EXPECT_FALSE(reducer.is_used(2));
            EXPECT_TRUE(reducer.is_used(1));
        }
        // Parameter 2 shares a bucket with 1, which does not wait for 2.
        EXPECT_EQ(reducer.plan(), (ddp::BucketPlan{{3}, {2, 1, 0}}));
        backward(reducer, group.rank(), 3, {3});
        EXPECT_EQ(reducer.statistics().buckets, 7U);
        backward(reducer, group.rank(), 3,
                 group.rank() == 1 ? std::vector<std::size_t>{1, 0} : std::vector<std::size_t>{0});
        EXPECT_EQ(reducer.statistics().buckets, 8U) << "before finish()";
        reducer.finish();
    });
}

TEST(Reducer, NamesTheParameterThatChangesAStaticGraph) {
    run_ranks(1, [](ProcessGroup& group) {
        Model model({3, 3, 3});
        Reducer reducer(group, model.parameters, {.limits = {}, .static_graph = true});
        backward(reducer, 0, 0, {0, 1});
        reducer.finish();
        EXPECT_EQ(
            message_of([&] { reducer.mark_ready(2); }),
            "rank 0: parameter 'layer2' has a gradient in this step, and had none in the first; without static_graph "
            "(find_unused_parameters) that may change");
        reducer.mark_ready(0);
        EXPECT_EQ(
            message_of([&] { reducer.finish(); }),
            "rank 0: parameter 'layer1' has no gradient in this step, and had one in the first; without static_graph "
            "(find_unused_parameters) that may change");
    });
}

TEST(Reducer, CountsTheAccumulatedPassesOfAStepForItsStaticGraph) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({3, 3, 3});
        Reducer reducer(group, model.parameters, {.limits = {}, .static_graph = true});
        for (int step = 0; step < 3; ++step) {
            reducer.zero_gradients();
            reducer.set_accumulating(true);
            backward(reducer, group.rank(), step, {0});  // a gradient in the first pass only
            reducer.set_accumulating(false);
            const float first = floats(reducer.gradient(0))[0];
            backward(reducer, group.rank(), step, {1});
            reducer.finish();
            std::vector<float> sum = {first};
            group.all_reduce(ddp::buffer_of(sum), ddp::ReduceOp::Avg).wait();
            EXPECT_EQ(floats(reducer.gradient(0))[0], sum[0]);
        }
        reducer.mark_ready(1);
        EXPECT_NE(message_of([&] { reducer.finish(); }).find("parameter 'layer0' has no gradient"),
                  std::string::npos);
    });
}

TEST(Reducer, GivesAHookTheGradientsOfABucketWithTheirNamesAndShapes) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({5, 7});
        model.parameters[0].shape = {5, 1};
        Reducer reducer(group, model.parameters, {});
        std::vector<std::string> seen;
        reducer.set_hook([&](ProcessGroup& g, const GradientBucket& bucket) -> ddp::FinishReduction {
            for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
                seen.push_back(bucket.gradients[i].name + " " + ddp::describe(bucket.gradients[i]));
                EXPECT_EQ(bucket.gradients[i].memory.data, reducer.gradient(bucket.parameters[i]).data);
            }
            return [work = g.all_reduce(bucket.buffer, ddp::ReduceOp::Avg)]() mutable { work.wait(); };
        });
        backward(reducer, group.rank(), 0, {1, 0});
        reducer.finish();
        EXPECT_EQ(seen, (std::vector<std::string>{"layer1 float32[7]", "layer0 float32[5, 1]"}));
    });
}

TEST(Reducer, ReducesTheSumOfAccumulatedPassesDividedByTheRanks) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({10, 20});
        Reducer reducer(group, model.parameters, {});
        const auto add = [&](int step) {
            for (const std::size_t i : {1, 0}) {
                const std::span<float> gradient = floats(reducer.gradient(i));
                for (std::size_t e = 0; e < gradient.size(); ++e)
                    gradient[e] += local_value(group.rank(), i, e, step);
                reducer.mark_ready(i);
            }
            reducer.finish();
        };
        reducer.set_accumulating(true);
        add(0);
        add(1);
        EXPECT_EQ(reducer.statistics().buckets, 0U);
        reducer.set_accumulating(false);
        add(2);
        for (std::size_t e = 0; e < 10; ++e) {
            const float expected =
                average_value(2, 0, e, 0) + average_value(2, 0, e, 1) + average_value(2, 0, e, 2);
            EXPECT_EQ(floats(reducer.gradient(0))[e], expected);
        }
    });
}

TEST(Reducer, CountsAGradientThatOnlyAccumulatedAsUsed) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({4, 4});
        Reducer reducer(group, model.parameters, {.limits = {}, .find_unused_parameters = true});
        reducer.set_accumulating(true);
        backward(reducer, group.rank(), 0, {1});
        reducer.set_accumulating(false);
        backward(reducer, group.rank(), 0, {0});
        reducer.finish();
        EXPECT_TRUE(reducer.is_used(1));
        EXPECT_EQ(floats(reducer.gradient(1))[3], average_value(2, 1, 3, 0));
    });
}

TEST(Reducer, ReducesFloat64NextToFloat32) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> a(5);
        std::vector<double> b(5);
        Reducer reducer(group,
                        {ddp::tensor_of("a", std::span(a), {5}), ddp::tensor_of("b", std::span(b), {5})}, {});
        static_cast<float*>(reducer.gradient(0).data)[4] = static_cast<float>(group.rank());
        static_cast<double*>(reducer.gradient(1).data)[4] = 1e-12 * (group.rank() + 1);
        reducer.mark_ready(1);
        reducer.mark_ready(0);
        reducer.finish();
        EXPECT_EQ(static_cast<float*>(reducer.gradient(0).data)[4], 0.5F);
        EXPECT_EQ(static_cast<double*>(reducer.gradient(1).data)[4], (1e-12 + 2e-12) / 2);
    });
}

TEST(Reducer, TellsAllRanksInTheSameStepThatOneAsksToStop) {
    using enum ddp::DType;
    for (const ddp::DType type : {F32, F64, F16, BF16}) {
        for (const std::size_t count :
             {1U, 7U, 30U, 32U}) {  // with 7, 30 and 32 no or little padding is left
            run_ranks(3, [&](ProcessGroup& group) {
                std::vector<double> memory(2 * count);
                const auto shape = {static_cast<std::int64_t>(count)};
                Reducer reducer(group,
                                {{"a", shape, {memory.data(), count, type, {}}},
                                 {"b", shape, {memory.data() + count, count, type, {}}}},
                                {.limits = {.first_bytes = 1, .cap_bytes = 1}});
                const Buffer all = reducer.averaged(1), gradient = reducer.gradient(0);
                const auto* const bytes = static_cast<const char*>(all.data);
                for (int step = 0; step < 5; ++step) {
                    reducer.set_accumulating(step == 1);
                    reducer.mark_ready(1);
                    std::memset(gradient.data, 0x3c, gradient.bytes());
                    if (step == 1 && group.rank() == 1) reducer.request_stop();
                    reducer.mark_ready(0);
                    reducer.finish();
                    EXPECT_EQ(reducer.stop_requested(), step >= 2) << "step 1 is not reduced";
                    EXPECT_EQ(bytes[gradient.bytes() - 1], 0x3c) << "the last byte of the last gradient";
                    EXPECT_EQ(std::count(bytes + gradient.bytes(), bytes + all.bytes(), 0),
                              static_cast<std::ptrdiff_t>(all.bytes() - gradient.bytes()))
                        << "a norm over the bucket would include it";
                }
            });
        }
    }
}

TEST(Reducer, CarriesARequestToStopFromTheNextStepOnWhenTheLastGradientIsReady) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({3});
        Reducer reducer(group, model.parameters, {});
        for (const bool expected : {false, true}) {
            reducer.mark_ready(0);
            if (group.rank() == 0) reducer.request_stop();
            reducer.finish();
            EXPECT_EQ(reducer.stop_requested(), expected);
        }
    });
}

TEST(Reducer, RefusesARequestToStopThatAHookWouldLose) {
    run_ranks(1, [](ProcessGroup& group) {
        Model model({3});
        Reducer reducer(group, model.parameters, {});
        EXPECT_TRUE(reducer.carries_stop());
        reducer.set_hook(ddp::power_sgd());
        EXPECT_FALSE(reducer.carries_stop());
        EXPECT_THROW(reducer.request_stop(), ddp::Error);
        EXPECT_THROW(static_cast<void>(reducer.stop_requested()), ddp::Error);
    });
}

TEST(Reducer, RefusesParametersThatCannotBeAveraged) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<std::int64_t> counters(3);
        EXPECT_THROW(Reducer(group, {ddp::tensor_of("n", std::span(counters), {3})}, {}), ddp::InvalidInput);
    });
}

TEST(Bf16Compression, AveragesToTheRoundingOfBf16EquallyOnAllRanks) {
    std::mutex mutex;
    std::vector<std::vector<float>> results(4);
    run_ranks(4, [&](ProcessGroup& group) {
        Model model({1000, 50});
        Reducer reducer(group, model.parameters, kSmallBuckets);
        reducer.set_hook(ddp::bf16_compression());
        for (int step = 0; step < 3; ++step) {
            for (const std::size_t i : {0, 1}) {
                const std::span<float> gradient = floats(reducer.gradient(i));
                for (std::size_t e = 0; e < gradient.size(); ++e)
                    gradient[e] =
                        std::sin(static_cast<float>(e + 1)) * static_cast<float>(group.rank() + 1 + step);
                reducer.mark_ready(i);
            }
            reducer.finish();
            const std::span<float> gradient = floats(reducer.gradient(0));
            for (std::size_t e = 0; e < gradient.size(); ++e) {
                const float exact = std::sin(static_cast<float>(e + 1)) * (2.5F + static_cast<float>(step));
                ASSERT_NEAR(gradient[e], exact, std::abs(exact) / 128 + 1e-6) << e;
            }
        }
        EXPECT_EQ(reducer.statistics().steps, 3U);
        const std::lock_guard lock(mutex);
        const std::span<float> gradient = floats(reducer.gradient(0));
        results[static_cast<std::size_t>(group.rank())].assign(gradient.begin(), gradient.end());
    });
    for (const auto& result : results) EXPECT_EQ(std::memcmp(result.data(), results[0].data(), 4000), 0);
}

// Its memory goes with the group, and a bucket of the next group may lie where one of the last lay.
TEST(Bf16Compression, ServesOneGroupAfterTheOther) {
    std::vector<ddp::CommunicationHook> hooks;
    for (int rank = 0; rank < 2; ++rank) hooks.push_back(ddp::bf16_compression());
    for (int round = 0; round < 3; ++round) {
        run_ranks(2, [&](ProcessGroup& group) {
            Model model({1 << 20});
            Reducer reducer(group, model.parameters, kSmallBuckets);
            reducer.set_hook(hooks[static_cast<std::size_t>(group.rank())]);
            const std::span<float> gradient = floats(reducer.gradient(0));
            std::ranges::fill(gradient, static_cast<float>(group.rank() + round));
            reducer.mark_ready(0);
            reducer.finish();
            for (const float average : gradient) ASSERT_EQ(average, 0.5F + static_cast<float>(round));
        });
    }
}

TEST(Bf16Compression, KeepsInfinitiesAndNans) {
    run_ranks(2, [](ProcessGroup& group) {
        Model model({3});
        Reducer reducer(group, model.parameters, {});
        reducer.set_hook(ddp::bf16_compression());
        const std::span<float> gradient = floats(reducer.gradient(0));
        gradient[0] = group.rank() == 0 ? INFINITY : 1.0F;
        gradient[1] = group.rank() == 1 ? std::bit_cast<float>(0x7FFFFFFFU) : 1.0F;
        gradient[2] = -2;
        reducer.mark_ready(0);
        reducer.finish();
        EXPECT_TRUE(std::isinf(gradient[0]));
        EXPECT_TRUE(std::isnan(gradient[1]));
        EXPECT_EQ(gradient[2], -2);
    });
}

}  // namespace
