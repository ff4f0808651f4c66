#include "trainer.h"

#include <fmt/core.h>
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "batch_feed.h"
#include "ddp/objects.h"
#include "ddp/sampler.h"
#include "env/clock.h"

namespace train {
namespace {

using ddprun::MonotonicClock;

std::int64_t system_clock_ns() {
    return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

double seconds_since(ddprun::TimePoint start) {
    return std::chrono::duration<double>(MonotonicClock::now() - start).count();
}

/// Reading ahead needs a core of its own; ranks that share cores would only switch threads more.
std::size_t prefetch_for(int ranks) {
    cpu_set_t cpus;
    const int allowed = ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
    return allowed >= 2 * ranks ? 2 : 0;
}

std::vector<std::size_t> widths_of(const Options& options, const Samples& samples) {
    std::vector<std::size_t> widths = {samples.features};
    widths.insert(widths.end(), options.hidden.begin(), options.hidden.end());
    widths.push_back(samples.classes);
    return widths;
}

/// For one rank.
std::size_t samples_per_step(const Options& options) { return options.batch_size * options.accumulate; }

/// Optimizer steps of the whole run.
std::uint64_t steps_in_all(const Options& options, const ddp::DistributedSampler& sampler) {
    return options.epochs * sampler.batches_per_epoch(samples_per_step(options), true);
}

std::string describe_learning_rate(const Options& options, int world_size) {
    const double base = options.base_learning_rate();
    if (world_size == 1 && options.accumulate == 1) return fmt::format("learning rate {:g}", base);
    if (!options.scale_learning_rate) return fmt::format("learning rate {:g}, not scaled", base);
    const std::string batches =
        options.accumulate > 1 ? fmt::format(" x {} batches", options.accumulate) : "";
    return fmt::format("learning rate {:g} ({:g} x {} worker{}{}; --no-scale-lr keeps {:g})",
                       learning_rate(options, world_size), base, world_size, world_size == 1 ? "" : "s",
                       batches, base);
}

}  // namespace

std::optional<StartupError> check_fit(const Options& options, const Samples& samples, int world_size) {
    const std::size_t training = split_samples(samples.count()).training.size();
    const std::size_t share = training / static_cast<std::size_t>(world_size);
    if (share >= samples_per_step(options)) return std::nullopt;
    return StartupError{
        ExitCode::Usage,
        fmt::format("--batch-size: {}{} is more than the {} training samples that each of {} workers gets",
                    options.batch_size,
                    options.accumulate > 1 ? fmt::format(" x --accumulate {}", options.accumulate) : "",
                    share, world_size)};
}

CommonSettings common_settings(const Options& options, const Samples& samples) {
    const auto yes_or_no = [](bool value) { return std::string(value ? "yes" : "no"); };
    return {{"--data", fmt::format("{} samples of {} values in {} classes with hash {:016x}", samples.count(),
                                   samples.features, samples.classes, samples.fingerprint())},
            {{"--hidden", fmt::format("{}", fmt::join(options.hidden, ","))},
             {"--precision", name_of(options.precision)},
             {"--batch-size", fmt::format("{}", options.batch_size)},
             {"--epochs", fmt::format("{}", options.epochs)},
             {"--optimizer", name_of(options.optimizer)},
             {"--accumulate", fmt::format("{}", options.accumulate)},
             {"--shard", name_of(options.shard)},
             {"--lr", fmt::format("{}", options.base_learning_rate())},
             {"--schedule", name_of(options.schedule)},
             {"--warmup", fmt::format("{}", options.warmup)},
             {"--clip", options.clip ? fmt::format("{}", *options.clip) : "none"},
             {"--no-scale-lr", yes_or_no(!options.scale_learning_rate)},
             {"--momentum", fmt::format("{}", options.momentum)},
             {"--weight-decay", fmt::format("{}", options.weight_decay)},
             {"--seed", fmt::format("{}", options.seed)},
             {"--verify-every", fmt::format("{}", options.verify_every)},
             {"--deterministic", yes_or_no(options.deterministic)},
             {"--cuda-graph", yes_or_no(options.cuda_graph)},
             {"--resume", yes_or_no(options.resume)}}};
}

std::string checkpoint_dir_for(const Options& options, const Samples& samples) {
    return options.checkpoint_dir.empty() ? "./checkpoints/" + samples.name : options.checkpoint_dir;
}

Trainer::Trainer(const World& world, const ComputeDevice& device, const Options& options, Samples samples,
                 Print print, StopRequest stop_request)
    : world_(world),
      device_(device),
      options_(options),
      samples_(std::move(samples)),
      print_(std::move(print)),
      split_(split_samples(samples_.count())),
      training_(samples_, split_.training),
      held_out_(samples_, split_.held_out),
      scaling_(samples_.needs_scaling ? std::optional<Scaling>(std::in_place, samples_, split_.training)
                                      : std::nullopt),
      // The tail is dropped so that the number of steps depends only on the joint batch, not on the number of
      // workers.
      sampler_(training_.size(), world.size, world.rank, {.seed = options.seed, .drop_last = true}),
      learner_(world, device, options, widths_of(options, samples_), steps_in_all(options, sampler_)),
      checkpoints_(checkpoint_dir_for(options, samples_)),
      stop_request_(std::move(stop_request)) {
    summary_.world_size = world.size;
    if (world.group == nullptr) return;
    group_ = *world.group;
    vote_.emplace(*world.group);
}

void Trainer::keep_in(ddp::Recovery& recovery) {
    using Kind = ddp::Recovery::Kind;
    recovery_ = &recovery;
    recovery.keep(training());
    recovery.keep_value("steps", steps_);
    recovery.keep_value("saved_epoch", saved_epoch_);
    recovery.keep_value("began", began_ns_, Kind::Moving);  // set when the body has begun
    recovery.keep_value("epochs", summary_.epochs);
    recovery.keep_value("checkpoint", summary_.checkpoint);
    recovery.keep_value("loss_sum", score_.loss_sum, Kind::Own);
    recovery.keep_value("correct", score_.correct, Kind::Own);
    recovery.keep_value("samples", score_.samples, Kind::Own);
}

void Trainer::attach(ddp::ProcessGroup& group, bool is_new) {
    world_ = World(group.rank(), group.size());
    summary_.world_size = world_.size;
    learner_.attach(group, is_new, steps_in_all(options_, sampler_));
    learner_.place_in_schedule(sampler_.batches_done(samples_per_step(options_), true));
    group_ = group;
    vote_.emplace(group);
    order_ahead_.reset();  // of the ranks of the last group
    is_new_ = is_new;
}

void Trainer::commit(const std::function<void()>& change) {
    if (recovery_ != nullptr) recovery_->commit(change);
    else change();
}

void Trainer::print(const std::string& line) const {
    if (world_.rank == 0) print_(line);
}

std::string Trainer::describe_compute() const {
    std::string text = device_.compute->describe();
    if (!feed_->describe().empty()) text += ", " + feed_->describe();
    return options_.cuda_graph ? text + ", steps in a graph" : text;
}

void Trainer::announce() const {
    const std::vector<std::size_t> widths = widths_of(options_, samples_);
    const auto ranks = static_cast<std::size_t>(world_.size);
    print(fmt::format("train: {}: {} samples, {} more held out; perceptron {} ({} parameters, {})",
                      samples_.name, grouped(training_.size()), grouped(held_out_.size()),
                      fmt::join(widths, "-"), grouped(learner_.parameter_count()), describe_compute()));
    print(fmt::format("train: {} worker{} over {}; batch {} x {}{} = {}; {}, {}; seed {}", ranks,
                      ranks == 1 ? "" : "s", group_->describe(), options_.batch_size, ranks,
                      options_.accumulate > 1 ? fmt::format(" x {}", options_.accumulate) : "",
                      samples_per_step(options_) * ranks, name_of(options_.optimizer),
                      describe_learning_rate(options_, world_.size), options_.seed));
    const std::uint64_t steps = steps_in_all(options_, sampler_);
    if (options_.warmup > 0 && options_.warmup >= steps)
        print(fmt::format(
            "train: --warmup: {} steps are not fewer than the run's {}: the learning rate never reaches its full value",
            grouped(options_.warmup), grouped(steps)));
}

std::string Trainer::find_checkpoint(const std::optional<std::string>& only_run) const {
    const std::optional<std::string> latest = checkpoints_.latest();
    if (!latest) return "";
    const ddp::TrainingState state = ddp::load_state(*latest);
    const auto note = [&state](const char* key) {
        const auto found = state.notes.find(key);
        return found == state.notes.end() ? "" : found->second;
    };
    if (only_run && note("run_id") != *only_run) return "";
    if (note("optimizer") != learner_.optimizer_name())
        throw ddp::InvalidInput(fmt::format("{}: written with --optimizer {}, this run has {}", *latest,
                                            note("optimizer"), learner_.optimizer_name()));
    return *latest;
}

void Trainer::resume(const std::optional<std::string>& only_run) {
    // Only rank 0 looks: the others need not see its disk. "+path", or "-" and the error.
    std::string found;
    if (world_.rank == 0) {
        try {
            found = "+" + find_checkpoint(only_run);
        } catch (const ddp::Error& error) {
            found = std::string("-") + error.what();
        }
    }
    found = group_->all_gather_bytes(found)[0];
    if (found[0] == '-') throw ddp::InvalidInput(found.substr(1));
    const std::string path = found.substr(1);
    if (path.empty()) {
        print(fmt::format("train: no checkpoint in {} to resume from; starting at epoch 1",
                          checkpoints_.path()));
        return;
    }
    const ddp::TrainingState state = ddp::load_checkpoint(*group_, path, training());
    steps_ = state.step;
    learner_.place_in_schedule(sampler_.batches_done(samples_per_step(options_), true));
    saved_epoch_ = epoch();
    const bool is_inside = state.sampler.consumed > 0;
    print(fmt::format("train: resuming from {} {} epoch {}", path, is_inside ? "in" : "after",
                      epoch() + (is_inside ? 1 : 0)));
}

ddp::Training Trainer::training() {
    ddp::Training training = learner_.training(sampler_);
    training.parts.push_back({.name = "scaling", .state = scaling_ ? &*scaling_ : nullptr});
    return training;
}

std::string Trainer::save(const std::string& run_id) {
    if (curves_) curves_->flush();
    return checkpoints_.save(*group_, training(),
                             {{"run_id", run_id}, {"optimizer", std::string(learner_.optimizer_name())}});
}

Trainer::Sums Trainer::sum_over_ranks(Sums mine) {
    // With one rank there is no other, and on a GPU the exchange would wait for the device.
    if (group_->size() == 1 && group_->device() != ddp::Device{}) return mine;
    Sums sums = {};
    for (const Sums& theirs : group_->all_gather_values(mine)) {
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += theirs[i];
    }
    return sums;
}

void Trainer::prepare_next_order() {
    ddp::DistributedSampler next = sampler_;
    next.next_epoch();
    order_ahead_ = OrderAhead{epoch() + 1, next.indices()};
}

std::vector<std::size_t> Trainer::take_order() {
    const bool is_known = order_ahead_ && sampler_.state() == ddp::SamplerState{order_ahead_->epoch, 0};
    return is_known ? std::exchange(order_ahead_, std::nullopt)->indices : sampler_.indices();
}

Trainer::Pass Trainer::begin_pass() {
    Pass pass{MonotonicClock::now(), group_->communication_seconds(), group_->waiting_seconds()};
    // Whole steps only: the same steps for any number of workers with the same joint batch.
    std::vector<std::size_t> order = take_order();
    order.resize(order.size() / samples_per_step(options_) * samples_per_step(options_));
    feed_->begin(
        training_, std::move(order),
        {.batch_size = options_.batch_size, .drop_last = true, .prefetch = prefetch_for(world_.size)});
    if (curves_) curves_->begin(pass.begin);
    return pass;
}

/// Between two steps, on all ranks alike.
bool Trainer::must_stop() {
    if (!stop_request_.wanted) return false;
    if (stop_request_.agreed && stop_request_.agreed(steps_)) return true;
    return vote_->passed(learner_.model(), stop_request_.wanted);
}

bool Trainer::train_epoch(Pass& pass) {
    const std::size_t samples = samples_per_step(options_);
    for (;;) {
        const BatchSource batch = feed_->next();
        if (batch.count == 0) break;
        if (learner_.is_between_steps() && must_stop()) return false;
        learner_.forward(batch);
        // On a GPU the step is only queued: its score is not known yet, and is waited for only where another
        // process may need it.
        Score score;
        if (learner_.is_last_of_step()) {
            if (!device_.gpu || recovers()) score_ += score = learner_.take_score();
            score_.samples += samples;
            if (recovery_ != nullptr) recovery_->prepare();
        }
        if (!learner_.backward()) continue;
        const double learning_rate = learner_.current_learning_rate();
        commit([&] {
            learner_.step();
            sampler_.advance(samples);
            ++steps_;
        });
        pass.trained += samples;
        group_->report_progress(steps_, steps_ * samples);
        if (curves_ && !device_.gpu) note_step(score, learning_rate);
    }
    // A GPU is still busy with queued steps: use the time.
    if (device_.gpu) prepare_next_order();
    return true;
}

void Trainer::end_epoch(const Pass& pass) {
    const EpochResult result = result_of(pass);
    print(format_epoch(result, options_.epochs));
    if (curves_) curves_->epoch(steps_, result, learner_.current_learning_rate());
    if (!std::isfinite(result.loss))
        throw ddp::Error(fmt::format("the loss is {} after epoch {}: training has diverged; try a lower --lr",
                                     result.loss, result.epoch));
    commit([&] {
        sampler_.next_epoch();
        summary_.epochs.push_back(result);
    });
}

EpochResult Trainer::result_of(const Pass& pass) {
    if (device_.gpu) score_ += learner_.take_score();
    const double seconds = seconds_since(pass.begin);
    // In parts of each rank's own time: after a checkpoint the other ranks' epoch begins with a wait that
    // rank 0 does not have.
    const double waiting = (group_->waiting_seconds() - pass.waiting) / seconds;
    const double communication = (group_->communication_seconds() - pass.communicating) / seconds - waiting;
    const auto [loss, correct, all, speed, communicating, waited] = sum_over_ranks(
        {score_.loss_sum, static_cast<double>(score_.correct), static_cast<double>(score_.samples),
         world_.rank == 0 ? static_cast<double>(pass.trained) / seconds : 0, communication, waiting});
    score_ = {};
    // There are no samples when a run that stopped before the last batch is resumed by more ranks than
    // samples are left.
    const double samples = std::max(all, 1.0);
    EpochResult result{epoch() + 1,         loss / samples,      correct / samples,
                       held_out_accuracy(), speed * world_.size, learner_.memory()};
    if (group_->device() == ddp::Device{}) {
        result.communication_share = communicating / world_.size;
        result.waiting_share = waited / world_.size;
    }
    return result;
}

void Trainer::note_step(const Score& score, double learning_rate) {
    const std::size_t own = samples_per_step(options_);
    curves_->step(steps_, MonotonicClock::now(), score, own, own * static_cast<std::size_t>(world_.size),
                  learning_rate);
}

double Trainer::held_out_accuracy() {
    // Every rank takes every size()th sample; a rank may get none.
    std::vector<std::size_t> mine;
    const auto ranks = static_cast<std::size_t>(world_.size);
    for (auto i = static_cast<std::size_t>(world_.rank); i < held_out_.size(); i += ranks) mine.push_back(i);
    feed_->begin(held_out_, std::move(mine),
                 {.batch_size = Learner::kEvaluationBatch, .drop_last = false, .prefetch = 0});
    for (BatchSource batch = feed_->next(); batch.count > 0; batch = feed_->next()) learner_.evaluate(batch);
    const auto correct = static_cast<double>(learner_.take_score().correct);
    if (recovery_ != nullptr) recovery_->prepare();
    return sum_over_ranks({correct})[0] / static_cast<double>(held_out_.size());
}

bool Trainer::is_checkpoint_due() const {
    return epoch() > saved_epoch_ && (epoch() % options_.checkpoint_every == 0 || epoch() == options_.epochs);
}

void Trainer::save_checkpoint(const std::string& run_id) {
    if (recovery_ != nullptr) recovery_->prepare();
    verify();
    const std::string path = save(run_id);
    commit([&] {
        saved_epoch_ = epoch();
        summary_.checkpoint = path;
    });
}

/// Keeps parameters that are wrong on a few ranks out of checkpoints and results.
void Trainer::verify() {
    if (options_.verify_every > 0) learner_.model().verify_by_majority();
}

void Trainer::stop_early(const std::string& run_id) {
    verify();
    summary_.stopped = true;
    summary_.checkpoint = save(run_id);
    print(fmt::format("train: asked to stop in epoch {}: saved {}; --resume continues from there",
                      epoch() + 1, summary_.checkpoint));
}

/// The parts of a process that a new generation finds in place.
void Trainer::begin_run() {
    if (!feed_) {
        if (scaling_) scaling_->apply(samples_);
        feed_ = make_feed(device_, samples_, options_);
    }
    if (world_.rank == 0 && !options_.tensorboard.empty() && !curves_) {
        curves_.emplace(options_.tensorboard, print_);
    }
    if (!is_new_) return;
    began_ns_ = system_clock_ns();
    announce();
    if (epoch() >= options_.epochs)
        print(
            fmt::format("train: {} epochs are done already; --epochs asks for {}", epoch(), options_.epochs));
}

Summary Trainer::run(const std::string& run_id) {
    begin_run();
    for (;;) {
        if (is_checkpoint_due()) save_checkpoint(run_id);
        if (epoch() >= options_.epochs) break;
        Pass pass = begin_pass();
        if (!train_epoch(pass)) {
            stop_early(run_id);
            return summary_;
        }
        end_epoch(pass);
    }
    summary_.held_out_accuracy = held_out_accuracy();
    verify();
    summary_.digest = learner_.model().verify_equal_parameters();
    summary_.seconds = static_cast<double>(system_clock_ns() - began_ns_) / 1e9;
    const std::size_t done = summary_.epochs.size();
    const std::string epochs = done == epoch() ? fmt::format("{} epochs", done)
                                               : fmt::format("{} epochs, {} of them", epoch(), done);
    print(fmt::format("train: held-out accuracy {:.1f} % after {} in {:.1f} s",
                      100 * summary_.held_out_accuracy, epochs, summary_.seconds));
    print(fmt::format("train: parameters are bitwise equal on {} worker{}, sha256 {}", summary_.world_size,
                      summary_.world_size == 1 ? "" : "s", summary_.digest));
    if (!summary_.checkpoint.empty()) print(fmt::format("train: checkpoint {}", summary_.checkpoint));
    return summary_;
}

}  // namespace train
