#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "ddp/tensor.h"

namespace ddp {

/// Changes parameters by their gradients, in place. Knows nothing of ranks: equal gradients on all ranks give
/// bitwise equal parameters. Not thread-safe.
class Optimizer {
  public:
    virtual ~Optimizer() = default;
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// One step. `gradients[i]` belongs to parameter i; one without memory (an unused parameter) leaves its
    /// parameter and state alone. Throws InvalidInput when counts or types differ from the parameters'.
    void step(std::span<const Buffer> gradients);

    /// "sgd", "adamw": what a checkpoint names.
    [[nodiscard]] virtual std::string_view name() const = 0;
    /// What a checkpoint has to hold beside steps(): "momentum.fc1.weight" and so on.
    [[nodiscard]] std::vector<Tensor> state() const;
    [[nodiscard]] std::uint64_t steps() const { return steps_; }
    /// For resuming, after state() was filled.
    void set_steps(std::uint64_t steps) { steps_ = steps; }

    [[nodiscard]] double learning_rate() const { return learning_rate_; }
    void set_learning_rate(double rate) { learning_rate_ = rate; }

  protected:
    /// `slots` names the states each parameter has (float32, zero at the start). Parameters are float32 host
    /// memory and borrowed; InvalidInput otherwise.
    Optimizer(std::vector<Tensor> parameters, double learning_rate, std::vector<std::string_view> slots);
    [[nodiscard]] std::span<float> slot(std::size_t which, std::size_t parameter);
    /// steps() already counts the step in progress.
    virtual void update(std::size_t parameter, std::span<float> values, std::span<const float> gradient) = 0;

  private:
    std::vector<Tensor> parameters_;
    double learning_rate_;
    std::vector<std::string_view> slot_names_;
    mutable std::vector<std::vector<float>> slots_;  ///< slot-major
    std::uint64_t steps_ = 0;
};

struct SgdOptions {
    double learning_rate = 0.01;
    double momentum = 0;
    double weight_decay = 0;  ///< added to the gradient (L2), as in torch.optim.SGD
    bool nesterov = false;    ///< needs momentum
};
/// torch.optim.SGD's update. Throws InvalidInput on a negative or contradictory option.
std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options);

struct AdamWOptions {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0.01;  ///< decoupled: shrinks the parameter, not the gradient
};
/// torch.optim.AdamW's update.
std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options);

}  // namespace ddp
