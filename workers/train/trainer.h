#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agreement.h"
#include "batch_feed.h"
#include "compute_device.h"
#include "curves.h"
#include "ddp/checkpoint.h"
#include "learner.h"
#include "options.h"
#include "report.h"
#include "samples/data.h"
#include "samples/scaling.h"

namespace train {

/// One training run of one rank; all ranks make the same calls. Throws libddp's errors.
class Trainer {
  public:
    /// Prints a line for the user; called on rank 0 only.
    using Print = std::function<void(const std::string&)>;

    /// Collective. Group, device and options are borrowed. The group's buffers are on that device.
    Trainer(ddp::ProcessGroup& group, const ComputeDevice& device, const Options& options, Samples samples,
            Print print, StopRequest stop_request = {});

    /// Collective. Continues from the newest checkpoint of the directory, if any; with `only_run`, only from
    /// one that the run of this id wrote. Throws InvalidInput, the same on all ranks, when the checkpoint is
    /// damaged or belongs to another model or optimizer.
    void resume(const std::optional<std::string>& only_run);
    /// Collective. The checkpoints contain `run_id`. Saves and returns early, with `stopped`, when a rank is
    /// asked to stop.
    Summary run(const std::string& run_id);

  private:
    /// nullopt after an early stop.
    std::optional<EpochResult> train_epoch();
    void stop_early(Summary& summary, const std::string& run_id);
    /// Computes the order of the next epoch in advance.
    void prepare_next_order();
    std::vector<std::size_t> take_order();
    /// The score of the step that has just ended, for the curves.
    Score note_step(double learning_rate);
    double held_out_accuracy();
    using Sums = std::array<double, 5>;
    Sums sum_over_ranks(Sums mine);
    void announce() const;
    [[nodiscard]] std::string describe_compute() const;
    void print(const std::string& line) const;
    [[nodiscard]] std::uint64_t epoch() const { return sampler_.epoch(); }
    std::string find_checkpoint(const std::optional<std::string>& only_run) const;
    [[nodiscard]] ddp::Training training();
    std::string save(const std::string& run_id);

    ddp::ProcessGroup& group_;
    const ComputeDevice& device_;
    const Options& options_;
    Samples samples_;
    Print print_;
    Split split_;
    Subset training_, held_out_;
    std::optional<Scaling> scaling_;  ///< of samples that need it; applied when the training begins
    ddp::DistributedSampler sampler_;
    std::unique_ptr<BatchFeed> feed_;
    Learner learner_;
    ddp::CheckpointDirectory checkpoints_;
    StopVote stop_;
    struct OrderAhead {
        std::uint64_t epoch;
        std::vector<std::size_t> indices;
    };
    std::optional<OrderAhead> order_ahead_;
    std::uint64_t steps_ = 0;       ///< steps done, including those that fp16 skipped
    std::optional<Curves> curves_;  ///< on rank 0, with --tensorboard
};

/// The reason why `world_size` ranks cannot train on these options and samples.
std::optional<StartupError> check_fit(const Options& options, const Samples& samples, int world_size);
/// The settings that all ranks must share: ranks that differ would train without an error, and their result
/// would match none of the settings. Settings that only rank 0 uses (files it writes) or that change no bit
/// (where samples are kept) are not included.
CommonSettings common_settings(const Options& options, const Samples& samples);
/// The directory of checkpoints, also without --checkpoint-dir.
std::string checkpoint_dir_for(const Options& options, const Samples& samples);

}  // namespace train
