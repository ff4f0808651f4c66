#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "compute.h"
#include "ddp/model.h"

namespace train {

/// A multi-layer perceptron: linear layers with ReLU between them, and a softmax cross-entropy loss.
///
/// One step is stage, forward, backward. On a GPU the last two only queue work, at addresses that stay the
/// same while no batch is larger than the reserved size.
class Mlp final : public ddp::Stateful {
  public:
    /// "fc1.weight" [outputs, inputs], "fc1.bias" [outputs], "fc2.weight" ...: the operands of products, and
    /// the tensors that have gradients. A layer is a unit. `widths`: inputs, hidden layers, classes.
    static std::vector<ddp::TensorSpec> specs(const std::vector<std::size_t>& widths, ddp::DType dtype);

    /// Weights are He-normal from `seed`, biases zero; nullopt: all zero, until rank 0's weights are
    /// broadcast. Borrows the compute, and `model`, which has the parameters of specs(); null: the parameters
    /// lie in the compute's memory.
    Mlp(const std::vector<std::size_t>& widths, std::optional<std::uint64_t> seed, Compute& compute,
        ddp::Model* model = nullptr);

    /// The parameters, in the compute's type.
    [[nodiscard]] const std::vector<ddp::Tensor>& parameters() const { return parameters_; }
    /// The parameters in float32, which an optimizer changes and a checkpoint holds. With a float32 compute
    /// they are the parameters; otherwise the optimizer keeps the parameters as their rounded copies.
    [[nodiscard]] const std::vector<ddp::Tensor>& weights() const {
        return has_copies() ? weights_ : parameters_;
    }
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
        Memory output;  ///< [samples, outputs] of the last forward, after ReLU
        Memory delta;   ///< gradient of the loss with respect to the sum before ReLU
    };
    std::vector<ddp::Tensor> allocate(const std::vector<ddp::TensorSpec>& specs);
    [[nodiscard]] Matrix rows(const Memory& memory, std::size_t columns) const;
    [[nodiscard]] Matrix input_of(std::size_t layer) const;
    [[nodiscard]] Matrix weight_of(std::size_t layer, void* data) const;
    /// Calls `use` with layer l's weights, which are on this rank meanwhile.
    template <class Use>
    void with_weights(std::size_t layer, Use use);

    Compute& compute_;
    ddp::Model* const model_;
    std::vector<Memory> owned_;
    std::vector<ddp::Tensor> parameters_;
    std::vector<ddp::Tensor> weights_;  ///< empty when the compute's type is float32
    std::vector<Layer> layers_;
    Memory input_, labels_;
    const float* loss_scale_ = nullptr;
    std::size_t batches_per_step_ = 1;
    std::size_t capacity_ = 0, samples_ = 0;
};

}  // namespace train
