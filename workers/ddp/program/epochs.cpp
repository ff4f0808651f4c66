#include "ddp/epochs.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "ddp/program/epoch_sums.h"
#include "ddp/recovery.h"
#include "ddp/stop_vote.h"
#include "env/print.h"

namespace ddp {
namespace {

using std::chrono::steady_clock;

EpochsOptions checked(EpochsOptions options, std::size_t samples) {
    if (options.batch_size == 0) throw InvalidInput("epochs: batch_size is 0");
    if (samples == 0) throw InvalidInput("epochs: there are no samples");
    options.loader.batch_size = options.batch_size;
    return options;
}

std::string text_of(const Schedule& s) {
    return fmt::format("shape {}, warm-up {} from {}, total {}, final {} and {}, every {} by {}",
                       static_cast<int>(s.shape), s.warmup_steps, s.warmup_from, s.total_steps, s.final_rate,
                       s.final_part, s.step_every, s.factor);
}

/// "0.1" or "0.1, 0.01": those of all groups.
std::string rates_of(const Optimizer& optimizer, double (Optimizer::*rate)(std::size_t) const) {
    std::vector<double> rates;
    for (std::size_t group = 0; group < optimizer.groups(); ++group)
        rates.push_back((optimizer.*rate)(group));
    return fmt::format("{}", fmt::join(rates, ", "));
}

std::string names_of(std::span<const TrainingPart> parts) {
    std::string names;
    for (const TrainingPart& part : parts)
        names += fmt::format("{}{} ", part.state == nullptr ? "without " : "", part.name);
    return names;
}

/// Everything that changes the numbers, or the collectives.
void verify_alike(ProcessGroup& group, const EpochsOptions& options, const Optimizer& optimizer,
                  std::size_t samples) {
    verify_equal(group, {{"number of samples", std::to_string(samples)},
                         {"epochs", std::to_string(options.epochs)},
                         {"batch_size", std::to_string(options.batch_size)},
                         {"sampler seed", std::to_string(options.sampler.seed)},
                         {"sampler shuffle", fmt::format("{}", options.sampler.shuffle)},
                         {"sampler drop_last", fmt::format("{}", options.sampler.drop_last)},
                         {"loader drop_last", fmt::format("{}", options.loader.drop_last)},
                         {"clip_norm", options.clip_norm ? fmt::format("{}", *options.clip_norm) : "none"},
                         {"schedule", options.schedule ? text_of(*options.schedule) : "none"},
                         {"optimizer", fmt::format("{} with {}", optimizer.name(), optimizer.settings())},
                         {"initial learning rate", rates_of(optimizer, &Optimizer::initial_learning_rate)},
                         {"learning rate", rates_of(optimizer, &Optimizer::learning_rate)},
                         {"save_every", std::to_string(options.save_every)},
                         {"checkpoints", options.checkpoints.empty() ? "none" : "some"},
                         {"checkpoint asynchronous", fmt::format("{}", options.checkpoint.asynchronous)},
                         {"parts", names_of(options.parts)}});
}

}  // namespace

std::string describe(const EpochReport& report) {
    const std::string loss = std::isnan(report.loss) ? "" : fmt::format("loss {:.4g}, ", report.loss);
    return fmt::format("epoch {} of {}: {}{:.0f} samples/s, learning rate {:.4g}", report.epoch,
                       report.epochs, loss, report.samples_per_second, report.learning_rate);
}

struct Epochs::Parts {
    static constexpr std::uint64_t kNever = UINT64_MAX;

    Parts(World& the_world, Model& the_model, Optimizer& the_optimizer, std::size_t the_samples,
          const Dataset* the_dataset, EpochsOptions the_options)
        : world(the_world),
          model(the_model),
          optimizer(the_optimizer),
          samples(the_samples),
          dataset(the_dataset),
          options(std::move(the_options)),
          sampler(samples, world.size(), world.rank(), options.sampler) {
        if (options.schedule) rate.emplace(optimizer, schedule());
        if (!options.checkpoints.empty()) checkpoints.emplace(options.checkpoints, options.checkpoint);
    }

    [[nodiscard]] Schedule schedule() const {
        Schedule whole = *options.schedule;
        if (whole.total_steps == 0)
            whole.total_steps = options.epochs * sampler.batches_per_epoch(options.batch_size, drops_rest());
        return whole;
    }
    [[nodiscard]] Training training() {
        Training all{model, optimizer, sampler, options.parts};
        if (rate) all.parts.push_back({"schedule", &*rate});
        return all;
    }
    void print(const std::string& line) const {
        if (group->rank() == 0) ddprun::print("{}\n", line);
    }

    void keep_in(Recovery& kept, std::uint64_t& steps) {
        kept.keep("model", model);
        kept.keep("optimizer", optimizer);
        kept.keep("sampler", sampler);
        if (rate) kept.keep("schedule", *rate);
        for (const TrainingPart& part : options.parts) {
            if (part.state != nullptr) kept.keep(part.name, *part.state, Recovery::Kind::Moving);
        }
        kept.keep_value("epochs.steps", steps);
        kept.keep_value("epochs.units", units);
        kept.keep("epochs.report", {{"report", {sizeof report}, {&report, sizeof report, DType::U8, {}}}});
        sums.keep_in(kept);
    }
    /// Begins with the first group, or goes on with the next one. A new state is loaded from the newest
    /// checkpoint, if there is one, which sets `steps`.
    void attach(ProcessGroup& next, bool is_new, std::uint64_t& steps) {
        group = &next;
        vote.emplace(next);
        loader.reset();
        is_in_epoch = false;
        world.stopped_early_ = false;
        saved_step = kNever;  // a lost rank may have been writing
        if (is_new) {
            verify_alike(next, options, optimizer, samples);
            resume(steps);
        }
        if (!rate) return;
        rate->replace(schedule());
        // The schedule is one of the samples.
        rate->set_steps(sampler.batches_done(options.batch_size, drops_rest()));
    }
    void resume(std::uint64_t& steps) {
        if (!checkpoints) return;
        checkpoints->claim(*group);
        const std::optional<TrainingState> found = checkpoints->load(*group, training());
        if (!found) return;
        steps = saved_step = found->step;
        print(sampler.epoch() >= options.epochs
                  ? fmt::format("{} holds the whole run: {} epochs, {} were asked for", options.checkpoints,
                                sampler.epoch(), options.epochs)
                  : fmt::format("resuming from {} after {} steps, in epoch {} of {}", options.checkpoints,
                                found->step, sampler.epoch() + 1, options.epochs));
    }
    /// Whether an epoch ends before an incomplete last batch.
    [[nodiscard]] bool drops_rest() const { return dataset != nullptr && options.loader.drop_last; }

    /// A unit of recovery: a step, the end of an epoch, a save.
    void begin_unit() {
        sums.begin_unit(sampler.epoch(), units);
        if (recovery != nullptr) recovery->prepare();
    }
    void commit(const std::function<void()>& change) {
        const auto counted = [&] {
            change();
            ++units;
        };
        if (recovery != nullptr) recovery->commit(counted);
        else counted();
    }

    void save(std::uint64_t steps) {
        if (!checkpoints || saved_step == steps) return;
        begin_unit();
        checkpoints->save(*group, training());
        commit([] {});
        saved_step = steps;
    }
    /// Between two steps.
    [[nodiscard]] bool is_save_due(std::uint64_t steps) const {
        if (steps == 0) return false;
        return options.save_every > 0 ? steps % options.save_every == 0 : sampler.state().consumed == 0;
    }
    bool must_stop(std::uint64_t steps) {
        Lifeline& lifeline = world.lifeline();
        return lifeline.should_stop(steps) ||
               vote->passed(model, [&lifeline] { return lifeline.preemption_requested(); });
    }

    void begin_epoch() {
        if (dataset != nullptr) loader.emplace(*dataset, sampler, options.loader);
        else order = sampler.indices();
        next_row = 0;
        timed_samples = 0;
        timed_since = steady_clock::now();
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
        begin_unit();
        const double seconds = std::chrono::duration<double>(steady_clock::now() - timed_since).count();
        const Sums all = sum_over_ranks(
            *group,
            {.loss = sums.loss(), .samples = sums.samples(), .samples_per_second = timed_samples / seconds});
        const EpochReport ended{.epoch = sampler.epoch() + 1,
                                .epochs = options.epochs,
                                .steps = steps,
                                .loss = all.loss / all.samples,
                                .samples_per_second = all.samples_per_second,
                                .learning_rate = optimizer.learning_rate()};
        if (options.report) options.report(ended);
        else print(describe(ended));
        loader.reset();
        commit([&] {
            report = ended;
            sampler.next_epoch();
        });
        is_in_epoch = false;
    }
    void print_stop(std::uint64_t steps) const {
        const std::string& reason = world.lifeline().reason();
        print(fmt::format("stopped after {} steps{}{}; {}", steps, reason.empty() ? "" : ": ", reason,
                          checkpoints ? "the state is in " + options.checkpoints : "nothing was saved"));
    }
    void end_run(std::uint64_t steps) {
        save(steps);
        if (checkpoints) checkpoints->finish(*group);
    }

    World& world;
    ProcessGroup* group = nullptr;  ///< null before the first one
    Model& model;
    Optimizer& optimizer;
    const std::size_t samples;
    const Dataset* const dataset;  ///< null where the program has rows of its own
    const EpochsOptions options;
    DistributedSampler sampler;
    std::optional<ScheduledRate> rate;
    std::optional<CheckpointDirectory> checkpoints;
    Recovery* recovery = nullptr;  ///< null outside of a generation
    std::optional<StopVote> vote;
    std::optional<Loader> loader;    ///< of the epoch, with a Dataset
    std::vector<std::size_t> order;  ///< of the epoch, without one
    std::size_t next_row = 0;
    bool is_in_epoch = false;
    std::uint64_t units = 0;           ///< that were committed
    std::uint64_t reduced_before = 0;  ///< the model's reduced steps when the step began
    std::uint64_t saved_step = kNever;
    EpochReport report;
    EpochSums sums;
    steady_clock::time_point timed_since;
    double timed_samples = 0;  ///< of this process since then
};

/// World, group and recovery are those of a generation while this object lives.
class Epochs::InGeneration {
  public:
    InGeneration(Parts& run, Recovery& recovery, ProcessGroup& group) : run_(run) {
        run_.recovery = &recovery;
        run_.world.context_ = recovery.context();
        run_.world.group_ = &group;
    }
    ~InGeneration() {
        run_.recovery = nullptr;
        run_.world.group_ = run_.group = nullptr;
    }
    InGeneration(const InGeneration&) = delete;
    InGeneration& operator=(const InGeneration&) = delete;

  private:
    Parts& run_;
};

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, const Dataset* dataset,
               EpochsOptions options)
    : parts_(std::make_unique<Parts>(world, model, optimizer, samples, dataset,
                                     checked(std::move(options), samples))) {
    if (model.has_group()) parts_->attach(world.group(), true, step_.steps_done_);
}

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, std::size_t samples, EpochsOptions options)
    : Epochs(world, model, optimizer, samples, nullptr, std::move(options)) {}

Epochs::Epochs(World& world, Model& model, Optimizer& optimizer, const Dataset& dataset,
               EpochsOptions options)
    : Epochs(world, model, optimizer, dataset.size(), &dataset, std::move(options)) {}

Epochs::~Epochs() = default;

bool Epochs::stopped() const { return parts_->world.stopped_early_; }

const EpochReport& Epochs::last_report() const { return parts_->report; }

Epochs::Iterator Epochs::begin() {
    if (parts_->group == nullptr && !is_over_)
        throw InvalidInput("epochs: the model has no group: make it with the world, or call run()");
    if (!is_over_) advance();
    return Iterator(*this);
}

void Epochs::run(const std::function<void(Step&)>& body) {
    Parts& run = *parts_;
    World& world = run.world;
    if (run.model.has_group() || world.group_ != nullptr)
        throw InvalidInput(
            "epochs: run() makes the groups: make the model without the world (ddp::Model model({...})), and "
            "call world.group() in the steps only");
    if (run.model.shard() != Shard::None)
        throw InvalidInput(
            "epochs: run() cannot give a new process the weights of a sharded model: use a loop over the Epochs");
    Recovery recovery(world.context(), world.options_, &world.lifeline());
    run.keep_in(recovery, step_.steps_done_);
    recovery.run([&](ProcessGroup& group, const Start& start) {
        const InGeneration now(run, recovery, group);
        run.model.attach(group, start.is_new());
        run.attach(group, start.is_new(), step_.steps_done_);
        step_.finished_ = true;
        is_over_ = false;
        for (Step& step : *this) body(step);
    });
}

void Epochs::advance() {
    Parts& run = *parts_;
    if (!step_.finished_)
        throw Error(fmt::format("rank {}: the loop went on after step {} without Step::finish()",
                                run.group->rank(), step_.steps_done_));
    while (run.sampler.epoch() < run.options.epochs) {
        if (run.is_save_due(step_.steps_done_)) run.save(step_.steps_done_);
        if (run.must_stop(step_.steps_done_)) {
            run.world.stopped_early_ = true;
            break;
        }
        if (!run.is_in_epoch) run.begin_epoch();
        if (run.take(step_)) {
            step_.epoch_ = run.sampler.epoch();
            step_.finished_ = false;
            run.begin_unit();
            run.model.begin_forward();
            run.model.zero_gradients();
            run.reduced_before = run.model.statistics().steps;
            return;
        }
        run.end_epoch(step_.steps_done_);
    }
    run.end_run(step_.steps_done_);
    if (stopped()) run.print_stop(step_.steps_done_);
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
        throw Error(fmt::format("rank {}: Step::finish() was called twice after step {}", run.group->rank(),
                                step.steps_done_));
    // The backward pass of a module of LibTorch has finished the step.
    if (run.model.statistics().steps == run.reduced_before) {
        run.model.mark_all_ready();
        run.model.finish();
    }
    if (run.options.clip_norm) clip_grad_norm(run.model, *run.options.clip_norm);
    run.commit([&] {
        run.optimizer.step();
        if (run.rate) run.rate->step();
        if (run.dataset == nullptr) run.sampler.advance(step.size_);
        ++step.steps_done_;
    });
    const auto size = static_cast<double>(step.size_);
    run.sums.add(run.units, loss, size);
    run.timed_samples += size;
    step.finished_ = true;
    const auto ranks = static_cast<std::uint64_t>(run.group->size());
    run.group->report_progress(step.steps_done_, step.steps_done_ * run.options.batch_size * ranks);
}

}  // namespace ddp
