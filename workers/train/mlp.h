#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ddp/tensor.h"

namespace train {

/// A multi-layer perceptron: linear layers with ReLU between them, softmax cross-entropy at the end.
class Mlp {
  public:
    /// `widths`: inputs, hidden layers, classes. Weights are He-normal from `seed`, biases zero.
    Mlp(std::vector<std::size_t> widths, std::uint64_t seed);

    /// "fc1.weight" [outputs, inputs], "fc1.bias" [outputs], "fc2.weight" ...
    std::vector<ddp::Tensor> parameters();
    [[nodiscard]] std::size_t parameter_count() const;

    struct Outcome {
        double loss_sum = 0;  ///< over the samples, not their mean
        std::size_t correct = 0;
    };
    /// Keeps what backward needs. `values` must live until then.
    Outcome forward(std::span<const float> values, std::span<const std::int32_t> labels);

    /// Where gradient i (in the order of parameters()) goes, and what to call once it is there.
    struct GradientSink {
        std::function<std::span<float>(std::size_t)> memory;
        std::function<void(std::size_t)> ready;
    };
    /// The gradients of the mean loss of the last forward, last layer first.
    void backward(const GradientSink& sink);

  private:
    struct Layer {
        std::size_t inputs, outputs;
        std::vector<float> weight, bias;
        std::vector<float> output;  ///< [samples, outputs] of the last forward, after ReLU
        std::vector<float> delta;   ///< gradient of the loss with respect to the sum before ReLU
    };
    Outcome softmax_cross_entropy(std::span<const std::int32_t> labels);
    [[nodiscard]] const float* input_of(std::size_t layer) const;

    std::vector<Layer> layers_;
    std::span<const float> values_;
    std::size_t samples_ = 0;
};

}  // namespace train
