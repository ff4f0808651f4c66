#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ddp/checkpoint.h"
#include "ddp/loader.h"
#include "ddp/model.h"
#include "ddp/optimizer.h"
#include "ddp/run.h"
#include "ddp/sampler.h"
#include "ddp/schedule.h"

namespace ddp {

/// The result of one epoch, the same on all ranks.
struct EpochReport {
    std::uint64_t epoch = 0;  ///< counted from 1
    std::uint64_t epochs = 0;
    std::uint64_t steps = 0;  ///< of the run so far
    /// The mean over all samples of the steps since the epoch began, or since the run resumed in it; NaN
    /// where finish() was given none. Of a process that was lost, its last step may be missing: then this
    /// mean differs a little from that of an undisturbed run, though no weight does.
    double loss = std::numeric_limits<double>::quiet_NaN();
    double samples_per_second = 0;  ///< of all ranks together; padding counts, saves between epochs do not
    double learning_rate = 0;       ///< of the next step
};
/// "epoch 3 of 20: loss 0.1234, 51200 samples/s, learning rate 0.001".
[[nodiscard]] std::string describe(const EpochReport& report);

struct EpochsOptions {
    std::uint64_t epochs = 1;
    std::size_t batch_size = 32;  ///< samples of one step on one rank
    SamplerOptions sampler = {};
    std::string checkpoints = {};  ///< directory to resume from and to save to; "" saves nothing
    /// Steps between two saves; 0 saves at the end of each epoch. The last state is always saved.
    std::uint64_t save_every = 0;
    CheckpointOptions checkpoint = {};
    std::optional<double> clip_norm = std::nullopt;  ///< for host memory: see clip_grad_norm
    /// Total steps of 0 mean all steps of this run. A run that resumes with another number of ranks goes on
    /// at the same part of it.
    std::optional<Schedule> schedule = std::nullopt;
    /// Further state for the checkpoints, equal on all ranks. In run() it changes before Step::finish().
    std::vector<TrainingPart> parts = {};
    LoaderOptions loader = {};  ///< with a Dataset; batch_size is the one above
    /// Called on all ranks at the end of each epoch; without one, rank 0 prints describe(report).
    std::function<void(const EpochReport&)> report = {};
};

/// The loop of a training run. On all ranks alike it resumes from the newest checkpoint, shuffles every
/// epoch, saves, sets the learning rate, and stops after the same step on every rank when the launcher or a
/// signal asks one of them to.
///
///     ddp::Epochs epochs(world, model, *optimizer, data.size(), {.epochs = 20, .checkpoints = "run1"});
///     for (ddp::Epochs::Step& step : epochs) {
///         double loss = 0;
///         for (const std::size_t row : step.rows()) loss += backward(model, data[row], step.share());
///         step.finish(loss);
///     }
///
/// After PeerLostError all ranks start again from the newest checkpoint. With run() and a model that was made
/// without the world, ddprun replaces the lost process alone, and no step is lost:
///
///     ddp::Model model({{"weights", {10, 65}}});
///     ...
///     epochs.run([&](ddp::Epochs::Step& step) { ...; step.finish(loss); });
///
/// The model, the optimizer and the data set are borrowed. For one thread.
class Epochs {
  public:
    /// Rows of the program's own data: `samples` of them. Collective, unless the model has no group: loads
    /// the newest checkpoint. Throws InvalidInput for no samples, a batch size of 0 and the errors of
    /// Schedule, MismatchError, naming the first difference, where ranks have another number of samples,
    /// another optimizer or other options that change the numbers, and the errors of
    /// CheckpointDirectory::claim and load.
    Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, EpochsOptions options);
    /// Batches of a data set, which a Loader reads ahead: Step::batch().
    Epochs(World& world, Model& model, Optimizer& optimizer, const Dataset& dataset, EpochsOptions options);
    ~Epochs();
    Epochs(const Epochs&) = delete;
    Epochs& operator=(const Epochs&) = delete;

    /// One step: a batch of this rank. Gradients are zero when it begins. The program adds to them, or writes
    /// them where they share memory (Shard::Gradients); it may call Model::mark_ready as they become
    /// complete, so that they are averaged meanwhile.
    class Step {
      public:
        /// Indices of this rank's samples; empty with a Dataset.
        [[nodiscard]] std::span<const std::size_t> rows() const { return rows_; }
        /// With a Dataset: this rank's samples, valid until the step's end. Throws Error without one.
        [[nodiscard]] const Batch& batch() const;
        /// Samples of this rank: batch_size, or fewer at the end of an epoch; equal on all ranks.
        [[nodiscard]] std::size_t size() const { return size_; }
        /// 1 / size(): the weight of one sample in this rank's mean.
        [[nodiscard]] float share() const { return 1 / static_cast<float>(size_); }
        [[nodiscard]] std::uint64_t epoch() const { return epoch_; }  ///< counted from 0
        [[nodiscard]] std::uint64_t steps_done() const { return steps_done_; }

        /// Collective, once in each step: averages the gradients (of those not marked ready all now), unless
        /// the step has done so (Model::finish, a backward pass of LibTorch), clips them, steps the optimizer
        /// and the learning rate. `loss` is the mean over this rank's samples, for
        /// the report. Throws Error for a second call, and the errors of Model and Optimizer.
        void finish(double loss = std::numeric_limits<double>::quiet_NaN());

      private:
        friend class Epochs;
        explicit Step(Epochs& epochs) : epochs_(epochs) {}
        Epochs& epochs_;
        std::span<const std::size_t> rows_;
        const Batch* batch_ = nullptr;
        std::size_t size_ = 0;
        std::uint64_t epoch_ = 0, steps_done_ = 0;
        bool finished_ = true;
    };

    class Iterator {
      public:
        using difference_type = std::ptrdiff_t;
        using value_type = Step;
        explicit Iterator(Epochs& epochs) : epochs_(&epochs) {}
        Step& operator*() const { return epochs_->step_; }
        Iterator& operator++() {
            epochs_->advance();
            return *this;
        }
        void operator++(int) { ++*this; }
        bool operator==(std::default_sentinel_t /*end*/) const { return epochs_->is_over_; }

      private:
        Epochs* epochs_;
    };
    /// Goes on from where the run is; each step of the loop is collective. Moving on throws Error when the
    /// step was not finished, and the errors of a save.
    Iterator begin();
    static std::default_sentinel_t end() { return {}; }

    /// Calls `body` for each step, with recovery in place (recovery.h has the contract: a step in which a
    /// rank was lost is repeated by all). The body takes gradients and world.group() anew in each step,
    /// because they are others after a recovery; weights stay where they are. Loads the newest checkpoint
    /// first. Throws InvalidInput for a model that has a group, a world whose group was used, and a sharded
    /// model; the errors of the constructor and of Recovery::run; and Error for a second run() in a process.
    void run(const std::function<void(Step&)>& body);

    /// True when all ranks stopped early, and saved where there are checkpoints. Then run() of ddp/run.h
    /// returns kStoppedEarly; another main function should.
    [[nodiscard]] bool stopped() const;
    /// Of the last epoch that has ended in this process; its numbers are 0 and NaN before.
    [[nodiscard]] const EpochReport& last_report() const;
    [[nodiscard]] std::uint64_t steps_done() const { return step_.steps_done_; }

  private:
    class InGeneration;
    struct Parts;
    Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, const Dataset* dataset,
           EpochsOptions options);
    void advance();
    void finish(Step& step, double loss);

    Step step_{*this};
    bool is_over_ = false;
    std::unique_ptr<Parts> parts_;
};

}  // namespace ddp
