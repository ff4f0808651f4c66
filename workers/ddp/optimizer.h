#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "ddp/types.h"

namespace ddp {

class GradScaler;

/// Of Optimizer::state(), the tensors (int64, no dimensions) that count steps: of all parameters together, and, behind
/// the prefix, of one parameter.
inline constexpr std::string_view kStepsName = "steps", kStepPrefix = "step.";

/// Changes parameters by their gradients, in place. Knows nothing of ranks: equal gradients on all ranks give
/// bitwise equal parameters. Not thread-safe.
///
/// Parameters in host memory are float32. Parameters on a CUDA device (all on the same) are float32, or
/// bfloat16 or float16: then the optimizer keeps float32 master weights, which are part of its state. Their
/// gradients are of any of the three types. On a device, step() puts work on a stream and returns.
class Optimizer : public Stateful {
  public:
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// One step. `gradients[i]` belongs to parameter i; one without memory (an unused parameter) leaves its
    /// parameter and state alone. Throws InvalidInput when counts or types do not fit the parameters.
    void step(std::span<const Buffer> gradients);

    /// "sgd", "adamw": what a checkpoint names.
    [[nodiscard]] virtual std::string_view name() const = 0;
    /// All that a checkpoint has to hold: "momentum.fc1.weight" and so on, where the parameters are, and "steps".
    /// Of AdamW also "step.fc1.weight", the steps of that parameter: its bias correction goes by them.
    [[nodiscard]] std::vector<Tensor> state() const override = 0;
    /// Steps that changed something. On a device this waits for the steps so far.
    [[nodiscard]] virtual std::uint64_t steps() const = 0;

    [[nodiscard]] double learning_rate() const { return learning_rate_; }
    /// For the steps from now on; also for those of a captured graph that is launched from now on. Throws
    /// InvalidInput for a rate that is negative or not finite.
    virtual void set_learning_rate(double rate);

  protected:
    /// Parameters are borrowed.
    Optimizer(std::vector<Tensor> parameters, double learning_rate);
    [[nodiscard]] const std::vector<Tensor>& parameters() const { return parameters_; }
    [[nodiscard]] virtual bool takes_gradient(DType gradient, DType parameter) const = 0;
    /// `gradients` fit the parameters.
    virtual void update(std::span<const Buffer> gradients) = 0;

  private:
    std::vector<Tensor> parameters_;
    double learning_rate_;
};

/// How parameters on a CUDA device are stepped; of no meaning for those in host memory.
struct DeviceStepOptions {
    /// cudaStream_t of the steps: the one that the gradients are ready on.
    void* stream = nullptr;
    /// Zero each gradient in the pass that reads it.
    bool zero_gradients = false;
    /// A bfloat16 or float16 copy of parameter i, written in the same pass; one without memory is none.
    /// Empty, or one for each parameter. Borrowed.
    std::vector<Buffer> copies = {};
    /// Unscales the gradients, and leaves out a step whose gradients are not finite. Borrowed.
    const GradScaler* scaler = nullptr;
};

struct SgdOptions {
    double learning_rate = 0.01;
    double momentum = 0;
    double weight_decay = 0;  ///< added to the gradient (L2), as in torch.optim.SGD
    bool nesterov = false;    ///< needs momentum
    DeviceStepOptions device = {};
};
/// torch.optim.SGD's update. Throws InvalidInput on an option that is negative, not finite or contradictory,
/// and for parameters that cannot be updated.
std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options);

struct AdamWOptions {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0.01;  ///< decoupled: shrinks the parameter, not the gradient
    DeviceStepOptions device = {};
};
/// torch.optim.AdamW's update: each parameter's bias correction counts the steps that it had a gradient in.
std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options);

}  // namespace ddp
