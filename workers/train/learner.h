#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/grad_clipper.h"
#include "ddp/grad_scaler.h"
#include "ddp/optimizer.h"
#include "ddp/schedule.h"
#include "mlp.h"
#include "options.h"
#include "station.h"

namespace train {

/// The rate that the optimizer begins with, after a warm-up.
double learning_rate(const Options& options, int world_size);

/// The model of one rank with everything that one step needs. On a GPU a step only queues work.
class Learner {
  public:
    static constexpr std::size_t kLookBatch = 256;
    /// The first step lays the buckets out, and what it lacks is allocated.
    static constexpr int kStepsBeforeRecording = 3;

    /// Collective. All but `widths` is borrowed; `steps` will be done in all. Throws libddp's errors.
    Learner(ddp::ProcessGroup& group, const Station& station, const Options& options,
            const std::vector<std::size_t>& widths, std::uint64_t steps);

    /// Collective: this rank's next batch. True when it ended a step: each --accumulate batches make one.
    /// With
    /// --cuda-graph, whole batches of one size only: after the first few steps the captured one is launched.
    bool learn(const BatchSource& batch);
    /// Whether the next batch begins a step.
    [[nodiscard]] bool is_between_steps() const { return batches_in_step_ == 0; }
    /// Adds a batch of at most kLookBatch, or what is learned from at once, to the score; learns nothing.
    void look_at(const BatchSource& batch);
    /// Of the batches since it was last taken. Waits. Throws ddp::Error where --clip on a GPU met gradients
    /// that are not finite, but under fp16's loss scale.
    Score take_score();

    /// What a checkpoint holds: weights, optimizer, the sampler's place and, of fp16, the loss scale.
    [[nodiscard]] ddp::Training training(ddp::DistributedSampler& sampler);

    [[nodiscard]] std::string_view optimizer_name() const { return optimizer_->name(); }
    [[nodiscard]] std::size_t parameter_count() const { return mlp_.parameter_count(); }
    /// Collective; see DistributedDataParallel.
    std::string verify_equal_parameters() { return model_.verify_equal_parameters(); }

  private:
    std::unique_ptr<ddp::Optimizer> make_optimizer();
    void pass();
    void clip();
    void step();
    void work();
    void launch();
    [[nodiscard]] bool is_last_of_step() const { return batches_in_step_ + 1 == options_.accumulate; }

    ddp::ProcessGroup& group_;
    const Station& station_;
    const Options& options_;
    Mlp mlp_;
    ddp::DistributedDataParallel model_;
    std::unique_ptr<ddp::GradScaler> scaler_;    ///< of fp16
    std::unique_ptr<ddp::GradClipper> clipper_;  ///< on a GPU
    std::unique_ptr<ddp::Optimizer> optimizer_;
    ddp::ScheduledRate rate_;
    std::uint64_t batches_in_step_ = 0;  ///< of the step under way
    /// With --cuda-graph, what is done with a step's first batch, with others, and with the last.
    std::array<std::unique_ptr<Compute::Recorded>, 3> recorded_;
    int steps_before_recording_ = kStepsBeforeRecording;
};

}  // namespace train
