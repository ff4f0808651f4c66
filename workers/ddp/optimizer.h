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

/// Of Optimizer::state(), the tensors (int64, no dimensions) that count steps: of all parameters together,
/// and, behind the prefix, of one parameter.
inline constexpr std::string_view kStepsName = "steps", kStepPrefix = "step.";

/// Changes parameters by their gradients, in place. Knows nothing of ranks: equal gradients on all ranks give
/// bitwise equal parameters. Not thread-safe.
///
/// Parameters are float32, or bfloat16 or float16: then the optimizer keeps float32 master weights, which are
/// part of its state. Their gradients are of any of the three types. In host memory they may also be float64,
/// with gradients and state of that type. All are in host memory, or on one CUDA device: there step() puts
/// work on a stream and returns.
///
/// Make it after DistributedDataParallel, which overwrites parameters with rank 0's: master weights are
/// copied here.
///
/// Group 0 are the parameters that the options name no group for; those of the options follow.
class Optimizer : public Stateful {
  public:
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    /// One step. `gradients[i]` belongs to parameter i; one without memory (an unused parameter) leaves its
    /// parameter and state alone. Throws InvalidInput when counts or types do not fit the parameters.
    void step(std::span<const Buffer> gradients);

    /// "sgd", "adamw": what a checkpoint names.
    [[nodiscard]] virtual std::string_view name() const = 0;
    /// All that a checkpoint has to hold: "momentum.fc1.weight" and so on, where the parameters are, and
    /// "steps". Of AdamW also "step.fc1.weight", the steps of that parameter: its bias correction goes by
    /// them.
    [[nodiscard]] std::vector<Tensor> state() const override = 0;
    /// Steps that changed something. On a device this waits for the steps so far.
    [[nodiscard]] virtual std::uint64_t steps() const = 0;

    [[nodiscard]] std::size_t groups() const { return rates_.size(); }
    /// These throw InvalidInput for a group that there is none of.
    [[nodiscard]] double learning_rate(std::size_t group = 0) const { return rate_of(group).now; }
    /// As the options gave it: what a schedule goes by.
    [[nodiscard]] double initial_learning_rate(std::size_t group = 0) const { return rate_of(group).initial; }
    /// For the steps from now on; also for those of a captured graph that is launched from now on. Throws
    /// InvalidInput for a rate that is negative or not finite.
    void set_learning_rate(double rate, std::size_t group = 0);

  protected:
    /// Parameters are borrowed. One rate for each group.
    Optimizer(std::vector<Tensor> parameters, std::span<const double> learning_rates);
    [[nodiscard]] const std::vector<Tensor>& parameters() const { return parameters_; }
    [[nodiscard]] virtual bool takes_gradient(DType gradient, DType parameter) const = 0;
    /// `gradients` fit the parameters.
    virtual void update(std::span<const Buffer> gradients) = 0;
    virtual void learning_rate_changed(std::size_t /*group*/) {}

  private:
    struct Rate {
        double initial, now;
    };
    [[nodiscard]] const Rate& rate_of(std::size_t group) const;

    std::vector<Tensor> parameters_;
    std::vector<Rate> rates_;
};

/// Parameters that are stepped by numbers of their own (torch's param_groups): no weight decay for biases, a
/// lower rate for what was trained before.
struct ParameterGroup {
    std::vector<std::string> parameters;                 ///< by name; each in one group at most
    std::optional<double> learning_rate = std::nullopt;  ///< none: as the others
    std::optional<double> weight_decay = std::nullopt;
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
    /// Clips the gradients, and leaves out a step whose norm is not finite. Borrowed.
    const GradClipper* clipper = nullptr;
};

struct SgdOptions {
    double learning_rate = 0.01;
    double momentum = 0;
    double weight_decay = 0;  ///< added to the gradient (L2), as in torch.optim.SGD
    bool nesterov = false;    ///< needs momentum
    std::vector<ParameterGroup> groups = {};
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
    std::vector<ParameterGroup> groups = {};
    DeviceStepOptions device = {};
};
/// torch.optim.AdamW's update: each parameter's bias correction counts the steps that it had a gradient in.
std::unique_ptr<Optimizer> make_adamw(std::vector<Tensor> parameters, AdamWOptions options);

/// What clip_grad_norm does with gradients whose norm is infinite or NaN. Clipping would make zeros and NaNs
/// of them.
enum class NonFiniteNorm : std::uint8_t {
    Throw,  ///< Error naming the first gradient with such a value
    Leave   ///< they stay as they are: leave the step out
};
/// Between finish() and step(): scales all gradients alike so that the norm of all of them together is
/// `max_norm` at most (torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6), if that is below 1).
/// Returns the norm before, bitwise the same on all ranks, whose gradients are. Gradients without memory are
/// left out. In host memory (on a CUDA device: GradClipper); of float32, float64, bfloat16 and float16:
/// InvalidInput for others, and for a `max_norm` that is not positive.
double clip_grad_norm(std::span<const Buffer> gradients, double max_norm,
                      NonFiniteNorm non_finite = NonFiniteNorm::Throw);

}  // namespace ddp
