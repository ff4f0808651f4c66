#include "mlp.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>

#include "matrix.h"

namespace train {
namespace {

/// Normal numbers that are the same with every standard library (std::normal_distribution is not).
class Normal {
  public:
    explicit Normal(std::uint64_t seed) : generator_(seed) {}
    double operator()() {
        // Box-Muller; 53 random bits each, the first in (0, 1] because of the logarithm.
        const double u = (static_cast<double>(generator_() >> 11) + 1) * 0x1p-53;
        const double v = static_cast<double>(generator_() >> 11) * 0x1p-53;
        return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
    }

  private:
    std::mt19937_64 generator_;
};

}  // namespace

Mlp::Mlp(std::vector<std::size_t> widths, std::uint64_t seed) {
    Normal normal(seed);
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
        Layer layer{widths[l], widths[l + 1], {}, {}, {}, {}};
        const double spread = std::sqrt(2.0 / static_cast<double>(layer.inputs));
        layer.weight.resize(layer.inputs * layer.outputs);
        for (float& w : layer.weight) w = static_cast<float>(normal() * spread);
        layer.bias.assign(layer.outputs, 0.0F);
        layers_.push_back(std::move(layer));
    }
}

std::vector<ddp::Tensor> Mlp::parameters() {
    std::vector<ddp::Tensor> all;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        Layer& layer = layers_[l];
        const auto outputs = static_cast<std::int64_t>(layer.outputs),
                   inputs = static_cast<std::int64_t>(layer.inputs);
        all.push_back(
            ddp::tensor_of(fmt::format("fc{}.weight", l + 1), std::span(layer.weight), {outputs, inputs}));
        all.push_back(ddp::tensor_of(fmt::format("fc{}.bias", l + 1), std::span(layer.bias), {outputs}));
    }
    return all;
}

std::size_t Mlp::parameter_count() const {
    std::size_t count = 0;
    for (const Layer& layer : layers_) count += layer.weight.size() + layer.bias.size();
    return count;
}

const float* Mlp::input_of(std::size_t layer) const {
    return layer == 0 ? values_.data() : layers_[layer - 1].output.data();
}

Mlp::Outcome Mlp::forward(std::span<const float> values, std::span<const std::int32_t> labels) {
    values_ = values;
    samples_ = labels.size();
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        Layer& layer = layers_[l];
        layer.output.resize(samples_ * layer.outputs);
        multiply_transposed_b(samples_, layer.outputs, layer.inputs, input_of(l), layer.weight.data(),
                              layer.output.data());
        const float floor = l + 1 < layers_.size() ? 0.0F : -INFINITY;
        for (std::size_t s = 0; s < samples_; ++s) {
            float* row = layer.output.data() + s * layer.outputs;
            for (std::size_t o = 0; o < layer.outputs; ++o) row[o] = std::max(row[o] + layer.bias[o], floor);
        }
    }
    return softmax_cross_entropy(labels);
}

Mlp::Outcome Mlp::softmax_cross_entropy(std::span<const std::int32_t> labels) {
    Outcome outcome;
    Layer& last = layers_.back();
    last.delta.resize(samples_ * last.outputs);
    const float scale = 1.0F / static_cast<float>(std::max<std::size_t>(samples_, 1));
    for (std::size_t s = 0; s < samples_; ++s) {
        const float* logits = last.output.data() + s * last.outputs;
        float* delta = last.delta.data() + s * last.outputs;
        const auto label = static_cast<std::size_t>(labels[s]);
        const float* best = std::max_element(logits, logits + last.outputs);
        float total = 0;
        // The largest logit is taken off first: exp cannot overflow.
        for (std::size_t o = 0; o < last.outputs; ++o) total += delta[o] = std::exp(logits[o] - *best);
        for (std::size_t o = 0; o < last.outputs; ++o) delta[o] *= scale / total;
        delta[label] -= scale;
        outcome.loss_sum += static_cast<double>(std::log(total) + *best - logits[label]);
        outcome.correct += static_cast<std::size_t>(best - logits) == label ? 1 : 0;
    }
    return outcome;
}

void Mlp::backward(const GradientSink& sink) {
    for (std::size_t l = layers_.size(); l-- > 0;) {
        Layer& layer = layers_[l];
        const std::span<float> bias = sink.memory(2 * l + 1);
        std::fill(bias.begin(), bias.end(), 0.0F);
        for (std::size_t s = 0; s < samples_; ++s)
            for (std::size_t o = 0; o < layer.outputs; ++o) bias[o] += layer.delta[s * layer.outputs + o];
        sink.ready(2 * l + 1);

        multiply_transposed_a(layer.outputs, layer.inputs, samples_, layer.delta.data(), input_of(l),
                              sink.memory(2 * l).data());
        sink.ready(2 * l);

        if (l == 0) return;
        Layer& below = layers_[l - 1];
        below.delta.resize(samples_ * below.outputs);
        multiply(samples_, layer.inputs, layer.outputs, layer.delta.data(), layer.weight.data(),
                 below.delta.data());
        for (std::size_t i = 0; i < below.delta.size(); ++i)
            below.delta[i] = below.output[i] > 0 ? below.delta[i] : 0.0F;
    }
}

}  // namespace train
