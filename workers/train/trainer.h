#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agreement.h"
#include "ddp/checkpoint.h"
#include "feed.h"
#include "learner.h"
#include "options.h"
#include "report.h"
#include "samples/data.h"
#include "samples/scaling.h"
#include "station.h"

namespace train {

/// One training run of one rank; all ranks do the same together. Throws libddp's errors.
class Trainer {
  public:
    /// Lines for the user; called on rank 0 only.
    using Print = std::function<void(const std::string&)>;

    /// Asked now and then: shall we save and stop?
    using StopWanted = std::function<bool()>;

    /// Collective. Group, station and options are borrowed. The group's buffers are on the station's device.
    Trainer(ddp::ProcessGroup& group, const Station& station, const Options& options, Samples samples,
            Print print, StopWanted stop_wanted = {});

    /// Collective. Continues from the newest checkpoint of the directory, if there is one; with `only_run`,
    /// only from one that this run (of that id) wrote. Throws InvalidInput, the same on all ranks, when the
    /// checkpoint is damaged or belongs to another model or optimizer.
    void resume(const std::optional<std::string>& only_run);
    /// Collective. `run_id` is noted in the checkpoints. Saves and returns early, with `stopped`, when a rank
    /// is asked to stop.
    Summary run(const std::string& run_id);

  private:
    /// nullopt: stopped on the way.
    std::optional<EpochResult> train_epoch();
    void stop_early(Summary& summary, const std::string& run_id);
    /// The order of the next epoch, before it is needed.
    void look_ahead();
    std::vector<std::size_t> take_order();
    double held_out_accuracy();
    using Sums = std::array<double, 5>;
    Sums over_all_ranks(Sums mine);
    void announce() const;
    [[nodiscard]] std::string describe_compute() const;
    void say(const std::string& line) const;
    /// Epochs done.
    [[nodiscard]] std::uint64_t epoch() const { return sampler_.epoch(); }
    std::string find_checkpoint(const std::optional<std::string>& only_run) const;
    /// What a checkpoint holds.
    [[nodiscard]] ddp::Training training();
    std::string save(const std::string& run_id);

    ddp::ProcessGroup& group_;
    const Station& station_;
    const Options& options_;
    Samples samples_;
    Print print_;
    Split split_;
    Subset training_, held_out_;
    std::optional<Scaling> scaling_;  ///< of samples that need one; applied when the training begins
    ddp::DistributedSampler sampler_;
    std::unique_ptr<Feed> feed_;
    Learner learner_;
    ddp::CheckpointDirectory checkpoints_;
    StopVote stop_;
    struct OrderAhead {
        std::uint64_t epoch;
        std::vector<std::size_t> indices;
    };
    std::optional<OrderAhead> order_ahead_;
    std::uint64_t steps_ = 0;  ///< steps done, those included that fp16 left out
};

/// What keeps these options and samples from being trained on by `world_size` ranks.
std::optional<Trouble> check_fit(const Options& options, const Samples& samples, int world_size);
/// What all ranks must have read and been told alike, or they train on side by side and what comes of it is
/// nobody's model. What rank 0 alone acts on (files it writes) and what changes no bit (where samples are
/// kept) is not in it.
Common common_of(const Options& options, const Samples& samples);
/// Where checkpoints go when --checkpoint-dir does not say.
std::string checkpoint_dir_for(const Options& options, const Samples& samples);

}  // namespace train
