// train's arithmetic on a CUDA device. Here CUDA and cuBLASLt are fakes over host memory (tests/support): the
// kernels are the real ones, compiled for the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>

#include "ddp/cuda/memory.h"
#include "ddp/testing.h"
#include "train/compute.h"
#include "train/cublaslt_api.h"
#include "train/cuda_compute.h"
#include "train/feed.h"
#include "train/learner.h"
#include "train/mlp.h"
#include "train/relu_masks.h"
#include "train/tuning.h"

namespace {

using ddp::cuda::Gpu;
using train::Compute;
using train::Mlp;
using train::Precision;

/// An environment variable for the life of this object.
class Variable {
  public:
    Variable(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
    ~Variable() { ::unsetenv(name_); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

  private:
    const char* name_;
};

/// A compute on device 0 and what it lives on.
class OnCuda {
  public:
    explicit OnCuda(train::CudaOptions options) {
        gpu_->make_current();
        compute_ = train::make_cuda_compute(gpu_, api_, stream_.get(), options);
    }
    Compute& operator*() const { return *compute_; }
    Compute* operator->() const { return compute_.get(); }
    [[nodiscard]] ddp::cuda::Stream stream() const { return stream_.get(); }

    /// In order behind everything queued so far.
    template <class T>
    std::vector<T> read(const void* from, std::size_t count) const {
        std::vector<T> values(count);
        ddp::cuda::copy(*gpu_, values.data(), from, count * sizeof(T), stream_.get());
        stream_.synchronize();
        return values;
    }
    template <class T>
    ddp::cuda::DeviceMemory put(const std::vector<T>& values) const {
        ddp::cuda::DeviceMemory memory(gpu_, values.size() * sizeof(T));
        ddp::cuda::copy(*gpu_, memory.get(), values.data(), values.size() * sizeof(T), stream_.get());
        stream_.synchronize();
        return memory;
    }

  private:
    std::shared_ptr<const Gpu> gpu_ = Gpu::of(0);
    ddp::cuda::OwnedStream stream_{gpu_};
    std::shared_ptr<const train::lt::Api> api_ =
        std::make_shared<const train::lt::Api>(*train::lt::load_api());
    std::unique_ptr<Compute> compute_;
};

std::vector<float> random_values(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(random() % 2001) / 1000 - 1;
    return values;
}

/// One batch of a small perceptron whose widths nothing divides.
const std::vector<std::size_t> kWidths = {13, 37, 18, 5};
constexpr std::size_t kSamples = 11;
const std::vector<float> kValues = random_values(kSamples * 13, 4);
const std::vector<std::int32_t> kLabels = {0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0};

struct Pass {
    train::Score score;
    std::vector<std::vector<float>> gradients;
};

Pass pass_on_cpu() {
    const std::unique_ptr<Compute> compute = train::make_cpu_compute();
    Mlp mlp(kWidths, 3, *compute);
    Pass pass;
    for (const ddp::Tensor& parameter : mlp.parameters()) pass.gradients.emplace_back(parameter.memory.count);
    mlp.stage({kValues.data(), kLabels.data(), nullptr, kLabels.size()});
    mlp.forward();
    mlp.backward({[&](std::size_t i) { return pass.gradients[i].data(); }, [](std::size_t) {}});
    pass.score = compute->take_score();
    return pass;
}

float widened(std::uint16_t bits, Precision precision) {
    if (precision == Precision::Bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
    const int exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

Pass pass_on(const OnCuda& compute, Precision precision, float loss_scale = 1) {
    Mlp mlp(kWidths, 3, *compute);
    const std::size_t element = ddp::size_of(compute->dtype());
    std::vector<train::Memory> memory;
    std::vector<std::size_t> order;
    for (const ddp::Tensor& parameter : mlp.parameters())
        memory.push_back(compute->allocate(parameter.memory.count * element));
    const auto values = compute.put(kValues);
    const auto labels = compute.put(kLabels);
    const auto scale = compute.put(std::vector<float>{loss_scale});
    if (loss_scale != 1) mlp.set_loss_scale(scale.as<const float>());
    mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    const auto forward_and_back = [&] {
        order.clear();
        mlp.forward();
        mlp.backward(
            {[&](std::size_t i) { return memory[i].get(); }, [&](std::size_t i) { order.push_back(i); }});
    };
    if (compute->rehearse(forward_and_back)) compute->take_score();
    forward_and_back();
    EXPECT_EQ(order, (std::vector<std::size_t>{5, 4, 3, 2, 1, 0}));
    Pass pass{compute->take_score(), {}};
    const std::vector<ddp::Tensor> parameters = mlp.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::size_t count = parameters[i].memory.count;
        if (element == sizeof(float)) {
            pass.gradients.push_back(compute.read<float>(memory[i].get(), count));
            continue;
        }
        std::vector<float> wide;
        for (const std::uint16_t bits : compute.read<std::uint16_t>(memory[i].get(), count))
            wide.push_back(widened(bits, precision));
        pass.gradients.push_back(wide);
    }
    return pass;
}

Pass pass_on_cuda(train::CudaOptions options, float loss_scale = 1) {
    return pass_on(OnCuda(options), options.precision, loss_scale);
}

/// `tolerance` is of the largest gradient of each parameter.
void expect_close(const Pass& pass, const Pass& expected, double tolerance) {
    EXPECT_NEAR(pass.score.loss_sum, expected.score.loss_sum, tolerance * expected.score.loss_sum);
    ASSERT_EQ(pass.gradients.size(), expected.gradients.size());
    for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
        float largest = 0;
        for (const float g : expected.gradients[i]) largest = std::max(largest, std::abs(g));
        ASSERT_GT(largest, 0);
        for (std::size_t e = 0; e < expected.gradients[i].size(); ++e)
            ASSERT_NEAR(pass.gradients[i][e], expected.gradients[i][e],
                        tolerance * static_cast<double>(largest))
                << "parameter " << i << ", element " << e;
    }
}

TEST(CudaCompute, GivesTheCpusLossAndGradientsInEveryPrecision) {
    const Pass expected = pass_on_cpu();
    expect_close(pass_on_cuda({.precision = Precision::Fp32}), expected, 1e-5);
    expect_close(pass_on_cuda({.precision = Precision::Tf32}), expected, 4e-3);
    expect_close(pass_on_cuda({.precision = Precision::Fp16}), expected, 4e-3);
    expect_close(pass_on_cuda({.precision = Precision::Bf16}), expected, 5e-2);
}

TEST(CudaCompute, CountsTheSameHitsAsTheCpu) {
    EXPECT_EQ(pass_on_cuda({}).score.correct, pass_on_cpu().score.correct);
}

TEST(CudaCompute, GivesTheSameWhicheverEpiloguesTheLibraryLacks) {
    const Pass expected = pass_on_cpu();
    // ReLU with bias and mask, also without the mask; its gradient; the gradient of the bias; the bias
    // itself; all.
    for (const char* lacking : {"134", "134,6", "136", "512", "4", "all"}) {
        const Variable variable("FAKE_CUBLASLT", lacking);
        SCOPED_TRACE(lacking);
        expect_close(pass_on_cuda({.precision = Precision::Fp32}), expected, 1e-5);
        expect_close(pass_on_cuda({.precision = Precision::Bf16}), expected, 5e-2);
    }
}

TEST(CudaCompute, SaysSoWhenTheLibraryCannotMultiplyAtAll) {
    const Variable variable("FAKE_CUBLASLT", "all,1");
    try {
        pass_on_cuda({.precision = Precision::Fp16});
        FAIL() << "nothing was said";
    } catch (const ddp::Error& error) {
        EXPECT_NE(std::string(error.what())
                      .find("has no algorithm for a fp16 product of 37 x 11 x 13 on CUDA device 0"),
                  std::string::npos)
            << error.what();
    }
}

TEST(CudaCompute, NamesTheDevicesErrorWhenTheLibraryRefusesBecauseOfIt) {
    const Variable variable("FAKE_CUBLASLT", "all,1");
    const OnCuda compute({});
    const auto memory = compute.put(std::vector<float>(16));
    const auto lose = reinterpret_cast<int (*)(int)>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_lose_device"));
    constexpr int kIllegalAddress = 700;
    lose(kIllegalAddress);
    std::string said;
    try {
        const train::Matrix square{memory.get(), 4, 4, 4};
        compute->linear({square, square, memory.get(), train::Activation::None, square, nullptr});
    } catch (const ddp::Error& error) {
        said = error.what();
    }
    lose(0);
    EXPECT_NE(said.find("an illegal memory access was encountered"), std::string::npos) << said;
}

TEST(CudaCompute, IsTheSameToTheBitWhenDeterministic) {
    for (const Precision precision : {Precision::Fp32, Precision::Bf16}) {
        const Pass first = pass_on_cuda({.precision = precision, .deterministic = true});
        const Pass second = pass_on_cuda({.precision = precision, .deterministic = true});
        EXPECT_EQ(first.gradients, second.gradients);
        EXPECT_EQ(first.score.loss_sum, second.score.loss_sum);
        expect_close(first, pass_on_cpu(), precision == Precision::Fp32 ? 1e-5 : 5e-2);
    }
}

/// A layer by our own kernels and the same in plain loops: `rows` samples, `inputs` to `outputs`.
void expect_layer_by_kernels(const OnCuda& compute, Precision precision, std::size_t rows,
                             std::size_t outputs) {
    constexpr std::size_t kInputs = 3;
    const std::size_t stride = compute->stride_for(outputs), in_stride = compute->stride_for(kInputs);
    const auto on_device = [&](const std::vector<float>& values) {
        train::Memory memory = compute->allocate(values.size() * ddp::size_of(compute->dtype()));
        const auto wide = compute.put(values);
        compute->round({wide.get(), values.size(), ddp::DType::F32, compute->device()},
                       {memory.get(), values.size(), compute->dtype(), compute->device()});
        compute.read<std::byte>(memory.get(), 1);
        return memory;
    };
    const auto on_host = [&](const train::Memory& memory, std::size_t count) {
        if (precision == Precision::Fp32) return compute.read<float>(memory.get(), count);
        std::vector<float> wide;
        for (const std::uint16_t bits : compute.read<std::uint16_t>(memory.get(), count))
            wide.push_back(widened(bits, precision));
        return wide;
    };
    const auto input = on_device(random_values(rows * in_stride, 1)),
               weight = on_device(random_values(outputs * kInputs, 2)),
               bias = on_device(random_values(outputs, 3)),
               output = on_device(std::vector<float>(rows * stride, 0)),
               delta = on_device(random_values(rows * stride, 4)),
               weight_gradient = on_device(std::vector<float>(outputs * kInputs)),
               bias_gradient = on_device(std::vector<float>(outputs));
    const train::Matrix in{input.get(), rows, kInputs, in_stride}, out{output.get(), rows, outputs, stride},
        down{delta.get(), rows, outputs, stride};
    compute->linear({.input = in,
                     .weight = {weight.get(), outputs, kInputs, kInputs},
                     .bias = bias.get(),
                     .activation = train::Activation::Relu,
                     .output = out,
                     .mask = nullptr});
    compute->linear_gradients({.delta = down,
                               .input = in,
                               .weight_gradient = {weight_gradient.get(), outputs, kInputs, kInputs},
                               .bias_gradient = bias_gradient.get()});
    const auto x = on_host(input, rows * in_stride), w = on_host(weight, outputs * kInputs),
               b = on_host(bias, outputs), y = on_host(output, rows * stride),
               d = on_host(delta, rows * stride), gradient = on_host(bias_gradient, outputs);
    const double unit = precision == Precision::Fp32 ? 1e-5 : 2e-2;
    for (std::size_t o = 0; o < outputs; ++o) {
        double column = 0, size = 0;
        for (std::size_t r = 0; r < rows; ++r) {
            double sum = static_cast<double>(b[o]);
            for (std::size_t i = 0; i < kInputs; ++i)
                sum += static_cast<double>(x[r * in_stride + i]) * static_cast<double>(w[o * kInputs + i]);
            ASSERT_NEAR(y[r * stride + o], std::max(sum, 0.0), unit) << "row " << r << ", column " << o;
            column += static_cast<double>(d[r * stride + o]);
            size += std::abs(static_cast<double>(d[r * stride + o]));
        }
        ASSERT_NEAR(gradient[o], column, unit * std::max(1.0, size / 10)) << "column " << o;
    }
}

TEST(CudaCompute, AddsBiasesAndSumsColumnsOfAnyShape) {
    // Whole packs and none; one run of rows, several, and one that is short; more packs than threads.
    for (const Precision precision : {Precision::Fp32, Precision::Bf16, Precision::Fp16}) {
        const OnCuda compute({.precision = precision, .epilogues = false});
        for (const std::size_t rows : {1, 15, 100, 1000})
            for (const std::size_t outputs : {1, 8, 10, 37, 64}) {
                SCOPED_TRACE(testing::Message()
                             << train::name_of(precision) << " " << rows << " x " << outputs);
                expect_layer_by_kernels(compute, precision, rows, outputs);
            }
    }
}

// What cuBLASLt offers is said to the fake; the time that it pretends to take is far above any delay of this
// machine.
constexpr const char* kOffers = "FAKE_CUBLASLT_ALGORITHMS";

/// How often the fake library was asked to run the n-th of its algorithms.
long calls_of(int number) {
    static const auto calls = reinterpret_cast<long (*)(int)>(
        ddp::open_library({std::getenv("DDP_CUBLASLT_LIBRARY")})->resolve("fake_cublaslt_calls"));
    return calls(number);
}
/// The same since this object was made.
class CallsSince {
  public:
    long operator[](int number) const { return calls_of(number) - before_[static_cast<std::size_t>(number)]; }

  private:
    std::array<long, 5> before_ = {calls_of(0), calls_of(1), calls_of(2), calls_of(3), calls_of(4)};
};
constexpr long kLayers = 3;
/// Products of a pass: the input's gradient is not asked for below the first layer.
constexpr long kProducts = 3 * kLayers - 1;

TEST(Tuning, TakesTheFirstOfThoseThatAreAsGoodAsTheFastest) {
    EXPECT_EQ(train::fastest(std::vector<double>{3, 1, 2}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{1.01, 1}), 0U);
    EXPECT_EQ(train::fastest(std::vector<double>{1.05, 1}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{train::kNever, 7}), 1U);
    EXPECT_EQ(train::fastest(std::vector<double>{train::kNever, train::kNever}), 0U);
    EXPECT_EQ(train::finalists(std::vector<double>{2, 1, train::kNever, 1.2}),
              (std::vector<std::size_t>{1, 3}));
    EXPECT_TRUE(train::finalists(std::vector<double>{train::kNever}).empty());
    EXPECT_EQ(train::finalists(std::vector<double>{1.07, 1.06, 1.05, 1, 1.02, 1.03, 1.01}),
              (std::vector<std::size_t>{2, 3, 4, 5, 6}));
}

TEST(Tuning, RunsWhatIsQuickMoreOften) {
    EXPECT_EQ(train::runs_for(5, 0.8), 7);
    EXPECT_EQ(train::runs_for(5, 100), 1);
    EXPECT_EQ(train::runs_for(5, 0.001), 10);
    EXPECT_EQ(train::runs_for(5, 0), 10);
}

TEST(Tuning, AMaskPaysByBothPassesTogether) {
    EXPECT_TRUE(train::mask_pays({.with_mask = 5, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    EXPECT_FALSE(train::mask_pays({.with_mask = 7, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    // What is not used on the way back does not pay at any price.
    EXPECT_FALSE(
        train::mask_pays({.with_mask = 5, .without_mask = 4}, {.by_mask = train::kNever, .by_output = 5}));
    EXPECT_FALSE(
        train::mask_pays({.with_mask = train::kNever, .without_mask = 4}, {.by_mask = 3, .by_output = 5}));
    EXPECT_TRUE(
        train::mask_pays({.with_mask = 5, .without_mask = train::kNever}, {.by_mask = 3, .by_output = 5}));
}

TEST(Tuning, AMaskIsWrittenUntilBothPassesAreKnown) {
    train::ReluMasks masks;
    const int here = 0, there = 0;
    const train::ReluMasks::Layer layer{&here, 8}, other{&there, 8}, tail{&here, 3};
    EXPECT_TRUE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 9, .by_output = 1});
    EXPECT_TRUE(masks.is_wanted(layer)) << "the forward pass is not known";
    masks.note_forward(layer, {.with_mask = 2, .without_mask = 1});
    EXPECT_TRUE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 9, .by_output = 1});
    EXPECT_FALSE(masks.is_wanted(layer));
    masks.note_backward(layer, {.by_mask = 0.1, .by_output = 9});
    EXPECT_FALSE(masks.is_wanted(layer)) << "it was decided";
    EXPECT_TRUE(masks.is_wanted(other));
    EXPECT_TRUE(masks.is_wanted(tail));
}

TEST(CudaCompute, TakesTheFastestAlgorithmThatRuns) {
    const Variable offers(kOffers, "plain*5,refuse*1,big*1,reverse*2,plain*3");
    const OnCuda compute({.tune = true});
    const Pass expected = pass_on_cpu();
    expect_close(pass_on(compute, Precision::Fp32), expected, 1e-5);
    const CallsSince calls;
    expect_close(pass_on(compute, Precision::Fp32), expected, 1e-5);
    // The rehearsal, which had nothing left to find out, and the pass.
    EXPECT_EQ(calls[3], 2 * kProducts);
    EXPECT_EQ(calls[0] + calls[1] + calls[2] + calls[4], 0);
    EXPECT_NE(compute->describe_tuning().find("take another algorithm than cuBLASLt's first"),
              std::string::npos)
        << compute->describe_tuning();
}

TEST(CudaCompute, TimesNothingUnlessToldTo) {
    const Variable offers(kOffers, "refuse,void,plain*5,plain*1");
    for (const bool deterministic : {true, false}) {
        const OnCuda compute({.deterministic = deterministic, .tune = deterministic});
        const CallsSince calls;
        expect_close(pass_on(compute, Precision::Fp32), pass_on_cpu(), 1e-5);
        // The first that runs, once; one that was refused is not asked again for the same kind.
        EXPECT_EQ(calls[0], kProducts);
        EXPECT_EQ(calls[1], 0);
        EXPECT_EQ(calls[2], kProducts);
        EXPECT_EQ(calls[3], 0);
        pass_on(compute, Precision::Fp32);
        EXPECT_EQ(calls[0], kProducts);
        EXPECT_EQ(calls[2], 2 * kProducts);
        EXPECT_EQ(compute->describe_tuning(), "");
    }
}

TEST(CudaCompute, TimesNothingWhileAStepIsCaptured) {
    const Variable offers(kOffers, "plain*5,plain*1");
    const OnCuda compute({.tune = true});
    Mlp mlp(kWidths, 3, *compute);
    const auto values = compute.put(kValues);
    const auto labels = compute.put(kLabels);
    mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    const CallsSince calls;
    std::unique_ptr<Compute::Recorded> recorded;
    compute->rehearse([&] { recorded = compute->record([&] { mlp.forward(); }); });
    EXPECT_EQ(calls[0], kLayers);
    recorded->run();
    const double loss = compute->take_score().loss_sum;
    mlp.forward();
    EXPECT_EQ(calls[0], 2 * kLayers);
    EXPECT_EQ(calls[1], 0) << "outside of a rehearsal nothing is timed";
    compute->take_score();
    compute->rehearse([&] { mlp.forward(); });
    EXPECT_GT(calls[1], kLayers) << "what was only captured is timed in the next rehearsal";
    EXPECT_NEAR(compute->take_score().loss_sum, loss, 1e-4 * loss);
}

TEST(CudaCompute, SaysHowToDoWithoutWhenAnAlgorithmFailsOnTheDevice) {
    const OnCuda compute({.tune = true});
    const auto fail = reinterpret_cast<int (*)(void*, int)>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_fail"));
    constexpr int kIllegalAddress = 700;
    Mlp mlp(kWidths, 0, *compute);
    const auto values = compute.put(kValues);
    const auto labels = compute.put(kLabels);
    mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    fail(compute.stream(), kIllegalAddress);
    try {
        compute->rehearse([&] { mlp.forward(); });
        FAIL() << "nothing was said";
    } catch (const ddp::Error& error) {
        EXPECT_NE(std::string(error.what()).find("an illegal memory access was encountered"),
                  std::string::npos)
            << error.what();
        EXPECT_NE(std::string(error.what()).find("--tune-products off does without"), std::string::npos)
            << error.what();
    }
    fail(compute.stream(), 0);
}

TEST(CudaCompute, TakesAProductAndAKernelWhereTheEpilogueIsSlower) {
    const Pass expected = pass_on_cpu();
    // A kernel counts as 10. All epilogues; ReLU with the mask alone; the way back by the mask alone; the
    // gradient of biases alone.
    for (const char* offered : {"plain@1,plain*100@4,plain*100@6,plain*100@134,plain*100@136,plain*100@512",
                                "plain@1,plain@4,plain@6,plain*100@134,plain@136,plain@512",
                                "plain@1,plain@4,plain@6,plain@134,plain*100@136,plain@512",
                                "plain@1,plain@4,plain@6,plain@134,plain@136,plain*100@512"}) {
        const Variable offers(kOffers, offered);
        SCOPED_TRACE(offered);
        for (const Precision precision : {Precision::Fp32, Precision::Bf16}) {
            const OnCuda compute({.precision = precision, .tune = true});
            const double tolerance = precision == Precision::Fp32 ? 1e-5 : 5e-2;
            for (int pass = 0; pass < 3; ++pass)
                expect_close(pass_on(compute, precision), expected, tolerance);
        }
    }
}

TEST(CudaCompute, AMaskThatIsNotWrittenIsNotRead) {
    // The mask costs 15 in the forward pass and saves a kernel of 10 on the way back.
    const Variable offers(kOffers, "plain@1,plain@4,plain@6,plain*16@134,plain@136,plain@512");
    const OnCuda compute({.tune = true});
    Mlp mlp(kWidths, 3, *compute);
    std::vector<train::Memory> gradients;
    for (const ddp::Tensor& parameter : mlp.parameters())
        gradients.push_back(compute->allocate(parameter.memory.bytes()));
    const auto labels = compute.put(kLabels);
    const auto pass_with = [&](unsigned seed) {
        const auto values = compute.put(random_values(kValues.size(), seed));
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kLabels.size()});
        const auto forward_and_back = [&] {
            mlp.forward();
            mlp.backward({[&](std::size_t i) { return gradients[i].get(); }, [](std::size_t) {}});
        };
        if (seed == 1) compute->rehearse(forward_and_back);
        else forward_and_back();
        return compute.read<float>(gradients[0].get(), 13 * 37);
    };
    // Other samples, which other neurons let through: a stale mask would show.
    pass_with(1);
    const std::vector<float> stale = pass_with(2);
    const std::vector<float> third = pass_with(3);
    const OnCuda fresh({});
    Mlp again(kWidths, 3, *fresh);
    std::vector<train::Memory> expected;
    for (const ddp::Tensor& parameter : again.parameters())
        expected.push_back(fresh->allocate(parameter.memory.bytes()));
    const auto values = fresh.put(random_values(kValues.size(), 3));
    const auto fresh_labels = fresh.put(kLabels);
    again.stage({values.as<const float>(), fresh_labels.as<const std::int32_t>(), nullptr, kLabels.size()});
    again.forward();
    again.backward({[&](std::size_t i) { return expected[i].get(); }, [](std::size_t) {}});
    const std::vector<float> right = fresh.read<float>(expected[0].get(), 13 * 37);
    for (std::size_t i = 0; i < right.size(); ++i) ASSERT_NEAR(third[i], right[i], 1e-5) << i;
    EXPECT_NE(stale, third);
}

TEST(CudaCompute, ABatchOfNothingHasNoGradient) {
    const OnCuda compute({});
    const auto weight_gradient = compute.put(std::vector<float>(6, 7.0F)),
               bias_gradient = compute.put(std::vector<float>(3, 7.0F)),
               delta = compute.put(std::vector<float>(4)), input = compute.put(std::vector<float>(4));
    compute->linear_gradients({.delta = {delta.get(), 0, 3, 4},
                               .input = {input.get(), 0, 2, 4},
                               .weight_gradient = {weight_gradient.get(), 3, 2, 2},
                               .bias_gradient = bias_gradient.get()});
    EXPECT_EQ(compute.read<float>(weight_gradient.get(), 6), std::vector<float>(6, 0.0F));
    EXPECT_EQ(compute.read<float>(bias_gradient.get(), 3), std::vector<float>(3, 0.0F));
}

TEST(CudaCompute, MultipliesGradientsByTheLossScaleButNotTheLoss) {
    Pass expected = pass_on_cpu();
    for (std::vector<float>& gradient : expected.gradients)
        for (float& g : gradient) g *= 1024;
    expect_close(pass_on_cuda({}, 1024), expected, 1e-5);
    expect_close(pass_on_cuda({.precision = Precision::Fp16}, 1024), expected, 4e-3);
}

TEST(CudaCompute, AddsUpTheScoreUntilItIsTaken) {
    const OnCuda compute({});
    Mlp mlp({2, 3}, 0, *compute);
    // More rows than the score has slots.
    constexpr std::size_t kMany = 20'000;
    const auto values = compute.put(std::vector<float>(2 * kMany, 0.0F));
    const auto labels = compute.put(std::vector<std::int32_t>(kMany, 0));
    for (int batch = 0; batch < 2; ++batch) {
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, kMany});
        mlp.forward();
    }
    const train::Score score = compute->take_score();
    // All logits are equal: the first class wins.
    EXPECT_EQ(score.correct, 2 * kMany);
    EXPECT_NEAR(score.loss_sum, 2 * kMany * std::log(3.0), 1);
    EXPECT_EQ(compute->take_score().correct, 0U);
    EXPECT_EQ(compute->take_score().loss_sum, 0);
}

TEST(CudaCompute, SurvivesHugeLogitsAndShowsInvalidOnes) {
    const OnCuda compute({});
    Mlp mlp({1, 2}, 0, *compute);
    const auto loss_of = [&](float value) {
        const auto values = compute.put(std::vector<float>{value});
        const auto labels = compute.put(std::vector<std::int32_t>{0});
        mlp.stage({values.as<const float>(), labels.as<const std::int32_t>(), nullptr, 1});
        mlp.forward();
        return compute->take_score().loss_sum;
    };
    EXPECT_TRUE(std::isfinite(loss_of(1e30F)));
    EXPECT_FALSE(std::isfinite(loss_of(NAN)));
}

TEST(CudaCompute, TakesRowsInAnyOrder) {
    const OnCuda compute({});
    // Packs of 8 in the first, not in the second.
    for (const std::size_t width : {16UL, 5UL}) {
        Mlp mlp({width, 3}, 0, *compute);
        const std::vector<float> host = random_values(4 * width, 8);
        const auto values = compute.put(host);
        const auto labels = compute.put(std::vector<std::int32_t>{0, 1, 2, 0});
        const auto order = compute.put(std::vector<std::uint32_t>{2, 0, 3, 1});
        std::vector<float> sorted;
        for (const std::size_t row : {2, 0, 3, 1})
            sorted.insert(sorted.end(), host.begin() + static_cast<std::ptrdiff_t>(row * width),
                          host.begin() + static_cast<std::ptrdiff_t>((row + 1) * width));
        const auto sorted_values = compute.put(sorted);
        const auto sorted_labels = compute.put(std::vector<std::int32_t>{2, 0, 0, 1});
        mlp.stage(
            {values.as<const float>(), labels.as<const std::int32_t>(), order.as<const std::uint32_t>(), 4});
        mlp.forward();
        const double picked = compute->take_score().loss_sum;
        mlp.stage({sorted_values.as<const float>(), sorted_labels.as<const std::int32_t>(), nullptr, 4});
        mlp.forward();
        EXPECT_EQ(picked, compute->take_score().loss_sum);
        EXPECT_GT(picked, 0);
    }
}

TEST(CudaCompute, StartsFromTheCpusWeights) {
    const std::unique_ptr<Compute> cpu = train::make_cpu_compute();
    Mlp on_cpu(kWidths, 9, *cpu);
    const OnCuda compute({});
    Mlp on_cuda(kWidths, 9, *compute);
    const ddp::Tensor mine = on_cuda.parameters()[0], theirs = on_cpu.parameters()[0];
    EXPECT_EQ(mine.memory.device, (ddp::Device{ddp::Device::Kind::Cuda, 0}));
    const auto* const first = static_cast<const float*>(theirs.memory.data);
    EXPECT_EQ(compute.read<float>(mine.memory.data, mine.memory.count),
              std::vector<float>(first, first + theirs.memory.count));
}

/// One worker over NCCL on device 0, as main() sets it up.
class Worker {
  public:
    explicit Worker(std::vector<const char*> words)
        : options_(*train::parse_options(words)),
          station_(*train::open_station(options_, 0)),
          group_(ddp::ProcessGroup::create(
              ddp::Context(ddp::testing::environment_of(0, 1)),
              {.device = station_.choice.device, .stream = station_.stream_handle()})),
          feed_(train::make_feed(station_, samples_, options_)),
          learner_(*group_, station_, options_, {samples_.features, 24, samples_.classes}) {
        feed_->begin(subset_, all_rows(), {.batch_size = kBatch, .drop_last = true, .prefetch = 0});
    }
    void step() { learner_.learn(feed_->next()); }
    [[nodiscard]] double loss() { return learner_.take_score().loss_sum; }

  private:
    static constexpr std::size_t kBatch = 16, kRows = 400;
    static std::vector<std::size_t> all_rows() {
        std::vector<std::size_t> rows(kRows);
        std::iota(rows.begin(), rows.end(), 0U);
        return rows;
    }
    train::Options options_;
    train::Samples samples_ = train::make_samples({kRows, 12, 4}, 1);
    train::Subset subset_{samples_, all_rows()};
    train::Station station_;
    std::unique_ptr<ddp::ProcessGroup> group_;
    std::unique_ptr<train::Feed> feed_;
    train::Learner learner_;
};

TEST(CudaLearner, DoesNotWaitForTheDeviceInAStep) {
    const auto blocking_calls = reinterpret_cast<long (*)()>(
        ddp::open_library({std::getenv("FAKE_NCCL_LIBRARY")})->resolve("fake_cuda_blocking_calls"));
    for (const char* precision : {"--precision=fp32", "--precision=bf16", "--precision=fp16"}) {
        for (const char* more : {"--device=cuda", "--cuda-graph", "--deterministic"}) {
            Worker worker({precision, more});
            // What is allocated, laid out and captured once.
            for (int step = 0; step < 5; ++step) worker.step();
            const long before = blocking_calls();
            for (int step = 0; step < 10; ++step) worker.step();
            EXPECT_EQ(blocking_calls(), before) << precision << " " << more;
            EXPECT_TRUE(std::isfinite(worker.loss()));
            EXPECT_GT(blocking_calls(), before) << "the loss was read without waiting for it";
        }
    }
}

TEST(CudaLearner, ARehearsalCountsNoSampleAndLearnsNothing) {
    Worker tuned({"--device=cuda"}), plain({"--device=cuda", "--tune-products=off"});
    for (int step = 0; step < 3; ++step) {
        tuned.step();
        plain.step();
        EXPECT_EQ(tuned.loss(), plain.loss()) << "step " << step;
    }
}

TEST(CudaLearner, LearnsTheSameFromSamplesInHostMemory) {
    Worker kept({"--keep-data=device"}), streamed({"--device=cuda", "--keep-data=host"});
    for (int step = 0; step < 25; ++step) {
        kept.step();
        streamed.step();
    }
    EXPECT_EQ(streamed.loss(), kept.loss());
}

TEST(CublasLt, NamesTheEntryPointsThatAreMissing) {
    const ddprun::Result<train::lt::Api> api =
        train::lt::api_from({"libold.so", [](const char* name) -> void* {
                                 static int something;
                                 return std::string(name) == "cublasLtMatmul" ? nullptr : &something;
                             }});
    ASSERT_FALSE(api);
    EXPECT_EQ(api.error().what, "libold.so lacks cublasLtMatmul: cuBLASLt 12 or newer is needed");
}

TEST(CublasLt, ThatCannotBeOpenedIsNamedWithTheVariableToSet) {
    const char* const before = std::getenv("DDP_CUBLASLT_LIBRARY");
    const std::string saved = before != nullptr ? before : "";
    {
        const Variable variable("DDP_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so");
        const ddprun::Result<train::lt::Api> api = train::lt::load_api();
        ASSERT_FALSE(api);
        EXPECT_NE(api.error().what.find("/nowhere/libcublasLt.so"), std::string::npos) << api.error().what;
        EXPECT_NE(api.error().what.find("DDP_CUBLASLT_LIBRARY"), std::string::npos) << api.error().what;
    }
    if (before != nullptr) ::setenv("DDP_CUBLASLT_LIBRARY", saved.c_str(), 1);
}

}  // namespace
