#include "mlp.h"

#include <fmt/core.h>

#include <cmath>
#include <numbers>
#include <random>

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

std::vector<ddp::TensorSpec> Mlp::specs(const std::vector<std::size_t>& widths, ddp::DType dtype) {
    std::vector<ddp::TensorSpec> all;
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) {
        const auto inputs = static_cast<std::int64_t>(widths[l]),
                   outputs = static_cast<std::int64_t>(widths[l + 1]);
        all.push_back({fmt::format("fc{}.weight", l + 1), {outputs, inputs}, dtype, l});
        all.push_back({fmt::format("fc{}.bias", l + 1), {outputs}, dtype, l});
    }
    return all;
}

Mlp::Mlp(const std::vector<std::size_t>& widths, std::optional<std::uint64_t> seed, Compute& compute,
         ddp::Model* model)
    : compute_(compute), model_(model) {
    for (std::size_t l = 0; l + 1 < widths.size(); ++l) layers_.push_back({widths[l], widths[l + 1], {}, {}});
    if (model == nullptr) parameters_ = allocate(specs(widths, compute.dtype()));
    else parameters_.assign(model->parameters().begin(), model->parameters().end());
    if (has_copies()) weights_ = allocate(specs(widths, ddp::DType::F32));
    Normal normal(seed.value_or(0));
    for (std::size_t l = 0; seed && l < layers_.size(); ++l) {
        const std::vector<float> first = initial_weights(layers_[l].inputs, layers_[l].outputs, normal);
        compute.upload(first.data(), weights()[2 * l].memory);
    }
    refresh_copies();
}

std::vector<ddp::Tensor> Mlp::allocate(const std::vector<ddp::TensorSpec>& specs) {
    std::vector<ddp::Tensor> all;
    for (const ddp::TensorSpec& spec : specs) {
        std::size_t count = 1;
        for (const std::int64_t extent : spec.shape) count *= static_cast<std::size_t>(extent);
        owned_.push_back(compute_.allocate(count * ddp::size_of(spec.dtype)));
        all.push_back({spec.name, spec.shape, {owned_.back().get(), count, spec.dtype, compute_.device()}});
    }
    return all;
}

void Mlp::refresh_copies() {
    if (!has_copies()) return;
    for (std::size_t i = 0; i < weights_.size(); ++i)
        compute_.round(weights_[i].memory, parameters_[i].memory);
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

Matrix Mlp::weight_of(std::size_t layer, void* data) const {
    return {data, layers_[layer].outputs, layers_[layer].inputs, layers_[layer].inputs};
}

template <class Use>
void Mlp::with_weights(std::size_t layer, Use use) {
    if (model_ != nullptr) model_->gather(layer);
    use(weight_of(layer, parameters_[2 * layer].memory.data), parameters_[2 * layer + 1].memory.data);
    if (model_ != nullptr) model_->release(layer);
}

void Mlp::stage(const BatchSource& batch) {
    reserve(batch.count);
    samples_ = batch.count;
    compute_.stage(batch, input_of(0), reinterpret_cast<std::int32_t*>(labels_.get()));
}

void Mlp::forward() {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
        with_weights(l, [&](const Matrix& weight, const void* bias) {
            compute_.linear({.input = input_of(l),
                             .weight = weight,
                             .bias = bias,
                             .activation = l + 1 < layers_.size() ? Activation::Relu : Activation::None,
                             .output = rows(layers_[l].output, layers_[l].outputs)});
        });
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
                                   .weight_gradient = weight_of(l, sink.memory(2 * l)),
                                   .bias_gradient = sink.memory(2 * l + 1),
                                   .into = sink.into});
        sink.ready(2 * l + 1);
        sink.ready(2 * l);
        if (l == 0) return;
        const Layer& below = layers_[l - 1];
        with_weights(l, [&](const Matrix& weight, const void*) {
            compute_.input_gradient({.delta = delta,
                                     .weight = weight,
                                     .below_output = rows(below.output, below.outputs),
                                     .below_delta = rows(below.delta, below.outputs)});
        });
    }
}

}  // namespace train
