#include "learner.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace train {
namespace {

std::vector<ddp::Buffer> memory_of(const std::vector<ddp::Tensor>& tensors) {
    std::vector<ddp::Buffer> buffers;
    for (const ddp::Tensor& tensor : tensors) buffers.push_back(tensor.memory);
    return buffers;
}

std::unique_ptr<ddp::GradScaler> make_scaler(const ComputeDevice& device, const Options& options) {
    if (options.precision != Precision::Fp16) return nullptr;
    return std::make_unique<ddp::GradScaler>(device.choice.device,
                                             ddp::GradScalerOptions{.stream = device.stream_handle()});
}

std::unique_ptr<ddp::GradClipper> make_clipper(const ComputeDevice& device, const Options& options,
                                               const ddp::GradScaler* scaler) {
    if (!options.clip || !device.gpu) return nullptr;
    return std::make_unique<ddp::GradClipper>(
        device.choice.device, *options.clip,
        ddp::GradClipperOptions{.stream = device.stream_handle(), .scaler = scaler});
}

ddp::Schedule schedule_of(const Options& options, std::uint64_t steps) {
    // The schedule ends with the last step; step_every is 1 for very few steps.
    return {.shape = options.schedule,
            .warmup_steps = options.warmup,
            .total_steps = std::max(steps, options.warmup + 1),
            .step_every = std::max<std::uint64_t>(1, (steps - std::min(steps, options.warmup)) / 3)};
}

ddp::Model make_model(const World& world, const ComputeDevice& device, const Options& options,
                      const std::vector<std::size_t>& widths) {
    const ddp::ModelOptions how{.shard = options.shard,
                                .accumulates = options.accumulate > 1,
                                .overlaps_gather = true,
                                .device = device.choice.device,
                                .verify_every = options.verify_every};
    const std::vector<ddp::TensorSpec> specs = Mlp::specs(widths, device.compute->dtype());
    if (world.group == nullptr) return ddp::Model(specs, how);
    return {*world.group, specs, how};
}

}  // namespace

double learning_rate(const Options& options, int world_size) {
    if (!options.scale_learning_rate) return options.base_learning_rate();
    return ddp::scaled_learning_rate(options.base_learning_rate(), 1,
                                     static_cast<std::size_t>(world_size) * options.accumulate);
}

Learner::Learner(const World& world, const ComputeDevice& device, const Options& options,
                 const std::vector<std::size_t>& widths, std::uint64_t steps)
    : world_(world),
      device_(device),
      options_(options),
      model_(make_model(world, device, options, widths)),
      // The optimizer, or attach(), broadcasts rank 0's weights, except those of which the model has rounded
      // copies.
      mlp_(widths,
           world.rank == 0 || device.compute->dtype() != ddp::DType::F32 ? std::optional(options.seed)
                                                                         : std::nullopt,
           *device.compute, &model_),
      scaler_(make_scaler(device, options)),
      clipper_(make_clipper(device, options, scaler_.get())),
      optimizer_(make_optimizer()),
      rate_(*optimizer_, schedule_of(options, steps)) {
    if (scaler_) mlp_.set_loss_scale(scaler_->scale());
    mlp_.set_batches_per_step(options.accumulate);
    mlp_.reserve(std::max(options.batch_size, kEvaluationBatch));
    if (world.group != nullptr) group_ = *world.group;
}

void Learner::attach(ddp::ProcessGroup& group, bool broadcast, std::uint64_t steps) {
    model_.attach(group, broadcast);
    group_ = group;
    batches_in_step_ = 0;
    rate_.replace(schedule_of(options_, steps), learning_rate(options_, group.size()));
}

std::unique_ptr<ddp::Optimizer> Learner::make_optimizer() {
    const double rate = learning_rate(options_, world_.size);
    const ddp::DeviceStepOptions on_device{
        .stream = device_.stream_handle(),
        .copies = mlp_.has_copies() ? memory_of(mlp_.parameters()) : std::vector<ddp::Buffer>{},
        .scaler = scaler_.get(),
        .clipper = clipper_.get()};
    const ddp::AdamWOptions adamw{
        .learning_rate = rate, .weight_decay = options_.weight_decay, .device = on_device};
    const ddp::SgdOptions sgd{.learning_rate = rate,
                              .momentum = options_.momentum,
                              .weight_decay = options_.weight_decay,
                              .device = on_device};
    const bool is_adamw = options_.optimizer == OptimizerKind::AdamW;
    if (!mlp_.has_copies()) return is_adamw ? ddp::make_adamw(model_, adamw) : ddp::make_sgd(model_, sgd);
    return is_adamw ? ddp::make_adamw(mlp_.weights(), adamw) : ddp::make_sgd(mlp_.weights(), sgd);
}

/// The rest of a batch after its forward pass, up to averaged gradients.
void Learner::reduce() {
    const auto no_sync = model_.no_sync(!is_last_of_step());
    mlp_.backward({[this](std::size_t i) { return model_.gradient(i).data; },
                   [this](std::size_t i) { model_.mark_ready(i); },
                   is_between_steps() ? Into::Replace : Into::Add});
    model_.finish();
}

void Learner::clip() {
    if (clipper_) clipper_->measure(model_.gradients());
    else if (options_.clip) ddp::clip_grad_norm(model_, *options_.clip);
}

void Learner::update() {
    if (scaler_) scaler_->check(model_.gradients());
    clip();
    if (mlp_.has_copies()) optimizer_->step(model_.gradients());
    else optimizer_->step();
    if (scaler_) scaler_->update();
}

void Learner::replay() {
    auto& recorded = recorded_[is_last_of_step() ? 2 : is_between_steps() ? 0 : 1];
    if (!recorded) {
        recorded = device_.compute->record([this] {
            mlp_.forward();
            reduce();
            if (is_last_of_step()) update();
        });
    }
    group_->launch_graph(recorded).wait();
}

void Learner::forward(const BatchSource& batch) {
    mlp_.stage(batch);
    if (!replays()) mlp_.forward();
}

bool Learner::backward() {
    if (replays()) replay();
    else reduce();
    if (is_last_of_step()) return true;
    ++batches_in_step_;
    return false;
}

void Learner::step() {
    if (!replays()) update();
    batches_in_step_ = 0;
    steps_before_recording_ = std::max(0, steps_before_recording_ - 1);
    rate_.step();
}

ddp::MemoryUse Learner::memory() const {
    ddp::MemoryUse use = model_.memory();
    if (!mlp_.has_copies()) return use;
    for (const ddp::Tensor& weight : mlp_.weights()) use.weights += weight.memory.bytes();
    for (const ddp::Tensor& state : optimizer_->state()) use.optimizer += state.memory.bytes();
    return use;
}

Score Learner::take_score() {
    const Score score = device_.compute->take_score();
    const std::uint64_t skipped = clipper_ && !scaler_ ? clipper_->read_skipped_steps() : 0;
    if (skipped > 0)
        throw ddp::Error(fmt::format(
            "--clip: the norm of the gradients was not finite in {} steps, which were skipped; lower the "
            "learning rate",
            skipped));
    return score;
}

void Learner::evaluate(const BatchSource& batch) {
    mlp_.stage(batch);
    mlp_.forward();
}

ddp::Training Learner::training(ddp::DistributedSampler& sampler) {
    return {mlp_.has_copies() ? static_cast<ddp::Stateful&>(mlp_) : model_,
            *optimizer_,
            sampler,
            {{.name = "schedule", .state = &rate_, .optional = true},
             {.name = "loss_scale", .state = scaler_.get(), .optional = true}}};
}

}  // namespace train
