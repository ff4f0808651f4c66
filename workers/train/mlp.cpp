#include "mlp.h"

#include <fmt/core.h>

#include <cmath>
#include <numbers>
#include <random>
#include <utility>

namespace train {
namespace {

/// Normal numbers that are equal with every standard library (std::normal_distribution is not).
class Normal {
  public:
    explicit Normal(std::uint64_t seed) : generator_(seed) {}
    double operator()() {
        // Box-Muller with 53 random bits each; u is in (0, 1] because of the logarithm.
        const double u = (static_cast<double>(generator_() >> 11) + 1) * 0x1p-53;
        const double v = static_cast<double>(generator_() >> 11) * 0x1p-53;
        return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
    }

  private:
    std::mt19937_64 generator_;
};

/// He-normal weights.
std::vector<float> initial_weights(std::size_t inputs, std::size_t outputs, Normal& normal) {
    const double spread = std::sqrt(2.0 / static_cast<double>(inputs));
    std::vector<float> weights(inputs * outputs);
    for (float& w : weights) w = static_cast<float>(normal() * spread);
    return weights;
}

}  // namespace

Mlp::Mlp(std::vector<std::size_t> widths, std::uint64_t seed, Compute& compute) : compute_(compute) {
    Normal normal(seed);
    const std::size_t element = ddp::size_of(compute.dtype());
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
        const std::size_t inputs = widths[l], outputs = widths[l + 1];
        Layer& layer = layers_.emplace_back();
        layer.inputs = inputs;
        layer.outputs = outputs;
        layer.weight = compute.allocate(inputs * outputs * element);
        layer.bias = compute.allocate(outputs * element);
        if (has_copies()) {
            layer.full_weight = compute.allocate(inputs * outputs * sizeof(float));
            layer.full_bias = compute.allocate(outputs * sizeof(float));
        }
        const std::vector<float> first = initial_weights(inputs, outputs, normal);
        compute.upload(first.data(), weights()[2 * l].memory);
    }
    refresh_copies();
}

std::vector<ddp::Tensor> Mlp::tensors(Memory Layer::*weight, Memory Layer::*bias, ddp::DType dtype) const {
    std::vector<ddp::Tensor> all;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        const Layer& layer = layers_[l];
        const auto outputs = static_cast<std::int64_t>(layer.outputs),
                   inputs = static_cast<std::int64_t>(layer.inputs);
        all.push_back({fmt::format("fc{}.weight", l + 1),
                       {outputs, inputs},
                       {(layer.*weight).get(), layer.outputs * layer.inputs, dtype, compute_.device()}});
        all.push_back({fmt::format("fc{}.bias", l + 1),
                       {outputs},
                       {(layer.*bias).get(), layer.outputs, dtype, compute_.device()}});
    }
    return all;
}

std::vector<ddp::Tensor> Mlp::parameters() const {
    return tensors(&Layer::weight, &Layer::bias, compute_.dtype());
}

std::vector<ddp::Tensor> Mlp::weights() const {
    return has_copies() ? tensors(&Layer::full_weight, &Layer::full_bias, ddp::DType::F32) : parameters();
}

void Mlp::refresh_copies() {
    if (!has_copies()) return;
    const std::vector<ddp::Tensor> from = weights(), to = parameters();
    for (std::size_t i = 0; i < from.size(); ++i) compute_.round(from[i].memory, to[i].memory);
}

std::size_t Mlp::parameter_count() const {
    std::size_t count = 0;
    for (const Layer& layer : layers_) count += (layer.inputs + 1) * layer.outputs;
    return count;
}

void Mlp::reserve(std::size_t samples) {
    if (samples <= capacity_) return;
    capacity_ = samples;
    const auto room_for = [&](std::size_t columns) {
        return compute_.allocate(samples * compute_.stride_for(columns) * ddp::size_of(compute_.dtype()));
    };
    input_ = room_for(layers_.front().inputs);
    labels_ = compute_.allocate(samples * sizeof(std::int32_t));
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        Layer& layer = layers_[l];
        layer.output = room_for(layer.outputs);
        layer.delta = room_for(layer.outputs);
    }
}

Matrix Mlp::rows(const Memory& memory, std::size_t columns) const {
    return {memory.get(), samples_, columns, compute_.stride_for(columns)};
}

Matrix Mlp::input_of(std::size_t layer) const {
    return layer == 0 ? rows(input_, layers_[0].inputs)
                      : rows(layers_[layer - 1].output, layers_[layer].inputs);
}

Matrix Mlp::weight_of(const Layer& layer, void* data) {
    return {data, layer.outputs, layer.inputs, layer.inputs};
}

void Mlp::stage(const BatchSource& batch) {
    reserve(batch.count);
    samples_ = batch.count;
    compute_.stage(batch, input_of(0), reinterpret_cast<std::int32_t*>(labels_.get()));
}

void Mlp::forward() {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        const Layer& layer = layers_[l];
        compute_.linear({.input = input_of(l),
                         .weight = weight_of(layer, layer.weight.get()),
                         .bias = layer.bias.get(),
                         .activation = l + 1 < layers_.size() ? Activation::Relu : Activation::None,
                         .output = rows(layer.output, layer.outputs)});
    }
    const Layer& last = layers_.back();
    compute_.cross_entropy({.logits = rows(last.output, last.outputs),
                            .labels = reinterpret_cast<const std::int32_t*>(labels_.get()),
                            .delta = rows(last.delta, last.outputs),
                            .batches = batches_per_step_,
                            .loss_scale = loss_scale_});
}

void Mlp::backward(const GradientSink& sink) {
    for (std::size_t l = layers_.size(); l-- > 0;) {
        const Layer& layer = layers_[l];
        const Matrix delta = rows(layer.delta, layer.outputs);
        compute_.linear_gradients({.delta = delta,
                                   .input = input_of(l),
                                   .weight_gradient = weight_of(layer, sink.memory(2 * l)),
                                   .bias_gradient = sink.memory(2 * l + 1),
                                   .into = sink.into});
        sink.ready(2 * l + 1);
        sink.ready(2 * l);
        if (l == 0) return;
        const Layer& below = layers_[l - 1];
        compute_.input_gradient({.delta = delta,
                                 .weight = weight_of(layer, layer.weight.get()),
                                 .below_output = rows(below.output, below.outputs),
                                 .below_delta = rows(below.delta, below.outputs)});
    }
}

}  // namespace train
