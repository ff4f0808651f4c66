#include "learner.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>


namespace train {
namespace {

/// What a step is not captured before: the first one lays the buckets out, and what it lacks is allocated.
constexpr int kStepsBeforeRecording = 3;
std::vector<ddp::Buffer> memory_of(const std::vector<ddp::Tensor>& tensors) {
    std::vector<ddp::Buffer> buffers;
    for (const ddp::Tensor& tensor : tensors) buffers.push_back(tensor.memory);
    return buffers;
}

}  // namespace

double learning_rate(const Options& options, int world_size) {
    return options.base_learning_rate() * (options.scale_learning_rate ? world_size : 1);
}

Learner::Learner(ddp::ProcessGroup& group, const Station& station, const Options& options,
                 const std::vector<std::size_t>& widths)
    : group_(group),
      station_(station),
      options_(options),
      mlp_(widths, options.seed, *station.compute),
      model_(group, mlp_.parameters()) {
    if (options.precision == Precision::Fp16) {
        scaler_ = std::make_unique<ddp::GradScaler>(
            station.choice.device, ddp::GradScalerOptions{.stream = station.stream_handle()});
        mlp_.set_loss_scale(scaler_->scale());
    }
    optimizer_ = make_optimizer();
    mlp_.reserve(std::max(options.batch_size, kLookBatch));
}

std::unique_ptr<ddp::Optimizer> Learner::make_optimizer() {
    const double rate = learning_rate(options_, group_.size());
    const ddp::DeviceStepOptions on_device{
        .stream = station_.stream_handle(),
        .copies = mlp_.has_copies() ? memory_of(mlp_.parameters()) : std::vector<ddp::Buffer>{},
        .scaler = scaler_.get()};
    switch (options_.optimizer) {
        case OptimizerKind::AdamW:
            return ddp::make_adamw(
                mlp_.weights(),
                {.learning_rate = rate, .weight_decay = options_.weight_decay, .device = on_device});
        case OptimizerKind::Sgd:
            break;
    }
    return ddp::make_sgd(mlp_.weights(), {.learning_rate = rate,
                                          .momentum = options_.momentum,
                                          .weight_decay = options_.weight_decay,
                                          .device = on_device});
}

void Learner::step() {
    mlp_.forward();
    mlp_.backward({[this](std::size_t i) { return model_.gradient(i).data; },
                   [this](std::size_t i) { model_.mark_ready(i); }});
    model_.finish();
    if (scaler_) scaler_->check(model_.gradients());
    optimizer_->step(model_.gradients());
    if (scaler_) scaler_->update();
}

void Learner::learn(const BatchSource& batch) {
    mlp_.stage(batch);
    if (!recorded_ && options_.cuda_graph && ++steps_before_recording_ > kStepsBeforeRecording)
        recorded_ = station_.compute->record([this] { step(); });
    if (recorded_) group_.launch_graph([this] { recorded_->run(); }).wait();
    else step();
}

void Learner::look_at(const BatchSource& batch) {
    mlp_.stage(batch);
    mlp_.forward();
}

ddp::Training Learner::training(ddp::DistributedSampler& sampler) {
    return {mlp_, *optimizer_, sampler, {{.name = "loss_scale", .state = scaler_.get(), .optional = true}}};
}

}  // namespace train
