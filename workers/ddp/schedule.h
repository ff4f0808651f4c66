#pragma once

#include <cstdint>
#include <vector>

#include "ddp/optimizer.h"
#include "ddp/types.h"

namespace ddp {

/// How the learning rate moves, as a function of the steps done. All of it is PyTorch's: LinearLR for the
/// warm-up, then ConstantLR's rest, StepLR, CosineAnnealingLR or LinearLR, counted from the end of the
/// warm-up.
struct Schedule {
    enum class Shape : std::uint8_t { Constant, Step, Cosine, Linear } shape = Shape::Constant;
    /// The rate rises from warmup_from times the base to the base within so many steps.
    std::uint64_t warmup_steps = 0;
    double warmup_from = 0.1;  ///< in (0, 1]
    /// Of Cosine and Linear: steps in all, warm-up included; then the rate stays.
    std::uint64_t total_steps = 0;
    double final_rate = 0;  ///< of Cosine: reached at total_steps
    double final_part = 0;  ///< of Linear: of the base, reached at total_steps
    /// Of Step: the rate is multiplied by `factor` after every so many steps.
    std::uint64_t step_every = 0;
    double factor = 0.1;

    bool operator==(const Schedule&) const = default;
};

/// The rate of the step that follows `steps` steps, for a rate of `base` at the start. Throws InvalidInput
/// for a schedule that makes no sense, naming what is wrong.
double rate_at(const Schedule& schedule, double base, std::uint64_t steps);

/// The linear scaling rule: `rate` was found good for batches of `batch` samples; this run has `batch_of_all`
/// in all ranks together.
double scaled_learning_rate(double rate, std::size_t batch, std::size_t batch_of_all);

/// Moves the rates of all groups of an optimizer, each from its own initial rate.
///
///     ddp::ScheduledRate rate(*optimizer, {.shape = Cosine, .warmup_steps = 500, .total_steps = 10'000});
///     for each batch: ...; optimizer->step(model.gradients()); rate.step();
///
/// The optimizer is borrowed.
class ScheduledRate final : public Stateful {
  public:
    /// Sets the rates of the first step. Throws as rate_at.
    ScheduledRate(Optimizer& optimizer, Schedule schedule);
    /// Once after each step of the optimizer: sets the rates of the next.
    void step();
    [[nodiscard]] std::uint64_t steps() const { return steps_; }

    /// "schedule.steps".
    [[nodiscard]] std::vector<Tensor> state() const override;
    void state_loaded() override { set_rates(); }

  private:
    void set_rates();

    Optimizer& optimizer_;
    Schedule schedule_;
    mutable std::uint64_t steps_ = 0;
};

}  // namespace ddp
