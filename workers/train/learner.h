#pragma once

#include <array>
#include <functional>
#include <memory>
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

/// The place of this process in the world, whose group is null until attach().
struct World {
    World(int of_rank, int ranks) : rank(of_rank), size(ranks) {}
    World(ddp::ProcessGroup& all) : rank(all.rank()), size(all.size()), group(&all) {}
    int rank, size;
    ddp::ProcessGroup* group = nullptr;
};

/// The model of one rank and all parts of a training step. On a GPU a step only queues work.
///
///     learner.forward(batch);
///     if (learner.backward()) learner.step();
class Learner {
  public:
    static constexpr std::size_t kEvaluationBatch = 256;
    /// The first steps run uncaptured: scratch memory is allocated.
    static constexpr int kStepsBeforeRecording = 3;

    /// Collective if there is a group. Everything except `widths` is borrowed; `steps` is the length of the
    /// run. Without a group --shard is none. Throws libddp's errors.
    Learner(const World& world, const ComputeDevice& device, const Options& options,
            const std::vector<std::size_t>& widths, std::uint64_t steps);
    /// Collective: the first group of a learner that has none, or the next one, of a run of `steps` steps.
    /// See ddp::Model::attach().
    void attach(ddp::ProcessGroup& group, bool broadcast, std::uint64_t steps);
    /// The next step has the learning rate that follows so many steps.
    void place_in_schedule(std::uint64_t steps) { rate_.set_steps(steps); }

    /// Begins this rank's next batch. With --cuda-graph all batches must have the same size: after the first
    /// steps the captured one is replayed, all of it in backward().
    void forward(const BatchSource& batch);
    /// Collective. True when gradients are averaged, and step() has to follow: a step has --accumulate
    /// batches.
    bool backward();
    /// Changes the weights. Collective where they are sharded.
    void step();
    /// True when the next batch begins a step.
    [[nodiscard]] bool is_between_steps() const { return batches_in_step_ == 0; }
    /// True when the next batch, or the one between forward() and backward(), ends a step.
    [[nodiscard]] bool is_last_of_step() const { return batches_in_step_ + 1 == options_.accumulate; }
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
    [[nodiscard]] ddp::Model& model() { return model_; }

  private:
    std::unique_ptr<ddp::Optimizer> make_optimizer();
    void clip();
    void reduce();
    void update();
    void replay();
    [[nodiscard]] bool replays() const { return options_.cuda_graph && steps_before_recording_ == 0; }

    const World world_;
    ddp::BorrowedGroup group_;
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
    std::array<std::function<void()>, 3> recorded_;
    int steps_before_recording_ = kStepsBeforeRecording;
};

}  // namespace train
