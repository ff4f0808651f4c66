#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "ddp/cuda/steps.h"
#include "ddp/grad_scaler.h"
#include "ddp/optimizer.h"
#include "tests/workers/cuda_fixture.h"

namespace {

using ddp::Buffer;
using ddp::Device;
using ddp::DType;
using ddp::GradScaler;
using ddp::Optimizer;
using ddp::Tensor;
using ddp::cuda::Gpu;
using ddp::cuda::OwnedStream;
using ddp::testing::gpu;
using ddp::testing::OnDevice;
using ddp::testing::random_floats;

constexpr Device kDevice{Device::Kind::Cuda, 0};
Tensor tensor(const OnDevice<float>& values) {
    return {"w", {static_cast<std::int64_t>(values.buffer().count)}, values.buffer()};
}
Tensor tensor(const OnDevice<std::uint16_t>& values) {
    return {"w", {static_cast<std::int64_t>(values.buffer().count)}, values.buffer()};
}
void step(Optimizer& optimizer, const Buffer& gradient) { optimizer.step({&gradient, 1}); }
/// AdamW's count for its only parameter, the last tensor of its state.
std::int64_t step_count(const Optimizer& optimizer) {
    const Tensor count = optimizer.state().back();
    EXPECT_EQ(count.name, "step.w");
    std::int64_t steps = -1;
    ddp::cuda::copy(&steps, count.memory.data, sizeof steps, nullptr);
    ddp::cuda::synchronize(nullptr);
    return steps;
}

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<Tensor>)>;
std::vector<Make> variants(const ddp::DeviceStepOptions& device = {}) {
    return {
        [=](auto p) { return ddp::make_sgd(std::move(p), {.learning_rate = 0.1, .device = device}); },
        [=](auto p) {
            return ddp::make_sgd(
                std::move(p),
                {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .device = device});
        },
        [=](auto p) {
            return ddp::make_sgd(std::move(p), {.learning_rate = 0.1,
                                                .momentum = 0.9,
                                                .weight_decay = 0.01,
                                                .nesterov = true,
                                                .device = device});
        },
        [=](auto p) { return ddp::make_adamw(std::move(p), {.learning_rate = 0.05, .device = device}); },
        [=](auto p) {
            return ddp::make_adamw(std::move(p), {.learning_rate = 0.003,
                                                  .beta1 = 0.8,
                                                  .beta2 = 0.95,
                                                  .epsilon = 1e-4,
                                                  .weight_decay = 0.2,
                                                  .device = device});
        },
    };
}

TEST(DeviceOptimizer, GivesTheBitsOfTheHostAtEverySizeAndAlignment) {
    for (const Make& make : variants()) {
        for (const std::size_t size : {1, 7, 8, 33, 1000}) {
            for (const std::size_t offset : {0, 1, 3}) {
                std::vector<float> host = random_floats(size, 1);
                const OnDevice<float> on_device(gpu(), host, DType::F32, offset);
                const OnDevice<float> gradient(gpu(), host, DType::F32);
                const auto reference =
                    make({ddp::tensor_of("w", std::span(host), {static_cast<std::int64_t>(size)})});
                const auto optimizer = make({tensor(on_device)});
                EXPECT_EQ(optimizer->name(), reference->name());
                for (unsigned t = 0; t < 12; ++t) {
                    if (t == 5) reference->set_learning_rate(0.02), optimizer->set_learning_rate(0.02);
                    std::vector<float> values = random_floats(size, 100 + t);
                    gradient.put(values);
                    step(*reference, ddp::buffer_of(std::span(values)));
                    step(*optimizer, gradient.buffer());
                    ASSERT_EQ(on_device.values(), host)
                        << "size " << size << ", offset " << offset << ", step " << t;
                }
                EXPECT_EQ(optimizer->steps(), 12U);
            }
        }
    }
}

TEST(DeviceOptimizer, GivesTheBitsOfTheHostToEachParameterGroup) {
    std::vector<float> host_a = random_floats(50, 1), host_b = random_floats(70, 2);
    const OnDevice<float> a(gpu(), host_a, DType::F32), b(gpu(), host_b, DType::F32);
    const auto make = [](const Buffer& of_a, const Buffer& of_b, std::vector<Buffer> copies) {
        return ddp::make_adamw({{"a", {50}, of_a}, {"b", {70}, of_b}},
                               {.weight_decay = 0.1,
                                .groups = {{.parameters = {"b"}, .learning_rate = 0.5, .weight_decay = 0}},
                                .device = {.copies = std::move(copies)}});
    };
    const OnDevice<std::uint16_t> copy(gpu(), std::vector<std::uint16_t>(70), DType::BF16);
    const auto reference = make(ddp::buffer_of(std::span(host_a)), ddp::buffer_of(std::span(host_b)), {});
    const auto optimizer = make(a.buffer(), b.buffer(), {Buffer{}, copy.buffer()});
    for (unsigned t = 0; t < 4; ++t) {
        if (t == 2) reference->set_learning_rate(0.25, 1), optimizer->set_learning_rate(0.25, 1);
        std::vector<float> of_a = random_floats(50, 10 + t), of_b = random_floats(70, 20 + t);
        const OnDevice<float> on_device_a(gpu(), of_a, DType::F32), on_device_b(gpu(), of_b, DType::F32);
        reference->step(std::array{ddp::buffer_of(std::span(of_a)), ddp::buffer_of(std::span(of_b))});
        optimizer->step(std::array{on_device_a.buffer(), on_device_b.buffer()});
        EXPECT_EQ(a.values(), host_a) << t;
        EXPECT_EQ(b.values(), host_b) << t;
    }
    EXPECT_EQ(optimizer->steps(), 4U);
    EXPECT_NE(copy.values(), std::vector<std::uint16_t>(70))
        << "each group gets the copies of its parameters";
    EXPECT_THROW(make(a.buffer(), b.buffer(), {Buffer{}}), ddp::InvalidInput);
}

TEST(DeviceOptimizer, WritesALowPrecisionCopyInTheSamePass) {
    for (const DType type : {DType::BF16, DType::F16}) {
        const OnDevice<float> values(gpu(), random_floats(133, 1), DType::F32),
            gradient(gpu(), random_floats(133, 2), DType::F32);
        const OnDevice<std::uint16_t> copy(gpu(), std::vector<std::uint16_t>(133), type);
        const OnDevice<std::uint16_t> expected(gpu(), std::vector<std::uint16_t>(133), type);
        for (const Make& make : variants({.copies = {copy.buffer()}})) {
            step(*make({tensor(values)}), gradient.buffer());
            ddp::cuda::scale_cast(*gpu(), values.buffer(), expected.buffer(), 1, nullptr);
            EXPECT_EQ(copy.values(), expected.values());
        }
    }
}

TEST(DeviceOptimizer, ReadsLowPrecisionGradients) {
    for (const DType type : {DType::BF16, DType::F16}) {
        const OnDevice<float> wide(gpu(), random_floats(77, 2), DType::F32);
        const OnDevice<std::uint16_t> narrow(gpu(), std::vector<std::uint16_t>(77), type);
        ddp::cuda::scale_cast(*gpu(), wide.buffer(), narrow.buffer(), 1, nullptr);
        ddp::cuda::scale_cast(*gpu(), narrow.buffer(), wide.buffer(), 1, nullptr);
        for (const Make& make : variants()) {
            const OnDevice<float> a(gpu(), random_floats(77, 1), DType::F32),
                b(gpu(), random_floats(77, 1), DType::F32);
            step(*make({tensor(a)}), wide.buffer());
            step(*make({tensor(b)}), narrow.buffer());
            EXPECT_EQ(a.values(), b.values());
            EXPECT_NE(a.values(), random_floats(77, 1));
        }
    }
}

TEST(DeviceOptimizer, KeepsFloat32MastersOfLowPrecisionParameters) {
    // bfloat16 would lose each of these small steps.
    const OnDevice<std::uint16_t> values(gpu(), std::vector<std::uint16_t>(9, 0x3F80), DType::BF16);  // 1.0
    const OnDevice<float> gradient(gpu(), std::vector<float>(9, 1), DType::F32);
    const auto sgd = ddp::make_sgd({tensor(values)}, {.learning_rate = 0x1p-12});
    for (int t = 0; t < 32; ++t) step(*sgd, gradient.buffer());
    const std::uint16_t expected = std::bit_cast<std::uint32_t>(1 - 0x1p-7F) >> 16;
    EXPECT_EQ(values.values(), std::vector<std::uint16_t>(9, expected));
    ASSERT_EQ(sgd->state().size(), 2U);
    EXPECT_EQ(sgd->state()[0].name, "master.w");
    EXPECT_EQ(sgd->state()[0].memory.dtype, DType::F32);
}

TEST(DeviceOptimizer, ZeroesTheGradientInTheSamePassOnRequest) {
    for (const bool zero : {false, true}) {
        for (const Make& make : variants({.zero_gradients = zero})) {
            const OnDevice<float> values(gpu(), random_floats(21, 1), DType::F32);
            const OnDevice<float> gradient(gpu(), std::vector<float>(21, 3), DType::F32);
            step(*make({tensor(values)}), gradient.buffer());
            EXPECT_EQ(gradient.values(), std::vector<float>(21, zero ? 0 : 3));
        }
    }
}

TEST(DeviceOptimizer, KeepsAParameterWithoutGradient) {
    const OnDevice<float> values(gpu(), {1, 2}, DType::F32);
    const auto adamw = ddp::make_adamw({tensor(values)}, {.weight_decay = 0.5});
    step(*adamw, Buffer{});
    EXPECT_EQ(values.values(), (std::vector<float>{1, 2}));
}

TEST(DeviceOptimizer, ContinuesBitwiseEqualFromItsSavedState) {
    for (const Make& make : variants()) {
        const OnDevice<float> whole(gpu(), random_floats(50, 1), DType::F32),
            gradient(gpu(), random_floats(50, 2), DType::F32);
        const auto first = make({tensor(whole)});
        for (int t = 0; t < 3; ++t) step(*first, gradient.buffer());
        const OnDevice<float> resumed(gpu(), whole.values(), DType::F32);
        const auto second = make({tensor(resumed)});
        const std::vector<Tensor> from = first->state(), to = second->state();
        ASSERT_EQ(from.size(), to.size());
        for (std::size_t i = 0; i < from.size(); ++i) {
            EXPECT_EQ(from[i].name, to[i].name);
            ddp::cuda::copy(to[i].memory.data, from[i].memory.data, from[i].memory.bytes(), nullptr);
        }
        for (int t = 0; t < 3; ++t) {
            step(*first, gradient.buffer());
            step(*second, gradient.buffer());
        }
        EXPECT_EQ(whole.values(), resumed.values());
    }
}

TEST(DeviceOptimizer, CountsStepsAndUsesANewRateInALaunchedGraph) {
    const OwnedStream stream(gpu());
    std::vector<float> host = random_floats(40, 1), slope = random_floats(40, 2);
    const OnDevice<float> values(gpu(), host, DType::F32), gradient(gpu(), slope, DType::F32);
    const auto reference =
        ddp::make_adamw({ddp::tensor_of("w", std::span(host), {40})}, {.learning_rate = 0.1});
    const auto adamw =
        ddp::make_adamw({tensor(values)}, {.learning_rate = 0.1, .device = {.stream = stream.get()}});
    step(*adamw, gradient.buffer());
    step(*reference, ddp::buffer_of(std::span(slope)));
    ddp::cuda::Capture capture(stream.get());
    step(*adamw, gradient.buffer());
    const auto graph = capture.end();
    for (int t = 1; t < 6; ++t) {
        if (t == 3) reference->set_learning_rate(0.01), adamw->set_learning_rate(0.01);
        graph->launch(stream.get());
        step(*reference, ddp::buffer_of(std::span(slope)));
    }
    EXPECT_EQ(values.values(stream.get()), host);
    EXPECT_EQ(adamw->steps(), 6U);
}

TEST(DeviceOptimizer, DoesNotWaitForTheDeviceInAStep) {
    const ddp::testing::Count blocking_calls = ddp::testing::blocking_calls();
    if (blocking_calls == nullptr) GTEST_SKIP() << "only the fake CUDA counts the calls that wait";
    const OnDevice<float> values(gpu(), random_floats(40, 1), DType::F32),
        gradient(gpu(), random_floats(40, 2), DType::F32);
    GradScaler scaler(kDevice);
    const auto adamw = ddp::make_adamw({tensor(values)}, {.device = {.scaler = &scaler}});
    const long before = blocking_calls();
    const Buffer buffer = gradient.buffer();
    adamw->set_learning_rate(0.5);
    scaler.check({&buffer, 1});
    step(*adamw, buffer);
    scaler.update();
    EXPECT_EQ(blocking_calls(), before);
    EXPECT_EQ(adamw->steps(), 1U);
    EXPECT_GT(blocking_calls(), before);
}

TEST(DeviceOptimizer, RefusesAnInvalidLearningRate) {
    const OnDevice<float> values(gpu(), {1}, DType::F32);
    const auto sgd = ddp::make_sgd({tensor(values)}, {.learning_rate = 0.5});
    EXPECT_THROW(sgd->set_learning_rate(-1), ddp::InvalidInput);
    EXPECT_THROW(sgd->set_learning_rate(std::nan("")), ddp::InvalidInput);
    const OnDevice<float> gradient(gpu(), {1}, DType::F32);
    step(*sgd, gradient.buffer());
    EXPECT_EQ(values.values(), (std::vector<float>{0.5})) << "the previous rate stays";
}

TEST(DeviceOptimizer, RefusesBuffersThatDoNotFit) {
    const OnDevice<float> values(gpu(), {1, 2, 3}, DType::F32), two(gpu(), {1, 2}, DType::F32);
    const OnDevice<std::int32_t> whole(gpu(), {1, 2, 3}, DType::I32);
    const OnDevice<float> same(gpu(), {1, 2, 3}, DType::F32);
    const auto sgd = ddp::make_sgd({tensor(values)}, {});
    std::vector<float> on_host(3);
    EXPECT_THROW(step(*sgd, two.buffer()), ddp::InvalidInput);
    EXPECT_THROW(step(*sgd, whole.buffer()), ddp::InvalidInput);
    EXPECT_THROW(step(*sgd, ddp::buffer_of(std::span(on_host))), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd({Tensor{"w", {3}, whole.buffer()}}, {}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd({tensor(values)}, {.device = {.copies = {same.buffer()}}}), ddp::InvalidInput);
    EXPECT_THROW(ddp::make_sgd({tensor(values)}, {.device = {.copies = {Buffer{}, Buffer{}}}}),
                 ddp::InvalidInput);
}

using ddp::device::GradScale;
using ddp::device::next_scale;
constexpr ddp::device::GradScaleRules kRules{2, 0.5, 3};

TEST(GradScale, GrowsAfterAnIntervalOfFiniteSteps) {
    GradScale scale{8, 0.125, 0, 0};
    for (int i = 0; i < 2; ++i) scale = next_scale(scale, kRules);
    EXPECT_EQ(scale.scale, 8);
    EXPECT_EQ(scale.good_steps, 2U);
    scale = next_scale(scale, kRules);
    EXPECT_EQ(scale.scale, 16);
    EXPECT_EQ(scale.inverse, 1.0F / 16);
    EXPECT_EQ(scale.good_steps, 0U);
}

TEST(GradScale, BacksOffAtOnceAndRestartsItsCount) {
    const GradScale scale = next_scale({8, 0.125, 1, 2}, kRules);
    EXPECT_EQ(scale.scale, 4);
    EXPECT_EQ(scale.inverse, 0.25F);
    EXPECT_EQ(scale.found_non_finite, 0U);
    EXPECT_EQ(scale.good_steps, 0U);
}

TEST(GradScale, DoesNotGrowIntoInfinity) {
    const GradScale scale = next_scale({0x1p127F, 0x1p-127F, 0, 2}, kRules);
    EXPECT_EQ(scale.scale, 0x1p127F);
    EXPECT_EQ(scale.good_steps, 0U);
}

TEST(GradScaler, UnscalesTheGradientsInTheOptimizersPass) {
    GradScaler scaler(kDevice, {.initial_scale = 1024});
    const OnDevice<float> values(gpu(), {1, 2, 3}, DType::F32), gradient(gpu(), {1024, 0, -2048}, DType::F32);
    const auto sgd = ddp::make_sgd({tensor(values)}, {.learning_rate = 0.5, .device = {.scaler = &scaler}});
    const Buffer buffer = gradient.buffer();
    scaler.check({&buffer, 1});
    step(*sgd, buffer);
    scaler.update();
    EXPECT_EQ(values.values(), (std::vector<float>{0.5, 2, 4}));
    EXPECT_EQ(scaler.read_scale(), 1024);
}

TEST(GradScaler, SkipsAStepWhoseGradientsAreNotFinite) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
        GradScaler scaler(kDevice, {.initial_scale = 1024});
        const OnDevice<float> values(gpu(), {1, 2, 3}, DType::F32), gradient(gpu(), {1, bad, 3}, DType::F32);
        const auto adamw =
            ddp::make_adamw({tensor(values)}, {.device = {.zero_gradients = true, .scaler = &scaler}});
        const std::vector<Buffer> buffers = {gradient.buffer()};
        scaler.check(buffers);
        adamw->step(buffers);
        scaler.update();
        EXPECT_EQ(values.values(), (std::vector<float>{1, 2, 3}));
        EXPECT_EQ(adamw->steps(), 0U);
        EXPECT_EQ(step_count(*adamw), 0);
        EXPECT_EQ(scaler.read_scale(), 512);
        EXPECT_EQ(gradient.values(), (std::vector<float>{0, 0, 0})) << "the next step must not see it";

        gradient.put({1, 1, 1});
        scaler.check(buffers);
        adamw->step(buffers);
        EXPECT_EQ(adamw->steps(), 1U);
        EXPECT_EQ(step_count(*adamw), 1);
        EXPECT_NE(values.values(), (std::vector<float>{1, 2, 3}));
    }
}

TEST(GradScaler, FindsOneBadElementAtAnyPosition) {
    for (const DType type : {DType::BF16, DType::F16}) {
        for (const std::size_t where : {0, 5, 8, 99, 102}) {
            std::vector<std::uint16_t> values(103, 0x3C00);
            values[where] = type == DType::F16 ? 0x7C00 : 0x7F80;
            const OnDevice<std::uint16_t> gradient(gpu(), values, type, 1);
            GradScaler scaler(kDevice, {.initial_scale = 8});
            const std::vector<Buffer> buffers = {Buffer{}, gradient.buffer()};
            scaler.check(buffers);
            scaler.update();
            EXPECT_EQ(scaler.read_scale(), 4);
        }
    }
}

TEST(GradScaler, ContinuesFromItsSavedState) {
    GradScaler first(kDevice, {.initial_scale = 8, .growth_interval = 3}),
        second(kDevice, {.growth_interval = 3});
    for (int i = 0; i < 2; ++i) first.update();
    const Tensor from = first.state().at(0), to = second.state().at(0);
    EXPECT_EQ(from.name, "grad_scaler");
    ddp::cuda::copy(to.memory.data, from.memory.data, from.memory.bytes(), nullptr);
    second.update();
    EXPECT_EQ(second.read_scale(), 16);
}

TEST(GradScaler, RefusesInvalidOptions) {
    EXPECT_THROW(GradScaler(Device{}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.initial_scale = 0}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.initial_scale = 1e-50}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.initial_scale = INFINITY}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.growth_factor = 0.5}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.growth_factor = INFINITY}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.backoff_factor = NAN}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.backoff_factor = 1}), ddp::InvalidInput);
    EXPECT_THROW(GradScaler(kDevice, {.growth_interval = 0}), ddp::InvalidInput);
}

}  // namespace
