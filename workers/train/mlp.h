#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "compute.h"
#include "ddp/types.h"

namespace train {

/// A multi-layer perceptron: linear layers with ReLU between them, softmax cross-entropy at the end.
///
/// One step: stage, forward, backward. On a GPU the last two only queue work, at addresses that do not change
/// while batches are no larger than what reserve was told.
class Mlp final : public ddp::Stateful {
  public:
    /// `widths`: inputs, hidden layers, classes. Weights are He-normal from `seed`, biases zero. The compute
    /// is borrowed.
    Mlp(std::vector<std::size_t> widths, std::uint64_t seed, Compute& compute);

    /// "fc1.weight" [outputs, inputs], "fc1.bias" [outputs], "fc2.weight" ..., in the compute's memory and
    /// type: what is multiplied, and what gradients belong to.
    [[nodiscard]] std::vector<ddp::Tensor> parameters() const;
    /// The same in float32: what an optimizer changes and a checkpoint holds. Where the compute's type is
    /// float32 they are the parameters; else the parameters are to be kept as their rounded copies.
    [[nodiscard]] std::vector<ddp::Tensor> weights() const;
    [[nodiscard]] std::vector<ddp::Tensor> state() const override { return weights(); }
    void state_loaded() override { refresh_copies(); }
    [[nodiscard]] bool has_copies() const { return compute_.dtype() != ddp::DType::F32; }
    [[nodiscard]] std::size_t parameter_count() const;

    /// Makes room for batches of so many samples.
    void reserve(std::size_t samples);
    /// The next batch, from the compute's memory.
    void stage(const BatchSource& batch);
    /// Adds loss and hits to the compute's score.
    void forward();

    /// Where gradient i (in the order of parameters()) goes, and what to call once it is there.
    struct GradientSink {
        std::function<void*(std::size_t)> memory;
        std::function<void(std::size_t)> ready;
        Into into = Into::Replace;
    };
    /// The gradients of the mean loss of the last forward, last layer first.
    void backward(const GradientSink& sink);

    /// Of how many batches a step is made: their gradients, added up, are those of their mean loss.
    void set_batches_per_step(std::size_t batches) { batches_per_step_ = batches; }
    /// What multiplies the gradients, in the compute's memory; null: nothing.
    void set_loss_scale(const float* scale) { loss_scale_ = scale; }

  private:
    /// Rounds the weights into the parameters.
    void refresh_copies();
    struct Layer {
        std::size_t inputs, outputs;
        Memory weight, bias;            ///< the compute's type
        Memory full_weight, full_bias;  ///< float32; none where the above are
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
