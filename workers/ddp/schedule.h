#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ddp/optimizer.h"
#include "ddp/types.h"

namespace ddp {

/// The learning rate as a function of the steps done. It follows PyTorch: LinearLR for the warm-up, then
/// ConstantLR's rest, StepLR, CosineAnnealingLR or LinearLR, counted from the end of the warm-up.
struct Schedule {
    enum class Shape : std::uint8_t { Constant, Step, Cosine, Linear } shape = Shape::Constant;
    /// The rate rises from warmup_from times the base to the base within this many steps.
    std::uint64_t warmup_steps = 0;
    double warmup_from = 0.1;  ///< in (0, 1]
    /// For Cosine and Linear: the total number of steps, warm-up included; then the rate stays.
    std::uint64_t total_steps = 0;
    double final_rate = 0;  ///< for Cosine: the rate at total_steps
    double final_part = 0;  ///< for Linear: the rate at total_steps, as a fraction of the base
    /// For Step: the rate is multiplied by `factor` after every `step_every` steps.
    std::uint64_t step_every = 0;
    double factor = 0.1;

    bool operator==(const Schedule&) const = default;
};

/// The rate of the step that follows `steps` steps, for an initial rate of `base`. Throws InvalidInput for an
/// invalid schedule, naming the fault.
double rate_at(const Schedule& schedule, double base, std::uint64_t steps);

/// The linear scaling rule: `rate` is good for batches of `batch` samples; the ranks of this run together
/// have `batch_of_all`.
double scaled_learning_rate(double rate, std::size_t batch, std::size_t batch_of_all);

/// Sets the rates of all groups of an optimizer, each from its own initial rate.
///
///     ddp::ScheduledRate rate(*optimizer, {.shape = Cosine, .warmup_steps = 500, .total_steps = 10'000});
///     for each batch: ...; optimizer->step(model.gradients()); rate.step();
///
/// The optimizer is borrowed.
class ScheduledRate final : public Stateful {
  public:
    /// Sets the rates of the first step. Throws the errors of rate_at.
    ScheduledRate(Optimizer& optimizer, Schedule schedule);
    /// Called once after each step of the optimizer: sets the rates of the next step.
    void step();
    [[nodiscard]] std::uint64_t steps() const { return steps_; }
    /// Goes on as after so many steps: a world of another size divides an epoch into other steps.
    void set_steps(std::uint64_t steps);
    /// Goes on after as many steps with another schedule and this initial rate for all groups (each group's
    /// own without one): those of a world of another size. Throws the errors of rate_at.
    void replace(Schedule schedule, std::optional<double> initial_rate = std::nullopt);

    [[nodiscard]] std::vector<Tensor> state() const override;
    void state_loaded() override { set_rates(); }

  private:
    void set_rates();

    Optimizer& optimizer_;
    Schedule schedule_;
    std::optional<double> initial_rate_;  ///< in place of the groups' own
    mutable std::uint64_t steps_ = 0;
};

}  // namespace ddp
