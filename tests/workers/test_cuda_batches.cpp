// Tests of many arrays in few launches.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>

#include "ddp/cuda/cast.h"
#include "ddp/cuda/graph.h"
#include "ddp/cuda/kernels.h"
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
std::string message_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const ddp::Error& error) {
        return error.what();
    }
    return "";
}

struct Kind {
    std::size_t count;
    DType gradient = DType::F32;
    std::size_t offset = 0;   ///< in elements, of the value; the gradient's offset is one more
    DType copy = DType::F32;  ///< float32: no copy
};
/// Empty, one element, around a pack and around a chunk, aligned and not, in every pair of types.
const std::vector<Kind> kKinds = {
    {0},
    {1},
    {7, DType::BF16},
    {8, DType::F16, 0, DType::BF16},
    {9, DType::F32, 1},
    {33, DType::BF16, 3, DType::F16},
    {4095, DType::F32, 0, DType::F16},
    {4096, DType::BF16, 0, DType::BF16},
    {4097, DType::F16, 1, DType::F16},
    {20000},
    {12289, DType::F32, 2, DType::BF16},
};

/// A parameter on the device, and an equal one on the host.
struct Twin {
    Twin(const Kind& what, unsigned seed)
        : kind(what),
          host(random_floats(what.count, seed)),
          host_gradient(what.count),
          value(gpu(), host, DType::F32, what.offset),
          wide(gpu(), host_gradient, DType::F32, what.offset > 0 ? what.offset + 1 : 0),
          narrow(gpu(), std::vector<std::uint16_t>(what.count),
                 what.gradient == DType::F32 ? DType::BF16 : what.gradient,
                 what.offset > 0 ? what.offset + 1 : 0),
          copy(gpu(), std::vector<std::uint16_t>(what.count),
               what.copy == DType::F32 ? DType::BF16 : what.copy),
          expected_copy(gpu(), std::vector<std::uint16_t>(what.count), copy.buffer().dtype) {}

    [[nodiscard]] Buffer gradient() const {
        return kind.gradient == DType::F32 ? wide.buffer() : narrow.buffer();
    }
    [[nodiscard]] Buffer wanted_copy() const { return kind.copy == DType::F32 ? Buffer{} : copy.buffer(); }
    /// Sets both gradients to these values, rounded to the type of the device's gradient.
    void put_gradient(const std::vector<float>& values) {
        wide.put(values);
        if (kind.gradient != DType::F32) {
            ddp::cuda::scale_cast(*gpu(), wide.buffer(), narrow.buffer(), 1, nullptr);
            ddp::cuda::scale_cast(*gpu(), narrow.buffer(), wide.buffer(), 1, nullptr);
        }
        host_gradient = wide.values();
    }
    void expect_equal(const std::string& when) const {
        EXPECT_EQ(value.values(), host) << kind.count << " elements, " << when;
        if (kind.copy == DType::F32) return;
        ddp::cuda::scale_cast(*gpu(), value.buffer(), expected_copy.buffer(), 1, nullptr);
        EXPECT_EQ(copy.values(), expected_copy.values()) << kind.count << " elements, " << when;
    }

    Kind kind;
    std::vector<float> host, host_gradient;
    OnDevice<float> value, wide;
    OnDevice<std::uint16_t> narrow, copy, expected_copy;
};

std::vector<std::unique_ptr<Twin>> twins(const std::vector<Kind>& kinds) {
    std::vector<std::unique_ptr<Twin>> all;
    all.reserve(kinds.size());
    for (const Kind& kind : kinds)
        all.push_back(std::make_unique<Twin>(kind, static_cast<unsigned>(all.size())));
    return all;
}

std::vector<Buffer> gradients_of(const std::vector<std::unique_ptr<Twin>>& parameters) {
    std::vector<Buffer> gradients(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) gradients[i] = parameters[i]->gradient();
    return gradients;
}

struct Pair {
    std::unique_ptr<Optimizer> on_device, on_host;
};
Pair adamw(const std::vector<std::unique_ptr<Twin>>& parameters) {
    std::vector<Tensor> device, host;
    std::vector<Buffer> copies;
    for (const auto& twin : parameters) {
        const std::string name = "p" + std::to_string(device.size());
        const std::vector<std::int64_t> shape{static_cast<std::int64_t>(twin->kind.count)};
        device.push_back({name, shape, twin->value.buffer()});
        host.push_back({name, shape, ddp::buffer_of(std::span(twin->host))});
        copies.push_back(twin->wanted_copy());
    }
    return {ddp::make_adamw(device, {.learning_rate = 0.05, .device = {.copies = copies}}),
            ddp::make_adamw(host, {.learning_rate = 0.05})};
}

/// AdamW's step count of each parameter that has elements.
std::vector<std::int64_t> step_counts(const Optimizer& optimizer) {
    std::vector<std::int64_t> counts;
    const std::vector<Tensor> state = optimizer.state();
    for (std::size_t i = 0; i < kKinds.size(); ++i) {
        const Tensor& count = state[state.size() - kKinds.size() + i];
        EXPECT_EQ(count.name, "step.p" + std::to_string(i));
        std::int64_t steps = -1;
        ddp::cuda::copy(&steps, count.memory.data, sizeof steps, nullptr);
        ddp::cuda::synchronize(nullptr);
        if (kKinds[i].count > 0) counts.push_back(steps);
    }
    return counts;
}

/// Makes one step of both, with gradients for the parameters that `has` selects.
template <class Has>
void step(const Pair& pair, std::vector<std::unique_ptr<Twin>>& parameters, unsigned seed, const Has& has) {
    std::vector<Buffer> device, host;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        Twin& twin = *parameters[i];
        if (!has(i)) {
            device.emplace_back();
            host.emplace_back();
            continue;
        }
        twin.put_gradient(random_floats(twin.kind.count, seed * 100 + static_cast<unsigned>(i)));
        device.push_back(twin.gradient());
        host.push_back(ddp::buffer_of(std::span(twin.host_gradient)));
    }
    pair.on_device->step(device);
    pair.on_host->step(host);
}

TEST(ManyParameters, GetTheBitsOfTheHostInOnePass) {
    auto parameters = twins(kKinds);
    const Pair pair = adamw(parameters);
    for (unsigned t = 0; t < 4; ++t) step(pair, parameters, t, [](std::size_t) { return true; });
    for (const auto& twin : parameters) twin->expect_equal("after 4 steps");
    EXPECT_EQ(pair.on_device->steps(), 4U);
}

TEST(ManyParameters, KeepTheirValuesInStepsThatDoNotUseThem) {
    auto parameters = twins(kKinds);
    const Pair pair = adamw(parameters);
    // Each step uses another set; among them are the empty set and one set twice in a row.
    const std::vector<unsigned> sets = {0xFFF, 0x555, 0xAAA, 0xAAA, 0, 0x0F0, 0xF0F, 0x555, 0x2, 0xFFF, 0};
    for (unsigned t = 0; t < sets.size(); ++t) {
        step(pair, parameters, t, [&](std::size_t i) { return (sets[t] >> i & 1U) != 0; });
        for (const auto& twin : parameters) twin->expect_equal("step " + std::to_string(t));
    }
    EXPECT_EQ(step_counts(*pair.on_device), step_counts(*pair.on_host)) << "each parameter has its own count";
}

TEST(ManyParameters, UseEachStepsOwnListWhenTheHostRunsFarAhead) {
    // The test reads nothing in between: the device is behind while the list changes repeatedly.
    const OnDevice<float> value(gpu(), std::vector<float>(8, 0), DType::F32);
    std::vector<Tensor> parameters;
    parameters.reserve(8);
    for (int i = 0; i < 8; ++i)
        parameters.push_back({"p" + std::to_string(i), {1}, {value.data() + i, 1, DType::F32, kDevice}});
    const OnDevice<float> one(gpu(), {-1}, DType::F32);
    const auto sgd = ddp::make_sgd(parameters, {.learning_rate = 1});
    for (std::size_t t = 0; t < 400; ++t) {
        std::vector<Buffer> gradients(8);
        gradients[t % 8] = one.buffer();
        sgd->step(gradients);
    }
    EXPECT_EQ(value.values(), std::vector<float>(8, 50));
}

TEST(ManyParameters, NeedOneLaunchPerBatchAndNoCopy) {
    const ddp::testing::Count launches = ddp::testing::launches(), copies = ddp::testing::copies();
    if (launches == nullptr) GTEST_SKIP() << "only the fake CUDA counts launches";
    const auto cost = [](ddp::testing::Count counted, const std::function<void()>& body) {
        const long before = counted();
        body();
        return counted() - before;
    };
    constexpr std::size_t kMost = ddp::device::ParameterBatch::kMost;
    const OnDevice<float> values(gpu(), std::vector<float>(kMost + 1, 0), DType::F32),
        gradient(gpu(), {1}, DType::F32);
    std::vector<Tensor> parameters;
    for (std::size_t i = 0; i <= kMost; ++i)
        parameters.push_back({"p" + std::to_string(i), {1}, {values.data() + i, 1, DType::F32, kDevice}});
    const auto sgd = ddp::make_sgd(parameters, {}), adamw = ddp::make_adamw(parameters, {});
    GradScaler scaler(kDevice);
    std::vector<Buffer> gradients(kMost + 1, gradient.buffer());
    const auto step = [&](Optimizer& optimizer) { return [&] { optimizer.step(gradients); }; };
    const auto check = [&] { scaler.check(gradients); };
    EXPECT_EQ(cost(launches, step(*sgd)), 3) << "the step's factors, and two batches";
    EXPECT_EQ(cost(launches, step(*adamw)), 5) << "and the corrections of each batch";
    EXPECT_EQ(cost(launches, check), 1);
    gradients.front() = Buffer{};
    EXPECT_EQ(cost(launches, step(*sgd)), 2);
    gradients.assign(gradients.size(), Buffer{});
    EXPECT_EQ(cost(launches, step(*adamw)), 1) << "a step without gradients still counts";
    EXPECT_EQ(cost(launches, check), 0);
    EXPECT_EQ(cost(copies, step(*adamw)) + cost(copies, check), 0);
}

TEST(ManyParameters, DoNotWaitWhenTheirListChanges) {
    const ddp::testing::Count blocking_calls = ddp::testing::blocking_calls();
    if (blocking_calls == nullptr) GTEST_SKIP() << "only the fake CUDA counts the calls that wait";
    auto parameters = twins(kKinds);
    const Pair pair = adamw(parameters);
    GradScaler scaler(kDevice);
    std::vector<Buffer> gradients = gradients_of(parameters);
    const long before = blocking_calls();
    for (const std::size_t dropped : {1, 2}) {
        gradients[dropped] = Buffer{};
        scaler.check(gradients);
        pair.on_device->step(gradients);
    }
    EXPECT_EQ(blocking_calls(), before);
}

Tensor tensor(const OnDevice<float>& values) {
    return {"w", {static_cast<std::int64_t>(values.buffer().count)}, values.buffer()};
}

TEST(CapturedStep, KeepsItsGradientsWhenLaterStepsHaveOthers) {
    const OwnedStream stream(gpu());
    const OnDevice<float> values(gpu(), {0, 0}, DType::F32);
    const OnDevice<float> captured(gpu(), {-1, -10}, DType::F32), other(gpu(), {-100, -1000}, DType::F32);
    const auto sgd =
        ddp::make_sgd({tensor(values)}, {.learning_rate = 1, .device = {.stream = stream.get()}});
    const Buffer of_graph = captured.buffer(), of_others = other.buffer();
    sgd->step({&of_graph, 1});
    ddp::cuda::Capture capture(stream.get());
    sgd->step({&of_graph, 1});
    const auto graph = capture.end();
    graph->launch(stream.get());
    EXPECT_EQ(values.values(stream.get()), (std::vector<float>{2, 20}));
    for (int i = 0; i < 3; ++i) {
        sgd->step({&of_others, 1});
        graph->launch(stream.get());
        sgd->step({&of_graph, 1});
    }
    EXPECT_EQ(values.values(stream.get()), (std::vector<float>{2 + 306, 20 + 3060}));
    EXPECT_EQ(sgd->steps(), 11U);
}

TEST(CapturedStep, MayHaveGradientsThatNoStepHadBefore) {
    const OwnedStream stream(gpu());
    const OnDevice<float> values(gpu(), {0, 0}, DType::F32), gradient(gpu(), {-1, -10}, DType::F32);
    const auto sgd =
        ddp::make_sgd({tensor(values)}, {.learning_rate = 1, .device = {.stream = stream.get()}});
    const Buffer only = gradient.buffer();
    ddp::cuda::Capture capture(stream.get());
    sgd->step({&only, 1});
    const auto graph = capture.end();
    EXPECT_EQ(sgd->steps(), 0U);
    graph->launch(stream.get());
    EXPECT_EQ(values.values(stream.get()), (std::vector<float>{1, 10}));
    EXPECT_EQ(sgd->steps(), 1U);
}

TEST(CapturedStep, ChecksTheGradientsThatItWasCapturedWith) {
    const OwnedStream stream(gpu());
    const OnDevice<float> captured(gpu(), {1, 2}, DType::F32), other(gpu(), {3, 4}, DType::F32);
    GradScaler scaler(kDevice, {.initial_scale = 16, .stream = stream.get()});
    const Buffer of_graph = captured.buffer(), of_others = other.buffer();
    scaler.check({&of_graph, 1});
    ddp::cuda::Capture capture(stream.get());
    scaler.check({&of_graph, 1});
    scaler.update();
    const auto graph = capture.end();
    scaler.check({&of_others, 1});
    stream.synchronize();
    captured.put({INFINITY, 2});
    graph->launch(stream.get());
    EXPECT_EQ(scaler.read_scale(), 8);
}

TEST(GradScaler, FindsTheOneBadElementAmongManyGradientsOfAllTypes) {
    const std::vector<std::size_t> sizes = {3, 0, 5000, 8193, 1};
    const std::vector<DType> types = {DType::F32, DType::BF16, DType::F16, DType::F32, DType::BF16};
    struct Place {
        std::size_t gradient, element;
    };
    for (const Place& bad : {Place{0, 2}, Place{2, 0}, Place{2, 4095}, Place{2, 4096}, Place{2, 4999},
                             Place{3, 8192}, Place{4, 0}}) {
        std::vector<std::unique_ptr<OnDevice<float>>> wide;
        std::vector<std::unique_ptr<OnDevice<std::uint16_t>>> narrow;
        std::vector<Buffer> gradients;
        for (std::size_t g = 0; g < sizes.size(); ++g) {
            std::vector<float> values(sizes[g], 1);
            if (bad.gradient == g) values[bad.element] = NAN;
            wide.push_back(std::make_unique<OnDevice<float>>(gpu(), values, DType::F32, g % 2));
            gradients.push_back(wide.back()->buffer());
            if (types[g] == DType::F32) continue;
            narrow.push_back(std::make_unique<OnDevice<std::uint16_t>>(
                gpu(), std::vector<std::uint16_t>(sizes[g]), types[g], g % 2));
            gradients.back() = narrow.back()->buffer();
            ddp::cuda::scale_cast(*gpu(), wide.back()->buffer(), gradients.back(), 1, nullptr);
        }
        GradScaler scaler(kDevice, {.initial_scale = 8});
        scaler.check(gradients);
        scaler.update();
        EXPECT_EQ(scaler.read_scale(), 4) << "gradient " << bad.gradient << ", element " << bad.element;

        gradients[bad.gradient] = Buffer{};
        scaler.check(gradients);
        scaler.update();
        EXPECT_EQ(scaler.read_scale(), 4) << "the others are finite";
    }
}

TEST(GradScaler, SaysWhichGradientItCannotCheckAndWhat) {
    GradScaler scaler(kDevice);
    std::vector<float> on_host(3);
    const OnDevice<std::int32_t> whole(gpu(), {1, 2}, DType::I32);
    const Buffer host = ddp::buffer_of(std::span(on_host)), integers = whole.buffer();
    EXPECT_EQ(message_of([&] {
                  scaler.check({&host, 1});
              }),
              "grad scaler: a gradient of 3 elements of float32 in host memory cannot be read; it takes "
              "float32, bfloat16 and float16 in memory of CUDA device 0");
    EXPECT_EQ(message_of([&] {
                  scaler.check({&integers, 1});
              }),
              "grad scaler: a gradient of 2 elements of int32 in memory of CUDA device 0 cannot be read; it "
              "takes float32, bfloat16 and float16 in memory of CUDA device 0");
}

TEST(GradScaler, ChecksMoreGradientsThanOneLaunchTakes) {
    constexpr std::size_t kMany = 20'000;
    std::vector<float> values(kMany, 1);
    values.back() = INFINITY;
    const OnDevice<float> memory(gpu(), values, DType::F32);
    std::vector<Buffer> gradients;
    for (std::size_t i = 0; i < kMany; ++i) gradients.push_back({memory.data() + i, 1, DType::F32, kDevice});
    GradScaler scaler(kDevice, {.initial_scale = 8});
    for (const std::size_t count : {kMany - 1, kMany, kMany / 2, kMany}) {
        scaler.check({gradients.data(), count});
        scaler.update();
    }
    EXPECT_EQ(scaler.read_scale(), 2);
}

}  // namespace
