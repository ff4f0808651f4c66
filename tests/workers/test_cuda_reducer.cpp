#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <random>

#include "ddp/checkpoint.h"
#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "ddp/ddp.h"
#include "ddp/grad_scaler.h"
#include "ddp/model.h"
#include "ddp/optimizer.h"
#include "ddp/reduce/reducer.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/cuda_fixture.h"
#include "tests/workers/nccl_world.h"
#include "tests/workers/staged_world.h"
#include "tests/workers/symmetric_group.h"

namespace {

using ddp::Buffer;
using ddp::DistributedDataParallel;
using ddp::DType;
using ddp::ProcessGroup;
using ddp::Tensor;
using ddp::testing::failures_of;
using ddp::testing::message_of;
using ddp::testing::NcclRank;
using ddp::testing::random_floats;

const std::vector<std::size_t> kCounts = {7, 100, 1, 300, 64, 1000, 3};
const ddp::ReducerOptions kSmallBuckets = {.limits = {.first_bytes = 512, .cap_bytes = 1024}};

/// Runs every rank on its own device, over the fake NCCL; no rank may fail.
void run_on_devices(int ranks, const std::function<void(ProcessGroup&)>& fn,
                    const ddp::testing::NcclWorldOptions& options = {}) {
    const auto failures = failures_of(
        ranks, [&](NcclRank& rank) { fn(rank.group); }, options);
    for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
}

/// float32 memory on the host or a device, accessed by the host.
class Memory {
  public:
    Memory(ddp::Device device, std::size_t count) : device_(device), host_(count) {
        if (device.kind == ddp::Device::Kind::Cuda)
            on_device_.emplace(ddp::cuda::Gpu::of(device.index), host_, DType::F32);
    }
    [[nodiscard]] Buffer buffer() {
        return on_device_ ? on_device_->buffer() : ddp::buffer_of(std::span(host_));
    }

  private:
    ddp::Device device_;
    std::vector<float> host_;
    std::optional<ddp::testing::OnDevice<float>> on_device_;
};

void put(const Buffer& to, const std::vector<float>& values) {
    if (to.device.kind == ddp::Device::Kind::Cpu) {
        std::memcpy(to.data, values.data(), to.bytes());
        return;
    }
    const auto gpu = ddp::cuda::Gpu::of(to.device.index);
    ddp::cuda::copy(to.data, values.data(), to.bytes(), nullptr);
}

std::vector<float> get(const Buffer& from) {
    std::vector<float> values(from.count);
    if (from.device.kind == ddp::Device::Kind::Cpu) {
        std::memcpy(values.data(), from.data, from.bytes());
        return values;
    }
    const auto gpu = ddp::cuda::Gpu::of(from.device.index);
    ddp::cuda::copy(values.data(), from.data, from.bytes(), nullptr);
    ddp::cuda::synchronize(nullptr);
    return values;
}

/// Parameters on the group's device; rank 0's values differ from the others'.
struct Model {
    std::vector<Memory> memory;
    std::vector<Tensor> parameters;
    explicit Model(const ProcessGroup& group, const std::vector<std::size_t>& counts = kCounts) {
        memory.reserve(counts.size());
        for (std::size_t i = 0; i < counts.size(); ++i) {
            Memory& mine = memory.emplace_back(group.device(), counts[i]);
            put(mine.buffer(),
                random_floats(counts[i], static_cast<unsigned>(i + 1000U * (group.rank() == 0))));
            parameters.push_back(
                {"layer" + std::to_string(i), {static_cast<std::int64_t>(counts[i])}, mine.buffer()});
        }
    }
};

void backward(DistributedDataParallel& model, int rank, unsigned step) {
    for (std::size_t i = kCounts.size(); i-- > 0;) {
        const Buffer gradient = model.gradient(i);
        put(gradient, random_floats(gradient.count, static_cast<unsigned>(7919 * rank) + 31 * step +
                                                        static_cast<unsigned>(i)));
        model.mark_ready(i);
    }
}

/// All gradients and parameters of rank 0 after some steps.
using Outcome = std::vector<std::vector<float>>;
Outcome train(ProcessGroup& group,
              const std::function<std::unique_ptr<ddp::Optimizer>(std::vector<Tensor>)>& make) {
    Model memory(group);
    DistributedDataParallel model(group, memory.parameters, {.reducer = kSmallBuckets});
    const auto optimizer = make(memory.parameters);
    for (unsigned step = 0; step < 5; ++step) {
        backward(model, group.rank(), step);
        model.finish();
        optimizer->step(model.gradients());
    }
    model.verify_equal_parameters();
    Outcome outcome;
    for (const Buffer& gradient : model.gradients()) outcome.push_back(get(gradient));
    for (const Tensor& parameter : memory.parameters) outcome.push_back(get(parameter.memory));
    return outcome;
}

TEST(DeviceReducer, TrainsToTheBitsOfTheHost) {
    const auto make = [](std::vector<Tensor> parameters) {
        return ddp::make_adamw(std::move(parameters), {.learning_rate = 0.01});
    };
    // In a symmetric window NCCL only sums, so gradients are divided first: exact for a power of two.
    struct Case {
        int ranks;
        std::vector<std::string> hidden;
    };
    const std::vector<std::string> windows{"ncclCommWindowRegister"};
    for (const auto& [ranks, hidden] :
         {Case{1, {}}, Case{2, {}}, Case{4, {}}, Case{2, windows}, Case{3, windows}, Case{4, windows}}) {
        Outcome on_host, on_device;
        ddp::testing::run_ranks(ranks, [&](ProcessGroup& group) {
            Outcome mine = train(group, make);
            if (group.rank() == 0) on_host = std::move(mine);
        });
        run_on_devices(ranks,
                       [&](ProcessGroup& group) {
                           Outcome mine = train(group, make);
                           EXPECT_EQ(group.shared_memory_is_symmetric(), hidden.empty());
                           if (group.rank() == 0) on_device = std::move(mine);
                       },
                       {.hidden = hidden});
        EXPECT_EQ(on_device, on_host) << ranks << " ranks";
        EXPECT_EQ(on_device.size(), 2 * kCounts.size());
    }
}

TEST(DeviceReducer, TrainsToTheBitsOfTheHostWithSeveralRanksOnOneDevice) {
    const auto make = [](std::vector<Tensor> parameters) {
        return ddp::make_adamw(std::move(parameters), {.learning_rate = 0.01});
    };
    for (const int ranks : {2, 3, 4, 8}) {
        Outcome on_host;
        std::vector<Outcome> on_device(static_cast<std::size_t>(ranks));
        ddp::testing::run_ranks(ranks, [&](ProcessGroup& group) {
            Outcome mine = train(group, make);
            if (group.rank() == 0) on_host = std::move(mine);
        });
        const auto failures = ddp::testing::staged_failures_of(ranks, [&](ProcessGroup& group) {
            on_device[static_cast<std::size_t>(group.rank())] = train(group, make);
        });
        for (const auto& failure : failures) EXPECT_EQ(message_of(failure), "");
        for (const Outcome& rank : on_device) EXPECT_TRUE(rank == on_host) << ranks << " ranks";
    }
}

TEST(DeviceReducer, DoesNotWaitForTheDevice) {
    const ddp::testing::Count blocking_calls = ddp::testing::blocking_calls();
    if (blocking_calls == nullptr) GTEST_SKIP() << "only the fake CUDA counts the calls that wait";
    run_on_devices(2, [&](ProcessGroup& group) {
        Model memory(group);
        DistributedDataParallel model(group, memory.parameters, {.reducer = kSmallBuckets});
        for (unsigned step = 0; step < 3; ++step) {
            for (std::size_t i = 0; i < kCounts.size(); ++i)
                put(model.gradient(i), random_floats(kCounts[i], step));
            const long before = blocking_calls();
            for (std::size_t i = 0; i < kCounts.size(); ++i) model.mark_ready(i);
            model.finish();
            EXPECT_EQ(blocking_calls(), before) << "step " << step;
        }
        EXPECT_EQ(model.statistics().steps, 3U);
    });
}

TEST(DeviceReducer, NeverMovesAGradient) {
    run_on_devices(2, [&](ProcessGroup& group) {
        Model memory(group);
        DistributedDataParallel model(group, memory.parameters, {.reducer = kSmallBuckets});
        const auto places = [&] {
            std::vector<void*> all;
            for (const ddp::Buffer& gradient : model.gradients()) all.push_back(gradient.data);
            return all;
        };
        const std::vector<void*> before = places();
        for (unsigned step = 0; step < 2; ++step) {
            for (std::size_t i = 0; i < kCounts.size(); ++i)
                model.mark_ready(i);  // in another order than planned
            model.finish();
            EXPECT_EQ(places(), before) << "step " << step;
        }
    });
}

TEST(DeviceReducer, ReducesTheSumOfAccumulatedPasses) {
    run_on_devices(2, [](ProcessGroup& group) {
        Model memory(group, {4});
        DistributedDataParallel model(group, memory.parameters);
        model.zero_gradients();
        const auto add = [&](float value) {
            std::vector<float> gradient = get(model.gradient(0));
            for (float& element : gradient) element += value;
            put(model.gradient(0), gradient);
            model.mark_ready(0);
            model.finish();
        };
        {
            const auto guard = model.no_sync();
            add(1);
        }
        EXPECT_EQ(model.statistics().buckets, 0U);
        add(static_cast<float>(2 * group.rank()));
        EXPECT_EQ(get(model.gradient(0)), std::vector<float>(4, 2));
    });
}

TEST(DeviceReducer, AveragesTheExistingGradientsWithUnusedParameters) {
    run_on_devices(3, [](ProcessGroup& group) {
        Model memory(group, {10, 10, 10});
        DistributedDataParallel model(group, memory.parameters,
                                      {.reducer = {.limits = {}, .find_unused_parameters = true}});
        for (int step = 0; step < 3; ++step) {
            // Parameter 0 has a gradient on all ranks, 1 on rank 1 only, 2 on none.
            put(model.gradient(0), std::vector<float>(10, 3));
            model.mark_ready(0);
            if (group.rank() == 1) {
                put(model.gradient(1), std::vector<float>(10, 6));
                model.mark_ready(1);
            }
            model.finish();
            EXPECT_EQ(get(model.gradient(0)), std::vector<float>(10, 3));
            EXPECT_EQ(get(model.gradient(1)), std::vector<float>(10, 2));
            EXPECT_EQ(get(model.gradient(2)), std::vector<float>(10, 0));
            EXPECT_TRUE(model.is_used(1));
            EXPECT_FALSE(model.is_used(2));
        }
    });
}

TEST(DeviceReducer, SendsRankZerosBuffersToAllRanksAndLetsARankEndEarly) {
    run_on_devices(2, [](ProcessGroup& group) {
        Model memory(group, {4, 1000}), running(group, {3, 5});
        for (std::size_t i = 0; i < 2; ++i) running.parameters[i].name = "running" + std::to_string(i);
        put(memory.parameters[1].memory, std::vector<float>(1000, static_cast<float>(group.rank() + 5)));
        DistributedDataParallel model(group, memory.parameters, {.buffers = running.parameters});
        EXPECT_EQ(get(memory.parameters[1].memory), std::vector<float>(1000, 5));
        ddp::Join join(model, {.divide_by_initial_world_size = false});
        for (int batch = 0; batch < 1 + group.rank(); ++batch) {
            put(running.parameters[1].memory, std::vector<float>(5, static_cast<float>(group.rank() + 1)));
            model.begin_forward();
            EXPECT_EQ(get(running.parameters[1].memory), std::vector<float>(5, 2))
                << "the last rank with batches sends the buffers";
            for (const std::size_t i : {1, 0}) {
                put(model.gradient(i), std::vector<float>(memory.parameters[i].memory.count,
                                                          static_cast<float>(2 * group.rank())));
                model.mark_ready(i);
            }
            model.finish();
            EXPECT_EQ(get(model.gradient(0)), std::vector<float>(4, batch == 0 ? 1.0F : 2.0F))
                << "the average is over the ranks with batches";
        }
        join.finish();
    });
}

TEST(DeviceReducer, NamesTheRankWhoseParametersDiffer) {
    run_on_devices(3, [](ProcessGroup& group) {
        Model memory(group, {10});
        DistributedDataParallel model(group, memory.parameters);
        EXPECT_EQ(model.verify_equal_parameters().size(), 64U);
        if (group.rank() == 2) put(memory.parameters[0].memory, std::vector<float>(10, 1));
        try {
            model.verify_equal_parameters();
            ADD_FAILURE() << "rank 2's parameters differ";
        } catch (const ddp::MismatchError& error) {
            EXPECT_STREQ(
                error.what(),
                "parameters on rank 2 are not bitwise equal to rank 0's after 0 steps; the first that "
                "differs is 'layer0' (float32[10])");
        }
    });
}

/// A "backward pass" on the device only: the gradient is a part of the parameter that depends on the rank.
void backward_on_device(DistributedDataParallel& model, ProcessGroup& group) {
    const auto gpu = ddp::cuda::Gpu::of(group.device().index);
    const auto stream = static_cast<ddp::cuda::Stream>(group.stream());
    for (std::size_t i = kCounts.size(); i-- > 0;) {
        ddp::cuda::scale_cast(*gpu, model.parameters()[i].memory, model.gradient(i),
                              0.5F + 0.25F * static_cast<float>(group.rank()), stream);
        model.mark_ready(i);
    }
}

TEST(DeviceReducer, CanBeCapturedWithTheWholeStepInAGraph) {
    Outcome outcomes[2];
    for (const bool with_graph : {false, true}) {
        const auto one_rank = [&](NcclRank& rank) {
            ProcessGroup& group = rank.group;
            Model memory(group);
            ddp::cuda::synchronize(nullptr);
            DistributedDataParallel model(group, memory.parameters, {.reducer = kSmallBuckets});
            const auto optimizer = ddp::make_adamw(
                memory.parameters, {.learning_rate = 0.1, .device = {.stream = group.stream()}});
            const auto step = [&] {
                backward_on_device(model, group);
                model.finish();
                optimizer->step(model.gradients());
            };
            const auto gpu = ddp::cuda::Gpu::of(group.device().index);
            const auto stream = static_cast<ddp::cuda::Stream>(group.stream());
            step();
            if (with_graph) {
                ddp::cuda::Capture capture(stream);
                step();
                const auto graph = capture.end();
                for (int t = 0; t < 4; ++t) graph->launch(stream);
                ddp::cuda::synchronize(stream);
            } else {
                for (int t = 0; t < 4; ++t) step();
            }
            EXPECT_EQ(optimizer->steps(), 5U);
            model.verify_equal_parameters();
            if (group.rank() != 0) return;
            for (const Tensor& parameter : memory.parameters)
                outcomes[with_graph].push_back(get(parameter.memory));
        };
        for (const auto& failure : failures_of(2, one_rank, {.own_stream = true}))
            EXPECT_EQ(message_of(failure), "");
    }
    EXPECT_EQ(outcomes[true], outcomes[false]);
    EXPECT_EQ(outcomes[true].size(), kCounts.size());
}

TEST(DeviceModel, HasTheBitsOfAnUnshardedOneHoweverItIsSharded) {
    // Two ranks: an average is exact whether the sum is divided or its terms.
    run_on_devices(2, [](ProcessGroup& group) {
        const auto digest = [&](ddp::Shard shard, bool adam) {
            std::vector<ddp::TensorSpec> specs;
            for (std::size_t i = 0; i < kCounts.size(); ++i)
                specs.push_back({"layer" + std::to_string(i), {static_cast<std::int64_t>(7 * kCounts[i])}});
            ddp::Model model(group, specs, {.shard = shard, .limits = kSmallBuckets.limits});
            for (std::size_t i = 0; i < specs.size() && group.rank() == 0; ++i)
                put(model.parameters()[i].memory, random_floats(7 * kCounts[i], static_cast<unsigned>(i)));
            const auto optimizer =
                adam ? ddp::make_adamw(model, {.device = {.stream = group.stream()}})
                     : ddp::make_sgd(model, {.momentum = 0.9, .device = {.stream = group.stream()}});
            for (unsigned step = 0; step < 3; ++step) {
                for (std::size_t i = specs.size(); i-- > 0;) {
                    put(model.gradient(i),
                        random_floats(7 * kCounts[i], 31 * step + static_cast<unsigned>(7 * group.rank())));
                    model.mark_ready(i);
                }
                model.finish();
                optimizer->step();
            }
            EXPECT_EQ(optimizer->steps(), 3U);
            for (const Tensor& state : optimizer->state()) {
                if (state.name.starts_with("step.")) continue;
                EXPECT_EQ(state.part_begin.has_value(), shard != ddp::Shard::None && state.name != "steps");
            }
            return model.verify_equal_parameters();
        };
        for (const bool adam : {true, false}) {
            const std::string expected = digest(ddp::Shard::None, adam);
            EXPECT_EQ(digest(ddp::Shard::Optimizer, adam), expected);
            EXPECT_EQ(digest(ddp::Shard::Gradients, adam), expected);
        }
        EXPECT_THROW(ddp::Model(group, {{"w", {8}}}, {.shard = ddp::Shard::Parameters}), ddp::InvalidInput);
    });
}

TEST(DeviceReducer, RefusesToWaitOnTheHostForACapturedCollective) {
    const auto one_rank = [](NcclRank& rank) {
        ProcessGroup& group = rank.group;
        const auto gpu = ddp::cuda::Gpu::of(group.device().index);
        const ddp::testing::OnDevice<float> values(gpu, {1, 2}, DType::F32);
        ddp::cuda::Capture capture(static_cast<ddp::cuda::Stream>(group.stream()));
        ddp::Work work = group.all_reduce(values.buffer());
        EXPECT_FALSE(work.done());
        EXPECT_THROW(work.synchronize(), ddp::Error);
        work.wait();
        const auto graph = capture.end();
        graph->launch(static_cast<ddp::cuda::Stream>(group.stream()));
        EXPECT_EQ(values.values(static_cast<ddp::cuda::Stream>(group.stream())), (std::vector<float>{2, 4}));
    };
    for (const auto& failure : failures_of(2, one_rank, {.own_stream = true}))
        EXPECT_EQ(message_of(failure), "");
}

TEST(DeviceReducer, AveragesBf16CompressedGradientsToTheBitsOfTheHost) {
    Outcome on_host, on_device;
    const auto run = [](ProcessGroup& group) {
        Model memory(group);
        DistributedDataParallel model(group, memory.parameters, {.reducer = kSmallBuckets});
        model.set_hook(ddp::bf16_compression());
        for (unsigned step = 0; step < 3; ++step) {
            backward(model, group.rank(), step);
            model.finish();
        }
        Outcome outcome;
        for (const Buffer& gradient : model.gradients()) outcome.push_back(get(gradient));
        return outcome;
    };
    ddp::testing::run_ranks(2, [&](ProcessGroup& group) {
        Outcome mine = run(group);
        if (group.rank() == 0) on_host = std::move(mine);
    });
    run_on_devices(2, [&](ProcessGroup& group) {
        Outcome mine = run(group);
        if (group.rank() == 0) on_device = std::move(mine);
    });
    EXPECT_EQ(on_device, on_host);
}

TEST(DeviceReducer, DividesSymmetricMemoryFirstAndSumsItToTheSameBits) {
    // With a power of two as the number of ranks, dividing before or after the sum rounds equally.
    const auto make = [](std::vector<Tensor> parameters) {
        return ddp::make_adamw(std::move(parameters), {.learning_rate = 0.01});
    };
    for (const int ranks : {1, 4}) {
        Outcome averaged, summed;
        run_on_devices(ranks,
                       [&](ProcessGroup& group) {
                           Outcome mine = train(group, make);
                           if (group.rank() == 0) averaged = std::move(mine);
                       },
                       {.hidden = {"ncclCommWindowRegister"}});
        run_on_devices(ranks, [&](ProcessGroup& group) {
            ddp::testing::SymmetricGroup symmetric(group);
            Outcome mine = train(symmetric, make);
            if (group.rank() == 0) summed = std::move(mine);
        });
        EXPECT_EQ(summed, averaged);
    }
}

TEST(DeviceReducer, DividesWhileItCompressesForSymmetricMemory) {
    run_on_devices(2, [](ProcessGroup& group) {
        ddp::testing::SymmetricGroup symmetric(group);
        Model memory(symmetric, {100});
        DistributedDataParallel model(symmetric, memory.parameters);
        model.set_hook(ddp::bf16_compression());
        put(model.gradient(0), std::vector<float>(100, group.rank() == 0 ? 1.0F : 2.0F));
        model.mark_ready(0);
        model.finish();
        EXPECT_EQ(get(model.gradient(0)), std::vector<float>(100, 1.5F));
    });
}

TEST(DeviceReducer, DoesNotAverageForOneRank) {
    using ddp::testing::SymmetricGroup;
    run_on_devices(1, [](ProcessGroup& group) {
        for (const bool compressed : {false, true}) {
            SymmetricGroup sums_only(group, SymmetricGroup::Memory::Any);
            Model memory(sums_only, {100});
            DistributedDataParallel model(sums_only, memory.parameters);
            if (compressed) model.set_hook(ddp::bf16_compression());
            put(model.gradient(0), std::vector<float>(100, 3.0F));
            model.mark_ready(0);
            model.finish();
            EXPECT_EQ(get(model.gradient(0)), std::vector<float>(100, 3.0F));
        }
    });
}

TEST(GradScaler, SkipsAStepOnEveryRankWhenOneRanksGradientIsNotFinite) {
    run_on_devices(3, [](ProcessGroup& group) {
        Model memory(group, {50, 20});
        DistributedDataParallel model(group, memory.parameters);
        ddp::GradScaler scaler(group.device(), {.initial_scale = 16});
        const auto optimizer = ddp::make_adamw(memory.parameters, {.device = {.scaler = &scaler}});
        const std::vector<float> before = get(memory.parameters[0].memory);
        for (int step = 0; step < 2; ++step) {
            for (const std::size_t i : {1, 0}) {
                std::vector<float> gradient(i == 0 ? 50 : 20, 1.0F);
                if (step == 0 && i == 1 && group.rank() == 2) gradient[7] = INFINITY;
                put(model.gradient(i), gradient);
                model.mark_ready(i);
            }
            model.finish();
            scaler.check(model.gradients());
            optimizer->step(model.gradients());
            scaler.update();
            EXPECT_EQ(get(memory.parameters[0].memory) == before, step == 0);
            EXPECT_EQ(scaler.read_scale(), 8);
        }
        EXPECT_EQ(optimizer->steps(), 1U);
        model.verify_equal_parameters();
    });
}

TEST(DeviceReducer, RefusesParametersInHostMemory) {
    run_on_devices(1, [](ProcessGroup& group) {
        std::vector<float> values(3);
        EXPECT_THROW(DistributedDataParallel(group, {ddp::tensor_of("w", std::span(values), {3})}),
                     ddp::InvalidInput);
    });
}

TEST(DeviceCheckpoint, CanBeReadByTheHostAndWrittenBack) {
    const ddprun::test::TemporaryDirectory directory;
    const auto gpu = ddp::cuda::Gpu::of(0);
    ddp::CheckpointDirectory checkpoints(directory.path());
    const ddp::testing::OnDevice<float> values(gpu, {1, 2, 3}, DType::F32), state(gpu, {4, 5, 6}, DType::F32);
    const Tensor on_device{"w", {3}, values.buffer()}, state_on_device{"momentum.w", {3}, state.buffer()};
    ddp::TrainingState training;
    training.step = 3;
    const std::string path = checkpoints.save({&on_device, 1}, {&state_on_device, 1}, training);

    std::vector<float> host_values(3), host_state(3);
    const Tensor on_host = ddp::tensor_of("w", std::span(host_values), {3});
    const Tensor state_on_host = ddp::tensor_of("momentum.w", std::span(host_state), {3});
    EXPECT_EQ(ddp::load_checkpoint(path, {&on_host, 1}, {&state_on_host, 1}).step, 3U);
    EXPECT_EQ(host_values, (std::vector<float>{1, 2, 3}));
    EXPECT_EQ(host_state, (std::vector<float>{4, 5, 6}));

    values.put({0, 0, 0});
    ddp::load_checkpoint(path, {&on_device, 1}, {&state_on_device, 1});
    EXPECT_EQ(values.values(), (std::vector<float>{1, 2, 3}));
}

}  // namespace
