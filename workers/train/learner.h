#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compute_device.h"
#include "ddp/checkpoint.h"
#include "ddp/grad_clipper.h"
#include "ddp/grad_scaler.h"
#include "ddp/model.h"
#include "ddp/optimizer.h"
#include "ddp/schedule.h"
#include "mlp.h"
#include "options.h"

namespace train {

/// The optimizer's learning rate after the warm-up.
double learning_rate(const Options& options, int world_size);

/// The model of one rank and all parts of a training step. On a GPU a step only queues work.
class Learner {
  public:
    static constexpr std::size_t kEvaluationBatch = 256;
    /// The first steps run uncaptured: scratch memory is allocated.
    static constexpr int kStepsBeforeRecording = 3;

    /// Collective. Everything except `widths` is borrowed; `steps` is the length of the run. Throws libddp's
    /// errors.
    Learner(ddp::ProcessGroup& group, const ComputeDevice& device, const Options& options,
            const std::vector<std::size_t>& widths, std::uint64_t steps);

    /// Collective: trains on this rank's next batch. True when it ended a step, which has --accumulate
    /// batches. With --cuda-graph all batches must have the same size: after the first steps the captured one
    /// is replayed.
    bool train_batch(const BatchSource& batch);
    /// True when the next batch begins a step.
    [[nodiscard]] bool is_between_steps() const { return batches_in_step_ == 0; }
    /// Adds loss and hits of a batch of at most max(batch size, kEvaluationBatch) rows to the score;
    /// parameters stay.
    void evaluate(const BatchSource& batch);
    /// The score of the batches since the last call. Waits. Throws ddp::Error when --clip on a GPU met
    /// gradients that are not finite, except under fp16's loss scale.
    Score take_score();

    /// The state for a checkpoint: weights, optimizer, the sampler's position and, for fp16, the loss scale.
    [[nodiscard]] ddp::Training training(ddp::DistributedSampler& sampler);

    /// Of the next step.
    [[nodiscard]] double current_learning_rate() const { return optimizer_->learning_rate(); }
    [[nodiscard]] ddp::MemoryUse memory() const;
    [[nodiscard]] std::string_view optimizer_name() const { return optimizer_->name(); }
    [[nodiscard]] std::size_t parameter_count() const { return mlp_.parameter_count(); }
    /// Collective; see DistributedDataParallel.
    std::string verify_equal_parameters() { return model_.verify_equal_parameters(); }

  private:
    std::unique_ptr<ddp::Optimizer> make_optimizer();
    void forward_backward();
    void clip();
    void optimizer_step();
    void micro_batch();
    void replay();
    [[nodiscard]] bool is_last_of_step() const { return batches_in_step_ + 1 == options_.accumulate; }

    ddp::ProcessGroup& group_;
    const ComputeDevice& device_;
    const Options& options_;
    ddp::Model model_;
    Mlp mlp_;
    std::unique_ptr<ddp::GradScaler> scaler_;    ///< for fp16
    std::unique_ptr<ddp::GradClipper> clipper_;  ///< on a GPU
    std::unique_ptr<ddp::Optimizer> optimizer_;
    ddp::ScheduledRate rate_;
    std::uint64_t batches_in_step_ = 0;  ///< of the current step
    /// With --cuda-graph: recordings of a step's first batch, of its middle ones, and of the last.
    std::array<std::unique_ptr<Compute::Recorded>, 3> recorded_;
    int steps_before_recording_ = kStepsBeforeRecording;
};

}  // namespace train
