#include "ddp/epochs.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "ddp/stop_vote.h"
#include "env/print.h"

namespace ddp {
namespace {

using std::chrono::steady_clock;

/// The rows of one rank in steps of at most `batch` each.
std::uint64_t steps_per_epoch(const DistributedSampler& sampler, std::size_t batch) {
    DistributedSampler whole = sampler;
    whole.set_epoch(0);
    return (whole.size() + batch - 1) / batch;
}

Schedule completed(Schedule schedule, std::uint64_t steps) {
    if (schedule.total_steps == 0) schedule.total_steps = steps;
    return schedule;
}

EpochsOptions checked(EpochsOptions options, std::size_t samples) {
    if (options.batch_size == 0) throw InvalidInput("epochs: batch_size is 0");
    if (samples == 0) throw InvalidInput("epochs: there are no samples");
    options.loader.batch_size = options.batch_size;
    return options;
}

void verify_alike(ProcessGroup& group, const EpochsOptions& options, std::size_t samples) {
    verify_equal(group, {{"number of samples", std::to_string(samples)},
                         {"epochs", std::to_string(options.epochs)},
                         {"batch_size", std::to_string(options.batch_size)},
                         {"sampler seed", std::to_string(options.sampler.seed)},
                         {"save_every", std::to_string(options.save_every)},
                         {"checkpoints", options.checkpoints.empty() ? "none" : "some"}});
}

/// What one rank has done in an epoch.
struct Progress {
    double loss_sum = 0;
    double samples = 0;
};

Progress sum_over_ranks(ProcessGroup& group, const Progress& mine) {
    Progress sum;
    for (const Progress& one : group.all_gather_values(mine)) {
        sum.loss_sum += one.loss_sum;
        sum.samples += one.samples;
    }
    return sum;
}

}  // namespace

std::string describe(const EpochReport& report) {
    const std::string loss = std::isnan(report.loss) ? "" : fmt::format("loss {:.4g}, ", report.loss);
    return fmt::format("epoch {} of {}: {}{:.0f} samples/s, learning rate {:.4g}", report.epoch,
                       report.epochs, loss, report.samples_per_second, report.learning_rate);
}

struct Epochs::Parts {
    Parts(World& the_world, Model& the_model, Optimizer& the_optimizer, std::size_t samples,
          const Dataset* the_dataset, EpochsOptions the_options)
        : world(the_world),
          group(the_world.group()),
          model(the_model),
          optimizer(the_optimizer),
          dataset(the_dataset),
          options(std::move(the_options)),
          sampler(samples, group.size(), group.rank(), options.sampler),
          vote(group) {
        if (options.schedule)
            rate.emplace(optimizer, completed(*options.schedule,
                                              options.epochs * steps_per_epoch(sampler, options.batch_size)));
        if (!options.checkpoints.empty()) checkpoints.emplace(options.checkpoints, options.checkpoint);
    }

    [[nodiscard]] Training training() {
        Training all{model, optimizer, sampler, options.parts};
        if (rate) all.parts.push_back({"schedule", &*rate});
        return all;
    }
    void print(const std::string& line) const {
        if (group.rank() == 0) ddprun::print("{}\n", line);
    }

    /// Returns the steps done so far.
    std::uint64_t resume() {
        if (!checkpoints) return 0;
        const std::optional<TrainingState> found = checkpoints->load(group, training());
        if (!found) return 0;
        saved_step = found->step;
        if (rate) rate->set_steps(steps_of_this_world());
        print(sampler.epoch() >= options.epochs
                  ? fmt::format("{} holds the whole run: {} epochs, {} were asked for", options.checkpoints,
                                sampler.epoch(), options.epochs)
                  : fmt::format("resuming from {} after {} steps, in epoch {} of {}", options.checkpoints,
                                found->step, sampler.epoch() + 1, options.epochs));
        return found->step;
    }
    /// The steps to the sampler's position, had this world made them all: the schedule is one of the samples.
    [[nodiscard]] std::uint64_t steps_of_this_world() const {
        const std::uint64_t in_step = options.batch_size * static_cast<std::uint64_t>(group.size());
        return sampler.epoch() * steps_per_epoch(sampler, options.batch_size) +
               sampler.state().consumed / in_step;
    }
    void save(std::uint64_t steps) {
        if (!checkpoints || saved_step == steps) return;
        checkpoints->save(group, training());
        saved_step = steps;
    }
    bool must_stop(std::uint64_t steps) {
        Lifeline& lifeline = world.lifeline();
        return lifeline.should_stop(steps) ||
               vote.passed(model, [&lifeline] { return lifeline.preemption_requested(); });
    }

    void begin_epoch() {
        if (dataset != nullptr) loader.emplace(*dataset, sampler, options.loader);
        else order = sampler.indices();
        next_row = 0;
        progress = {};
        epoch_began = steady_clock::now();
        is_in_epoch = true;
    }
    /// False at the end of the epoch.
    bool take(Step& step) {
        if (dataset != nullptr) {
            step.batch_ = loader->next();
            step.size_ = step.batch_ == nullptr ? 0 : step.batch_->size();
        } else {
            step.size_ = std::min(options.batch_size, order.size() - next_row);
            step.rows_ = std::span(order).subspan(next_row, step.size_);
            next_row += step.size_;
        }
        return step.size_ > 0;
    }
    void end_epoch(std::uint64_t steps) {
        const Progress all = sum_over_ranks(group, progress);
        const double seconds = std::chrono::duration<double>(steady_clock::now() - epoch_began).count();
        report = {.epoch = sampler.epoch() + 1,
                  .epochs = options.epochs,
                  .steps = steps,
                  .loss = all.loss_sum / all.samples,
                  .samples_per_second = all.samples / seconds,
                  .learning_rate = optimizer.learning_rate()};
        if (options.report) options.report(report);
        else print(describe(report));
        loader.reset();
        sampler.next_epoch();
        is_in_epoch = false;
        if (options.save_every == 0) save(steps);
    }
    void print_stop(std::uint64_t steps) const {
        const std::string& reason = world.lifeline().reason();
        print(fmt::format("stopped after {} steps{}{}; {}", steps, reason.empty() ? "" : ": ", reason,
                          checkpoints ? "the state is in " + options.checkpoints : "nothing was saved"));
    }
    void end_run(std::uint64_t steps) {
        save(steps);
        if (checkpoints) checkpoints->finish(group);
    }

    World& world;
    ProcessGroup& group;
    Model& model;
    Optimizer& optimizer;
    const Dataset* const dataset;  ///< null where the program has rows of its own
    const EpochsOptions options;
    DistributedSampler sampler;
    std::optional<ScheduledRate> rate;
    std::optional<CheckpointDirectory> checkpoints;
    StopVote vote;
    std::optional<Loader> loader;    ///< of the epoch, with a Dataset
    std::vector<std::size_t> order;  ///< of the epoch, without one
    std::size_t next_row = 0;
    bool is_in_epoch = false;
    bool stopped = false;
    std::optional<std::uint64_t> saved_step;
    Progress progress;
    EpochReport report;
    steady_clock::time_point epoch_began;
};

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, const Dataset* dataset,
               EpochsOptions options)
    : parts_(std::make_unique<Parts>(world, model, optimizer, samples, dataset,
                                     checked(std::move(options), samples))) {
    verify_alike(parts_->group, parts_->options, samples);
    step_.steps_done_ = parts_->resume();
}

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, EpochsOptions options)
    : Epochs(world, model, optimizer, samples, nullptr, std::move(options)) {}

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, const Dataset& dataset,
               EpochsOptions options)
    : Epochs(world, model, optimizer, dataset.size(), &dataset, std::move(options)) {}

Epochs::~Epochs() = default;

bool Epochs::stopped() const { return parts_->stopped; }

const EpochReport& Epochs::last_report() const { return parts_->report; }

Epochs::Iterator Epochs::begin() {
    if (!is_over_) advance();
    return Iterator(*this);
}

void Epochs::advance() {
    Parts& run = *parts_;
    if (!step_.finished_)
        throw Error(fmt::format("rank {}: the loop went on after step {} without Step::finish()",
                                run.group.rank(), step_.steps_done_));
    if (run.options.save_every > 0 && step_.steps_done_ % run.options.save_every == 0 &&
        step_.steps_done_ > 0)
        run.save(step_.steps_done_);
    while (run.sampler.epoch() < run.options.epochs) {
        if (run.must_stop(step_.steps_done_)) {
            run.stopped = true;
            break;
        }
        if (!run.is_in_epoch) run.begin_epoch();
        if (run.take(step_)) {
            step_.epoch_ = run.sampler.epoch();
            step_.finished_ = false;
            run.model.begin_forward();
            run.model.zero_gradients();
            return;
        }
        run.end_epoch(step_.steps_done_);
    }
    run.end_run(step_.steps_done_);
    if (run.stopped) run.print_stop(step_.steps_done_);
    is_over_ = true;
}

const Batch& Epochs::Step::batch() const {
    if (batch_ == nullptr) throw Error("Step::batch: these Epochs were made without a Dataset; see rows()");
    return *batch_;
}

void Epochs::Step::finish(double loss) { epochs_.finish(*this, loss); }

void Epochs::finish(Step& step, double loss) {
    Parts& run = *parts_;
    if (step.finished_)
        throw Error(fmt::format("rank {}: Step::finish() was called twice after step {}", run.group.rank(),
                                step.steps_done_));
    run.model.mark_all_ready();
    run.model.finish();
    if (run.options.clip_norm) clip_grad_norm(run.model, *run.options.clip_norm);
    run.optimizer.step();
    if (run.rate) run.rate->step();
    if (run.dataset == nullptr) run.sampler.advance(step.size_);
    run.progress.loss_sum += loss * static_cast<double>(step.size_);
    run.progress.samples += static_cast<double>(step.size_);
    ++step.steps_done_;
    step.finished_ = true;
    const auto ranks = static_cast<std::uint64_t>(run.group.size());
    run.group.report_progress(step.steps_done_, step.steps_done_ * run.options.batch_size * ranks);
}

}  // namespace ddp
