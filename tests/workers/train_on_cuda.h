#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ddp/cuda/memory.h"
#include "tests/support/environment_variable.h"
#include "train/compute.h"
#include "train/cublas_api.h"
#include "train/cuda_compute.h"
#include "train/mlp.h"

/// One pass of a small perceptron on the CPU and on a CUDA device, for comparison.
namespace train::testing {

using ddp::cuda::Gpu;
using ddp::testing::Variable;

/// A compute on device 0 with its stream.
class OnCuda {
  public:
    explicit OnCuda(Precision precision = Precision::Fp32) {
        gpu_->make_current();
        compute_ = train::make_cuda_compute(gpu_, api_, stream_.get(), precision);
    }
    Compute& operator*() const { return *compute_; }
    Compute* operator->() const { return compute_.get(); }
    [[nodiscard]] ddp::cuda::Stream stream() const { return stream_.get(); }

    /// Reads values after all queued work.
    template <class T>
    std::vector<T> read(const void* from, std::size_t count) const {
        std::vector<T> values(count);
        ddp::cuda::copy(values.data(), from, count * sizeof(T), stream_.get());
        stream_.synchronize();
        return values;
    }
    template <class T>
    ddp::cuda::DeviceMemory put(const std::vector<T>& values) const {
        ddp::cuda::DeviceMemory memory(gpu_, values.size() * sizeof(T));
        ddp::cuda::copy(memory.get(), values.data(), values.size() * sizeof(T), stream_.get());
        stream_.synchronize();
        return memory;
    }

  private:
    std::shared_ptr<const Gpu> gpu_ = Gpu::of(0);
    ddp::cuda::OwnedStream stream_{gpu_};
    std::shared_ptr<const train::cublas::Api> api_ =
        std::make_shared<const train::cublas::Api>(*train::cublas::load_api());
    std::unique_ptr<Compute> compute_;
};

inline std::vector<float> random_values(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(random() % 2001) / 1000 - 1;
    return values;
}

/// One batch of a small perceptron whose widths have no common divisor.
inline const std::vector<std::size_t> kWidths = {13, 37, 18, 5};
inline constexpr std::size_t kSamples = 11;
inline const std::vector<float> kValues = random_values(kSamples * 13, 4);
inline const std::vector<std::int32_t> kLabels = {0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0};

struct Pass {
    train::Score score;
    std::vector<std::vector<float>> gradients;
};

inline Pass pass_on_cpu() {
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

inline float widened(std::uint16_t bits, Precision precision) {
    if (precision == Precision::Bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
    const int exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

inline Pass pass_on(const OnCuda& compute, Precision precision, float loss_scale = 1) {
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
    mlp.forward();
    mlp.backward(
        {[&](std::size_t i) { return memory[i].get(); }, [&](std::size_t i) { order.push_back(i); }});
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

inline Pass pass_on_cuda(Precision precision = Precision::Fp32, float loss_scale = 1) {
    return pass_on(OnCuda(precision), precision, loss_scale);
}

/// `tolerance` is relative to the largest gradient of each parameter.
inline void expect_close(const Pass& pass, const Pass& expected, double tolerance) {
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

}  // namespace train::testing
