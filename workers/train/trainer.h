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
#include "ddp/recovery.h"
#include "ddp/stop_vote.h"
#include "learner.h"
#include "options.h"
#include "report.h"
#include "samples/data.h"
#include "samples/scaling.h"

namespace train {

/// One training run of one rank; all ranks make the same calls. Throws libddp's errors.
///
/// A run that can be recovered in place is made without a group, keeps its state in a Recovery, and is
/// attached to the group of each generation; run() then goes on where the kept state is.
class Trainer {
  public:
    /// Prints a line for the user; called on rank 0 only.
    using Print = std::function<void(const std::string&)>;

    /// Collective if there is a group. Group, device and options are borrowed. The group's buffers are on
    /// that device. Without a group see Learner.
    Trainer(const World& world, const ComputeDevice& device, const Options& options, Samples samples,
            Print print, StopRequest stop_request = {});

    /// Names the state that another process needs to continue, and commits each unit there. Borrowed.
    void keep_in(ddp::Recovery& recovery);
    /// Collective: before resume() and run() in each generation's group. `is_new`: the state is that of a
    /// new run.
    void attach(ddp::ProcessGroup& group, bool is_new);

    /// Collective: before resume(), in a new run. Throws FileError when another run saves into the directory.
    void claim_checkpoints() { checkpoints_.claim(*group_); }
    /// Collective. Continues from the newest checkpoint of the directory, if any; with `only_run`, only from
    /// one that the run of this id wrote. Throws InvalidInput, the same on all ranks, when the checkpoint is
    /// damaged or belongs to another model or optimizer.
    void resume(const std::optional<std::string>& only_run);
    /// Collective. The checkpoints contain `run_id`. Saves and returns early, with `stopped`, when a rank is
    /// asked to stop.
    Summary run(const std::string& run_id);

  private:
    /// The part of an epoch that one group trains, for the figures of its speed.
    struct Pass {
        ddprun::TimePoint begin;
        double communicating, waiting;  ///< seconds, until the pass began
        std::size_t trained = 0;        ///< samples of this rank
    };
    Pass begin_pass();
    bool must_stop();
    /// Trains to the end of the epoch; false after an early stop.
    bool train_epoch(Pass& pass);
    void end_epoch(const Pass& pass);
    [[nodiscard]] EpochResult result_of(const Pass& pass);
    [[nodiscard]] bool is_checkpoint_due() const;
    void save_checkpoint(const std::string& run_id);
    void verify();
    void begin_run();
    void stop_early(const std::string& run_id);
    void commit(const std::function<void()>& change);
    [[nodiscard]] bool recovers() const { return recovery_ != nullptr && recovery_->refusal().empty(); }
    /// Computes the order of the next epoch in advance.
    void prepare_next_order();
    std::vector<std::size_t> take_order();
    void note_step(const Score& score, double learning_rate);
    double held_out_accuracy();
    using Sums = std::array<double, 6>;
    Sums sum_over_ranks(Sums mine);
    void announce() const;
    [[nodiscard]] std::string describe_compute() const;
    void print(const std::string& line) const;
    [[nodiscard]] std::uint64_t epoch() const { return sampler_.epoch(); }
    std::string find_checkpoint(const std::optional<std::string>& only_run) const;
    [[nodiscard]] ddp::Training training();
    std::string save(const std::string& run_id);

    World world_;
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
    const StopRequest stop_request_;
    ddp::Recovery* recovery_ = nullptr;  ///< null where the run cannot be recovered in place

    // Of the present group.
    ddp::BorrowedGroup group_;
    std::optional<ddp::StopVote> vote_;
    bool is_new_ = true;
    struct OrderAhead {
        std::uint64_t epoch;
        std::vector<std::size_t> indices;
    };
    std::optional<OrderAhead> order_ahead_;
    std::optional<Curves> curves_;  ///< on rank 0, with --tensorboard

    // Kept, beside the learner's state and the sampler.
    std::uint64_t steps_ = 0;        ///< steps done, including those that fp16 skipped
    std::uint64_t saved_epoch_ = 0;  ///< of the last checkpoint
    std::int64_t began_ns_ = 0;      ///< when the run began, by the system clock, which hosts share
    Score score_;                    ///< of this rank in this epoch; on a GPU loss and hits only at its end
    Summary summary_;
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
