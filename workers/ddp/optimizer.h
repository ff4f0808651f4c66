#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/types.h"

namespace ddp {

class GradClipper;
class GradScaler;
class Model;

/// Names of the tensors in Optimizer::state() that count steps (int64, no dimensions): the common count, and
/// the prefix of each parameter's count.
inline constexpr std::string_view kStepsName = "steps", kStepPrefix = "step.";

/// Changes parameters in place by their gradients. An optimizer does not communicate: equal gradients on all
/// ranks give bitwise equal parameters. Not thread-safe.
///
/// Parameters are float32, bfloat16 or float16; for the two short types the optimizer keeps float32 master
/// weights as part of its state. Their gradients may have any of the three types. In host memory they may
/// also be float64, with gradients and state of that type. All are in host memory, or on one CUDA device:
/// there step() puts work on a stream and returns.
///
/// Make it after DistributedDataParallel, which overwrites parameters with rank 0's: the constructor copies
/// master weights.
///
/// Group 0 holds the parameters that the options list in no group; the groups of the options follow.
class Optimizer : public Stateful {
  public:
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// Makes one step. `gradients[i]` belongs to parameter i; one without memory (an unused parameter) leaves
    /// its parameter and state unchanged. Throws InvalidInput when counts or types do not fit the parameters.
    void step(std::span<const Buffer> gradients);
    /// For an optimizer over a Model: makes one step with the model's averages. Collective where the model is
    /// sharded. Throws Error for an optimizer of borrowed parameters, and before the model's finish().
    virtual void step();

    /// "sgd" or "adamw", stored in checkpoints.
    [[nodiscard]] virtual std::string_view name() const = 0;
    /// The tensors for a checkpoint: "momentum.fc1.weight" and so on, on the device of the parameters, and
    /// "steps". AdamW adds "step.fc1.weight", the step count of that parameter's bias correction.
    [[nodiscard]] std::vector<Tensor> state() const override = 0;
    /// The options that decide its steps, beside learning rates, as text: equal on all ranks. Empty for an
    /// optimizer over borrowed parameters.
    [[nodiscard]] virtual std::string settings() const { return settings_; }
    /// The number of steps that changed parameters. On a device this waits for the steps so far.
    [[nodiscard]] virtual std::uint64_t steps() const = 0;

    [[nodiscard]] std::size_t groups() const { return rates_.size(); }
    /// These calls throw InvalidInput for a group that does not exist.
    [[nodiscard]] double learning_rate(std::size_t group = 0) const { return rate_of(group).now; }
    /// The rate in the options, the base of schedules.
    [[nodiscard]] double initial_learning_rate(std::size_t group = 0) const { return rate_of(group).initial; }
    /// Sets the rate of later steps, and of later launches of a captured graph. Throws InvalidInput for a
    /// rate that is negative or not finite.
    void set_learning_rate(double rate, std::size_t group = 0);

  protected:
    /// Borrows the parameters. `learning_rates` has one rate per group.
    Optimizer(std::vector<Tensor> parameters, std::span<const double> learning_rates);
    [[nodiscard]] const std::vector<Tensor>& parameters() const { return parameters_; }
    [[nodiscard]] virtual bool takes_gradient(DType gradient, DType parameter) const = 0;
    /// `gradients` were checked against the parameters.
    virtual void update(std::span<const Buffer> gradients) = 0;
    virtual void learning_rate_changed(std::size_t /*group*/) {}

  private:
    friend class Model;
    struct Rate {
        double initial, now;
    };
    [[nodiscard]] const Rate& rate_of(std::size_t group) const;

    std::vector<Tensor> parameters_;
    std::vector<Rate> rates_;
    Model* model_ = nullptr;  ///< null over borrowed parameters
    std::string settings_;
};

/// Parameters with their own settings (torch's param_groups): no weight decay for biases, a lower rate for
/// pretrained layers.
struct ParameterGroup {
    std::vector<std::string> parameters;                 ///< names; each in one group at most
    std::optional<double> learning_rate = std::nullopt;  ///< without one: that of group 0
    std::optional<double> weight_decay = std::nullopt;
};

/// Settings of steps on a CUDA device; without effect in host memory.
struct DeviceStepOptions {
    /// cudaStream_t of the steps: the stream on which the gradients become ready.
    void* stream = nullptr;
    /// Zero each gradient in the pass that reads it.
    bool zero_gradients = false;
    /// bfloat16 or float16 copies of the parameters, written in the same pass. Empty, or one per parameter; a
    /// copy without memory is skipped. Borrowed.
    std::vector<Buffer> copies = {};
    /// Unscales the gradients, and skips a step whose gradients are not finite. Borrowed.
    const GradScaler* scaler = nullptr;
    /// Clips the gradients, and skips a step whose norm is not finite. Borrowed.
    const GradClipper* clipper = nullptr;
};

struct SgdOptions {
    double learning_rate = 0.01;
    double momentum = 0;
    double weight_decay = 0;  ///< added to the gradient (L2), as in torch.optim.SGD
    bool nesterov = false;    ///< requires momentum
    std::vector<ParameterGroup> groups = {};
    DeviceStepOptions device = {};
};
/// torch.optim.SGD's update. Throws InvalidInput for an option that is negative, not finite or contradictory,
/// and for parameters that cannot be updated.
std::unique_ptr<Optimizer> make_sgd(std::vector<Tensor> parameters, SgdOptions options);

struct AdamWOptions {
    double learning_rate = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0.01;  ///< decoupled: shrinks the parameter, not the gradient
    std::vector<ParameterGroup> groups = {};
    DeviceStepOptions device = {};
};
/// torch.optim.AdamW's update: each parameter's bias correction counts the steps in which it had a gradient.
std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options);

/// The action of clip_grad_norm when the norm is infinite or NaN, where clipping would give zeros and NaNs.
enum class NonFiniteNorm : std::uint8_t {
    Throw,  ///< throw Error naming the first gradient with such a value
    Leave   ///< leave the gradients unchanged; the caller skips the step
};
/// Called between finish() and step(): scales all gradients by one factor so that their joint norm is at most
/// `max_norm` (torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6), if that is below 1). Returns the
/// norm before clipping; equal gradients on all ranks give the same bits. Gradients without memory are
/// ignored. For host memory (on a CUDA device: GradClipper) and float32, float64, bfloat16 and float16:
/// InvalidInput for others, and for a `max_norm` that is not positive.
double clip_grad_norm(std::span<const Buffer> gradients, double max_norm,
                      NonFiniteNorm non_finite = NonFiniteNorm::Throw);

}  // namespace ddp
