#include "learner.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "ddp/cuda/host_copies.h"
#include "env/hmac.h"

namespace train {
namespace {

using ddp::cuda::HostCopies;

/// What a step is not captured before: the first one lays the buckets out, and what it lacks is allocated.
constexpr int kStepsBeforeRecording = 3;
constexpr const char* kScaleNote = "loss_scale";

/// Small tensors as text for the notes of a checkpoint: other runs need not have them.
std::string to_text(std::span<const ddp::Tensor> tensors) {
    std::string text;
    for (const ddp::Tensor& tensor : tensors)
        text += ddprun::to_hex({static_cast<const std::uint8_t*>(tensor.memory.data), tensor.memory.bytes()});
    return text;
}
/// Leaves them as they are when the text is not theirs.
void from_text(std::string_view text, std::span<const ddp::Tensor> tensors) {
    const ddprun::Result<std::string> bytes = ddprun::from_hex(text);
    std::size_t total = 0, at = 0;
    for (const ddp::Tensor& tensor : tensors) total += tensor.memory.bytes();
    if (!bytes || bytes->size() != total) return;
    for (const ddp::Tensor& tensor : tensors) {
        std::memcpy(tensor.memory.data, bytes->data() + at, tensor.memory.bytes());
        at += tensor.memory.bytes();
    }
}

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

ddp::TrainingState Learner::load(const std::string& checkpoint) {
    const ddp::TrainingState state =
        ddp::load_checkpoint(group_, checkpoint, mlp_.weights(), optimizer_->state());
    mlp_.refresh_copies();
    const auto note = state.notes.find(kScaleNote);
    // Of a run without a loss scale there is nothing to go on from.
    if (!scaler_ || note == state.notes.end()) return state;
    const HostCopies scale(scaler_->state(), HostCopies::Begin::WithContents);
    from_text(note->second, scale.tensors());
    scale.upload();
    return state;
}

std::string Learner::save(ddp::CheckpointDirectory& to, ddp::TrainingState state) {
    state.step = optimizer_->steps();
    if (scaler_) {
        const HostCopies scale(scaler_->state(), HostCopies::Begin::WithContents);
        state.notes[kScaleNote] = to_text(scale.tensors());
    }
    return to.save(mlp_.weights(), optimizer_->state(), state);
}

}  // namespace train
