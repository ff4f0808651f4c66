#include "curves.h"

#include <fmt/core.h>

#include <vector>

namespace train {

void Curves::step(std::uint64_t step, ddprun::TimePoint now, const Score& score, std::size_t own_samples,
                  std::size_t samples, double learning_rate) {
    const double seconds = ddprun::in_seconds(now - last_step_), own = static_cast<double>(own_samples);
    last_step_ = now;
    scalars_.add(step, {{"step/loss", score.loss_sum / own},
                        {"step/accuracy", static_cast<double>(score.correct) / own},
                        {"step/learning_rate", learning_rate},
                        {"step/samples_per_second", static_cast<double>(samples) / seconds}});
    report_failure();
}

void Curves::epoch(std::uint64_t step, const EpochResult& result, double learning_rate) {
    std::vector<ddp::Scalar> scalars = {{"epoch/loss", result.loss},
                                        {"epoch/accuracy", result.training_accuracy},
                                        {"epoch/held_out_accuracy", result.held_out_accuracy},
                                        {"epoch/learning_rate", learning_rate},
                                        {"epoch/samples_per_second", result.samples_per_second}};
    if (result.communication_share)
        scalars.push_back({"epoch/communication_percent", 100 * *result.communication_share});
    if (result.waiting_share) scalars.push_back({"epoch/waiting_percent", 100 * *result.waiting_share});
    scalars_.add(step, scalars);
    report_failure();
}

void Curves::flush() {
    scalars_.flush();
    report_failure();
}

void Curves::report_failure() {
    if (is_reported_ || scalars_.failure().empty()) return;
    is_reported_ = true;
    print_(fmt::format("train: --tensorboard {}: {}; points are lost, the training goes on", directory_,
                       scalars_.failure()));
}

}  // namespace train
