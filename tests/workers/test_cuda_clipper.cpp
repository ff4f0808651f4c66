#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "ddp/grad_clipper.h"
#include "ddp/grad_scaler.h"
#include "ddp/optimizer.h"
#include "tests/workers/cuda_fixture.h"

namespace {

using ddp::Buffer;
using ddp::Device;
using ddp::DType;
using ddp::GradClipper;
using ddp::GradScaler;
using ddp::testing::gpu;
using ddp::testing::OnDevice;
using ddp::testing::random_floats;

constexpr Device kDevice{Device::Kind::Cuda, 0};
const std::vector<float> kOnes(3, 1);

std::unique_ptr<ddp::Optimizer> sgd_of(const OnDevice<float>& w, const GradClipper& clipper,
                                       const GradScaler* scaler = nullptr) {
    return ddp::make_sgd({{"w", {static_cast<std::int64_t>(w.buffer().count)}, w.buffer()}},
                         {.learning_rate = 1, .device = {.scaler = scaler, .clipper = &clipper}});
}

void expect_near(const std::vector<float>& values, const std::vector<float>& expected) {
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-5F) << i;
}

TEST(GradClipper, MeasuresTheHostsNormForEverySizeTypeAndAlignment) {
    GradClipper clipper(kDevice, 1);
    std::vector<OnDevice<float>> wide;
    std::vector<OnDevice<std::uint16_t>> narrow;
    std::vector<Buffer> on_device = {Buffer{}};
    std::vector<std::vector<float>> on_host;
    const auto add = [&](std::size_t size, std::size_t offset, unsigned seed) {
        const OnDevice<float>& values =
            wide.emplace_back(gpu(), random_floats(size, seed), DType::F32, offset);
        on_device.push_back(values.buffer());
        on_host.push_back(values.values());
        for (const DType type : {DType::BF16, DType::F16}) {
            const OnDevice<std::uint16_t>& rounded =
                narrow.emplace_back(gpu(), std::vector<std::uint16_t>(size), type, offset);
            const OnDevice<float> widened(gpu(), on_host.back(), DType::F32);
            ddp::cuda::scale_cast(*gpu(), values.buffer(), rounded.buffer(), 1, nullptr);
            ddp::cuda::scale_cast(*gpu(), rounded.buffer(), widened.buffer(), 1, nullptr);
            on_device.push_back(rounded.buffer());
            on_host.push_back(widened.values());
        }
    };
    // More arrays than a launch takes; one has more elements than stretches of the shortest length cover.
    for (unsigned i = 0; i < 70; ++i) add(1 + 13 * i, i % 5, i);
    for (const std::size_t size : {4095, 4096, 4097, 8193, 5'000'000})
        add(size, size % 4, static_cast<unsigned>(size));
    std::vector<Buffer> host_buffers;
    for (std::vector<float>& values : on_host) host_buffers.push_back(ddp::buffer_of(std::span(values)));
    const double expected = ddp::clip_grad_norm(host_buffers, 1e30);
    clipper.measure(on_device);
    EXPECT_NEAR(clipper.read_norm(), expected, 1e-12 * expected);
    EXPECT_EQ(clipper.read_skipped_steps(), 0U);
}

TEST(GradClipper, GivesTheSameBitsAtEveryAlignment) {
    const std::vector<float> values = random_floats(20'001, 3);
    GradClipper clipper(kDevice, 1);
    std::vector<double> norms;
    for (const std::size_t offset : {0, 1, 2, 3}) {
        const OnDevice<float> gradient(gpu(), values, DType::F32, offset);
        clipper.measure(std::array{gradient.buffer()});
        norms.push_back(clipper.read_norm());
    }
    EXPECT_EQ(norms, std::vector<double>(4, norms[0]));
}

TEST(GradClipper, MakesTheOptimizerScaleLongGradientsAndKeepShortOnes) {
    GradClipper clipper(kDevice, 2.5);
    const OnDevice<float> w(gpu(), kOnes, DType::F32), gradient(gpu(), {3, 0, -4}, DType::F32);
    const auto sgd = sgd_of(w, clipper);
    clipper.measure(std::array{gradient.buffer()});
    sgd->step(std::array{gradient.buffer()});
    expect_near(w.values(), {1 - 1.5, 1, 1 + 2});
    EXPECT_EQ(gradient.values(), (std::vector<float>{3, 0, -4}));
    EXPECT_EQ(clipper.read_norm(), 5);
    gradient.put({1, 0, 0});
    clipper.measure(std::array{gradient.buffer()});
    sgd->step(std::array{gradient.buffer()});
    expect_near(w.values(), {-1.5, 1, 3});
}

TEST(GradClipper, UsesOneNormForAllParameterGroups) {
    GradClipper clipper(kDevice, 2.5);
    const OnDevice<float> a(gpu(), {0}, DType::F32), b(gpu(), {0}, DType::F32);
    const OnDevice<float> of_a(gpu(), {3}, DType::F32), of_b(gpu(), {4}, DType::F32);
    const auto sgd = ddp::make_sgd({{"a", {1}, a.buffer()}, {"b", {1}, b.buffer()}},
                                   {.learning_rate = 1,
                                    .groups = {{.parameters = {"b"}, .learning_rate = 10}},
                                    .device = {.clipper = &clipper}});
    const std::array gradients = {of_a.buffer(), of_b.buffer()};
    clipper.measure(gradients);
    sgd->step(gradients);
    expect_near(a.values(), {-1.5});
    expect_near(b.values(), {-20});
}

TEST(GradClipper, UsesTheNormWithoutTheLossScaleOfAGradScaler) {
    GradScaler scaler(kDevice, {.initial_scale = 1024});
    GradClipper clipper(kDevice, 2.5, {.scaler = &scaler});
    const OnDevice<float> w(gpu(), kOnes, DType::F32), gradient(gpu(), {3 * 1024, 0, -4 * 1024}, DType::F32);
    const auto sgd = sgd_of(w, clipper, &scaler);
    scaler.check(std::array{gradient.buffer()});
    clipper.measure(std::array{gradient.buffer()});
    sgd->step(std::array{gradient.buffer()});
    scaler.update();
    EXPECT_EQ(clipper.read_norm(), 5);
    expect_near(w.values(), {1 - 1.5, 1, 1 + 2});
    EXPECT_EQ(scaler.read_scale(), 1024);
}

TEST(GradClipper, SkipsAStepWhoseNormIsNotFiniteWithAndWithoutAScale) {
    for (const bool scaled : {false, true}) {
        for (const float bad : {INFINITY, -INFINITY, NAN}) {
            GradScaler scaler(kDevice, {.initial_scale = 1024});
            GradClipper clipper(kDevice, 1, {.scaler = scaled ? &scaler : nullptr});
            const OnDevice<float> w(gpu(), kOnes, DType::F32), gradient(gpu(), {1, bad, 0}, DType::F32);
            const auto adamw =
                ddp::make_adamw({{"w", {3}, w.buffer()}},
                                {.device = {.scaler = scaled ? &scaler : nullptr, .clipper = &clipper}});
            const auto step = [&] {
                if (scaled) scaler.check(std::array{gradient.buffer()});
                clipper.measure(std::array{gradient.buffer()});
                adamw->step(std::array{gradient.buffer()});
                scaler.update();
            };
            step();
            EXPECT_EQ(w.values(), kOnes);
            EXPECT_EQ(adamw->steps(), 0U);
            EXPECT_FALSE(std::isfinite(clipper.read_norm()));
            EXPECT_EQ(scaler.read_scale(), scaled ? 512 : 1024);
            gradient.put({1, 1, 0});
            step();
            EXPECT_EQ(adamw->steps(), 1U);
            EXPECT_NE(w.values(), kOnes);
            EXPECT_TRUE(std::isfinite(w.values()[1]));
            EXPECT_EQ(clipper.read_skipped_steps(), 1U);
        }
    }
}

TEST(GradClipper, MeasuresInEachLaunchOfAGraphWithoutWaiting) {
    const ddp::cuda::OwnedStream stream(gpu());
    GradClipper clipper(kDevice, 2.5, {.stream = stream.get()});
    const OnDevice<float> w(gpu(), kOnes, DType::F32), gradient(gpu(), {30, 0, 40}, DType::F32);
    const auto sgd =
        ddp::make_sgd({{"w", {3}, w.buffer()}},
                      {.learning_rate = 1, .device = {.stream = stream.get(), .clipper = &clipper}});
    const auto step = [&] {
        clipper.measure(std::array{gradient.buffer()});
        sgd->step(std::array{gradient.buffer()});
    };
    step();
    // Only the fake CUDA counts waits.
    const auto waits = [] {
        return ddp::testing::blocking_calls() != nullptr ? ddp::testing::blocking_calls()() : 0;
    };
    const long before = waits();
    ddp::cuda::Capture capture(stream.get());
    step();
    const auto graph = capture.end();
    graph->launch(stream.get());
    EXPECT_EQ(waits(), before);
    stream.synchronize();
    gradient.put({0, -1, 0});
    graph->launch(stream.get());
    expect_near(w.values(stream.get()), {1 - 2 * 1.5, 1 + 1, 1 - 2 * 2});
    EXPECT_EQ(clipper.read_norm(), 1);
}

TEST(GradClipper, RefusesWhatItCannotClip) {
    for (const double bad : {0.0, -1.0, std::nan("")})
        EXPECT_THROW(GradClipper(kDevice, bad), ddp::InvalidInput);
    EXPECT_THROW(GradClipper(Device{}, 1), ddp::InvalidInput);
    GradClipper clipper(kDevice, 1);
    std::vector<float> on_host(3);
    EXPECT_THROW(clipper.measure(std::array{ddp::buffer_of(std::span(on_host))}), ddp::InvalidInput);
    const OnDevice<float> gradient(gpu(), {1}, DType::F32);
    EXPECT_THROW(ddp::clip_grad_norm(std::array{gradient.buffer()}, 1), ddp::InvalidInput);
}

}  // namespace
