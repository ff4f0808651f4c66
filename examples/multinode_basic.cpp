// A small program that trains on several nodes and can be resumed: y = A x + b on random samples by
// stochastic gradient descent, with snapshots that one rank writes whole or not at all.
//
//     ddprun --nproc-per-node=4 ./multinode_basic --total_epochs 10 --save_every 2
//
// All ranks make the same data from the same seed, so they exchange only gradients. A snapshot holds the
// parameters, the optimizer's state and the sampler's position: a restarted job continues at the next step,
// and ends where an uninterrupted one would have ended.
//
// Exits 0 when all ranks hold the same parameters and the loss has not grown, 1 otherwise.

#include <ddp/checkpoint.h>
#include <ddp/context.h>
#include <ddp/ddp.h>
#include <ddp/optimizer.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kSamples = 2000, kInputs = 20;

struct Options {
    std::uint64_t total_epochs = 50, save_every = 100 /* epochs; 0: no snapshots */, batch_size = 32,
                  seed = 42;
    std::string backend = "auto", snapshot = "snapshot";
};

/// "--name value", "--name=value", with dashes or underscores.
Options read_options(int argc, char** argv) {
    std::map<std::string, std::string> given;
    for (int i = 1; i < argc; ++i) {
        std::string name = argv[i];
        const std::size_t equals = name.find('=');
        std::string value;
        if (equals != std::string::npos) value = name.substr(equals + 1);
        else if (i + 1 < argc) value = argv[++i];
        name = name.substr(0, equals);
        std::replace(name.begin() + std::min<std::ptrdiff_t>(2, std::ssize(name)), name.end(), '-', '_');
        given[name == "--num_epochs" ? "--total_epochs" : name] = value;
    }
    Options options;
    const auto text = [&](const char* name, std::string& place) {
        if (const auto found = given.extract(name); found) place = found.mapped();
    };
    const auto number = [&](const char* name, std::uint64_t& place) {
        std::string value = std::to_string(place);
        text(name, value);
        if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos)
            throw ddp::InvalidInput(std::string(name) + ": '" + value + "' is not a number");
        place = std::strtoull(value.c_str(), nullptr, 10);
    };
    number("--total_epochs", options.total_epochs);
    number("--save_every", options.save_every);
    number("--batch_size", options.batch_size);
    number("--seed", options.seed);
    text("--backend", options.backend);
    text("--snapshot", options.snapshot);
    if (!given.empty()) throw ddp::InvalidInput(given.begin()->first + ": unknown option");
    if (options.batch_size == 0) throw ddp::InvalidInput("--batch_size: at least 1");
    // PyTorch's programs use these names; collectives in host memory are libddp's own.
    if (options.backend == "gloo" || options.backend == "mpi") options.backend = "cpu";
    if (options.backend != "auto" && options.backend != "cpu")
        throw ddp::InvalidInput(
            "--backend " + options.backend +
            ": this example computes on the CPU; train --device cuda is the one for GPUs");
    return options;
}

/// Random samples, equal on every rank.
struct Data {
    std::vector<float> x, y;
    explicit Data(std::uint64_t seed) : x(kSamples * kInputs), y(kSamples) {
        std::mt19937_64 random(seed);
        const auto uniform = [&] { return static_cast<float>(random() >> 40) * 0x1p-24F; };
        std::generate(x.begin(), x.end(), uniform);
        std::generate(y.begin(), y.end(), uniform);
    }
};

struct Trainer {
    Trainer(ddp::ProcessGroup& whole, const Options& how)
        : group(whole),
          options(how),
          data(how.seed),
          sampler(kSamples, whole.size(), whole.rank(), {.shuffle = false, .seed = how.seed}),
          snapshots(how.snapshot) {
        std::mt19937_64 random(options.seed + 1);
        for (float& weight : weights) weight = (static_cast<float>(random() >> 40) * 0x1p-24F - 0.5F) * 0.4F;
        if (options.save_every > 0) load();
    }

    [[nodiscard]] bool is_first() const { return group.rank() == 0; }

    void load() {
        const std::optional<ddp::TrainingState> state = snapshots.load(group, training);
        if (!state) return;
        step = state->step;
        first_epoch = state->epoch;
        if (is_first())
            std::printf("Resuming training from snapshot at Epoch %llu\n",
                        static_cast<unsigned long long>(first_epoch));
    }

    /// Rank 0 writes for the whole job; the others wait until the snapshot is on the disk.
    void save(std::uint64_t epochs_done) {
        sampler.set_epoch(epochs_done);
        const std::string path = snapshots.save(group, training);
        if (is_first())
            std::printf("Epoch %llu | Training snapshot saved at %s\n",
                        static_cast<unsigned long long>(epochs_done - 1), path.c_str());
    }

    /// Returns the batch's mean squared error; the gradients go into the model's buckets, averaged over all
    /// ranks.
    double train(std::span<const std::size_t> batch) {
        const std::span<float> of_weights = model.gradient_as<float>(0),
                               of_bias = model.gradient_as<float>(1);
        std::fill(of_weights.begin(), of_weights.end(), 0.F);
        of_bias[0] = 0;
        double loss = 0;
        for (const std::size_t sample : batch) {
            const float* x = &data.x[sample * kInputs];
            float error = bias[0] - data.y[sample];
            for (std::size_t i = 0; i < kInputs; ++i) error += weights[i] * x[i];
            loss += static_cast<double>(error) * error / static_cast<double>(batch.size());
            const float slope = 2 * error / static_cast<float>(batch.size());
            for (std::size_t i = 0; i < kInputs; ++i) of_weights[i] += slope * x[i];
            of_bias[0] += slope;
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
        optimizer->step(model.gradients());
        ++step;
        group.report_progress(step, step * options.batch_size * static_cast<std::uint64_t>(group.size()));
        return loss;
    }

    /// Returns the epoch's loss, averaged over this rank's batches.
    double run_epoch(std::uint64_t epoch) {
        if (epoch != sampler.state().epoch) sampler.set_epoch(epoch);
        const std::vector<std::size_t> mine = sampler.indices();
        const std::size_t steps = (mine.size() + options.batch_size - 1) / options.batch_size;
        std::printf("[GPU%d] Epoch %llu | Batchsize: %llu | Steps: %zu\n", group.rank(),
                    static_cast<unsigned long long>(epoch),
                    static_cast<unsigned long long>(options.batch_size), steps);
        double loss = 0;
        for (std::size_t at = 0; at < mine.size(); at += options.batch_size) {
            const std::size_t count = std::min<std::size_t>(options.batch_size, mine.size() - at);
            loss += train(std::span(mine).subspan(at, count)) / static_cast<double>(steps);
        }
        return loss;
    }

    ddp::ProcessGroup& group;
    const Options& options;
    const Data data;
    ddp::DistributedSampler sampler;
    ddp::CheckpointDirectory snapshots;
    std::vector<float> weights = std::vector<float>(kInputs), bias = {0};
    const std::vector<ddp::Tensor> parameters = {ddp::tensor_of("weight", std::span(weights), {1, kInputs}),
                                                 ddp::tensor_of("bias", std::span(bias), {1})};
    ddp::DistributedDataParallel model{group, parameters};
    std::unique_ptr<ddp::Optimizer> optimizer = ddp::make_sgd(parameters, {.learning_rate = 1e-3});
    const ddp::Training training{model, *optimizer, sampler};
    std::uint64_t first_epoch = 0, step = 0;
};

void print_times(std::uint64_t first_epoch, const std::vector<double>& seconds) {
    double total = 0;
    std::printf("%8s  %12s\n", "Epoch", "Seconds");
    for (std::size_t i = 0; i < seconds.size(); ++i) {
        total += seconds[i];
        std::printf("%8zu  %12.6f\n", static_cast<std::size_t>(first_epoch) + i, seconds[i]);
    }
    std::printf("Total time: %.6f seconds, average per epoch: %.6f seconds\n", total,
                total / static_cast<double>(std::max<std::size_t>(1, seconds.size())));
}

bool run(const ddp::Context& context, const Options& options) {
    const auto group = ddp::ProcessGroup::create(context, {.backend = options.backend});
    // Ranks with different options would train without an error.
    ddp::verify_equal(*group, {{"--total_epochs", std::to_string(options.total_epochs)},
                               {"--batch_size", std::to_string(options.batch_size)},
                               {"--seed", std::to_string(options.seed)}});
    if (group->rank() == 0) {
        std::printf("%s\nLocal rank: %d, world size: %d, rank: %d, backend: %s\nTraining on %d ranks\n",
                    context.origin().empty() ? "rank from ddprun or torchrun" : context.origin().c_str(),
                    context.local_rank(), group->size(), group->rank(), group->describe().c_str(),
                    group->size());
    }
    Trainer trainer(*group, options);
    std::vector<double> seconds, losses;
    for (std::uint64_t epoch = trainer.first_epoch; epoch < options.total_epochs; ++epoch) {
        const auto start = std::chrono::steady_clock::now();
        losses.push_back(trainer.run_epoch(epoch));
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        std::printf("[GPU%d] Epoch %llu completed in %.6f seconds.\n", group->rank(),
                    static_cast<unsigned long long>(epoch), seconds.back());
        const bool is_due = options.save_every > 0 &&
                            ((epoch + 1) % options.save_every == 0 || epoch + 1 == options.total_epochs);
        if (is_due) trainer.save(epoch + 1);
    }
    const std::string sum = trainer.model.verify_equal_parameters();  // throws when a single bit differs
    if (group->rank() != 0) return true;
    print_times(trainer.first_epoch, seconds);
    std::printf("parameters are bitwise equal on %d ranks after %llu steps, sha256 %s\n", group->size(),
                static_cast<unsigned long long>(trainer.step), sum.c_str());
    const bool learned = losses.size() < 2 || losses.back() <= losses.front();
    if (!learned)
        std::fprintf(stderr, "multinode_basic: the loss has grown from %g to %g\n", losses.front(),
                     losses.back());
    return learned;
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    return run(ddp::Context::from_env(), read_options(argc, argv)) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "multinode_basic: %s\n", error.what());
    return 1;
}
