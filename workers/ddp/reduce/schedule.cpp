#include "ddp/schedule.h"

#include <fmt/core.h>

#include <cmath>
#include <numbers>

namespace ddp {
namespace {

using Shape = Schedule::Shape;

void require(bool holds, const std::string& what) {
    if (!holds) throw InvalidInput("schedule: " + what);
}

void check(const Schedule& s) {
    require(s.warmup_from > 0 && s.warmup_from <= 1,
            fmt::format("warmup_from is {}, not in (0, 1]", s.warmup_from));
    const bool ends = s.shape == Shape::Cosine || s.shape == Shape::Linear;
    require(!ends || s.total_steps > s.warmup_steps,
            fmt::format("total_steps is {}, not more than the {} steps of the warm-up", s.total_steps,
                        s.warmup_steps));
    require(s.final_rate >= 0 && std::isfinite(s.final_rate), fmt::format("final_rate is {}", s.final_rate));
    require(s.final_part >= 0 && s.final_part <= 1,
            fmt::format("final_part is {}, not in [0, 1]", s.final_part));
    require(s.shape != Shape::Step || s.step_every > 0, "step_every is 0");
    require(s.factor > 0 && std::isfinite(s.factor), fmt::format("factor is {}", s.factor));
}

/// Rises from 0 to 1 within `steps`, then stays 1.
double part_done(std::uint64_t done, std::uint64_t steps) {
    return done >= steps ? 1 : static_cast<double>(done) / static_cast<double>(steps);
}

}  // namespace

double rate_at(const Schedule& schedule, double base, std::uint64_t steps) {
    check(schedule);
    const Schedule& s = schedule;
    if (steps < s.warmup_steps)
        return base * (s.warmup_from + (1 - s.warmup_from) * part_done(steps, s.warmup_steps));
    const std::uint64_t since = steps - s.warmup_steps;
    switch (s.shape) {
        case Shape::Constant: break;
        case Shape::Step: return base * std::pow(s.factor, static_cast<double>(since / s.step_every));
        case Shape::Cosine: {
            const double done = part_done(since, s.total_steps - s.warmup_steps);
            return s.final_rate + (base - s.final_rate) * (1 + std::cos(std::numbers::pi * done)) / 2;
        }
        case Shape::Linear:
            return base * (1 + (s.final_part - 1) * part_done(since, s.total_steps - s.warmup_steps));
    }
    return base;
}

double scaled_learning_rate(double rate, std::size_t batch, std::size_t batch_of_all) {
    require(batch > 0, "the reference batch of the learning rate is empty");
    return rate * static_cast<double>(batch_of_all) / static_cast<double>(batch);
}

ScheduledRate::ScheduledRate(Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), schedule_(schedule) {
    set_rates();
}

void ScheduledRate::step() {
    ++steps_;
    set_rates();
}

void ScheduledRate::set_steps(std::uint64_t steps) {
    steps_ = steps;
    set_rates();
}

void ScheduledRate::replace(Schedule schedule, std::optional<double> initial_rate) {
    schedule_ = schedule;
    initial_rate_ = initial_rate;
    set_rates();
}

void ScheduledRate::set_rates() {
    for (std::size_t group = 0; group < optimizer_.groups(); ++group) {
        const double base = initial_rate_.value_or(optimizer_.initial_learning_rate(group));
        optimizer_.set_learning_rate(rate_at(schedule_, base, steps_), group);
    }
}

std::vector<Tensor> ScheduledRate::state() const {
    return {{"schedule.steps", {}, {&steps_, 1, DType::I64, {}}}};
}

}  // namespace ddp
