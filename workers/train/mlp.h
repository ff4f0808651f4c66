#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "compute.h"
#include "ddp/types.h"

namespace train {

/// A multi-layer perceptron: linear layers with ReLU between them, and a softmax cross-entropy loss.
///
/// One step is stage, forward, backward. On a GPU the last two only queue work, at addresses that stay the
/// same while no batch is larger than the reserved size.
class Mlp final : public ddp::Stateful {
  public:
    /// `widths`: inputs, hidden layers, classes. Weights are He-normal from `seed`, biases zero. Borrows the
    /// compute.
    Mlp(std::vector<std::size_t> widths, std::uint64_t seed, Compute& compute);

    /// "fc1.weight" [outputs, inputs], "fc1.bias" [outputs], "fc2.weight" ..., in the compute's memory and
    /// type: the operands of products, and the tensors that have gradients.
    [[nodiscard]] std::vector<ddp::Tensor> parameters() const;
    /// The parameters in float32, which an optimizer changes and a checkpoint holds. With a float32 compute
    /// they are the parameters; otherwise the optimizer keeps the parameters as their rounded copies.
    [[nodiscard]] std::vector<ddp::Tensor> weights() const;
    [[nodiscard]] std::vector<ddp::Tensor> state() const override { return weights(); }
    void state_loaded() override { refresh_copies(); }
    [[nodiscard]] bool has_copies() const { return compute_.dtype() != ddp::DType::F32; }
    [[nodiscard]] std::size_t parameter_count() const;

    /// Allocates memory for batches of `samples` samples.
    void reserve(std::size_t samples);
    /// Takes the next batch from the compute's memory.
    void stage(const BatchSource& batch);
    /// Adds loss and hits to the compute's score.
    void forward();

    /// The place for gradient i (in the order of parameters()), and a call once it is complete.
    struct GradientSink {
        std::function<void*(std::size_t)> memory;
        std::function<void(std::size_t)> ready;
        Into into = Into::Replace;
    };
    /// Computes the gradients of the mean loss of the last forward, last layer first.
    void backward(const GradientSink& sink);

    /// Sets the number of batches per step: the sum of their gradients is the gradient of their mean loss.
    void set_batches_per_step(std::size_t batches) { batches_per_step_ = batches; }
    /// Sets a factor of the gradients, in the compute's memory; null: 1.
    void set_loss_scale(const float* scale) { loss_scale_ = scale; }

  private:
    /// Rounds the weights into the parameters.
    void refresh_copies();
    struct Layer {
        std::size_t inputs, outputs;
        Memory weight, bias;            ///< the compute's type
        Memory full_weight, full_bias;  ///< float32; empty when the compute's type is float32
        Memory output;                  ///< [samples, outputs] of the last forward, after ReLU
        Memory delta;                   ///< gradient of the loss with respect to the sum before ReLU
    };
    std::vector<ddp::Tensor> tensors(Memory Layer::*weight, Memory Layer::*bias, ddp::DType dtype) const;
    [[nodiscard]] Matrix rows(const Memory& memory, std::size_t columns) const;
    [[nodiscard]] Matrix input_of(std::size_t layer) const;
    [[nodiscard]] static Matrix weight_of(const Layer& layer, void* data);

    Compute& compute_;
    std::vector<Layer> layers_;
    Memory input_, labels_;
    const float* loss_scale_ = nullptr;
    std::size_t batches_per_step_ = 1;
    std::size_t capacity_ = 0, samples_ = 0;
};

}  // namespace train
