// A distributed sampler and a loader that reads ahead: every epoch shuffles the samples, each rank reads its
// share in a thread of its own, and a two-layer network learns from the batches.
//
//     ddprun --nproc-per-node=4 ./distributed_loader --num_epochs 5
//
// Exits 0 when all ranks together have seen every sample in every epoch, hold the same parameters, and the
// loss has fallen; 1 otherwise.

#include <ddp/checkpoint.h>
#include <ddp/context.h>
#include <ddp/ddp.h>
#include <ddp/loader.h>
#include <ddp/optimizer.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kHidden = 64, kClasses = 2;

struct Options {
    std::size_t num_epochs = 5, batch_size = 32, dataset_size = 1000, input_dim = 10;
    std::uint64_t seed = 42;
    std::string backend = "auto", save_dir;  ///< directory for the trained model from rank 0; "" none
};

/// "--name value" or "--name=value".
Options read_options(int argc, char** argv) {
    Options options;
    const std::map<std::string, std::size_t*> numbers = {{"--num_epochs", &options.num_epochs},
                                                         {"--batch_size", &options.batch_size},
                                                         {"--dataset_size", &options.dataset_size},
                                                         {"--input_dim", &options.input_dim},
                                                         {"--seed", &options.seed}};
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i], name = word.substr(0, word.find('='));
        const std::string value = name != word ? word.substr(name.size() + 1) : i + 1 < argc ? argv[++i] : "";
        if (name == "--backend") options.backend = value;
        else if (name == "--save_dir") options.save_dir = value;
        else if (!numbers.contains(name)) throw ddp::InvalidInput(name + ": unknown option");
        else if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos)
            throw ddp::InvalidInput(name + ": '" + value + "' is not a number");
        else *numbers.at(name) = std::strtoull(value.c_str(), nullptr, 10);
    }
    if (options.batch_size == 0 || options.dataset_size == 0 || options.input_dim == 0)
        throw ddp::InvalidInput("--batch_size, --dataset_size and --input_dim are at least 1");
    // PyTorch's programs use these names; collectives in host memory are libddp's own.
    if (options.backend == "gloo" || options.backend == "mpi") options.backend = "cpu";
    if (options.backend != "auto" && options.backend != "cpu")
        throw ddp::InvalidInput(
            "--backend " + options.backend +
            ": this example computes on the CPU; train --device cuda is the one for GPUs");
    return options;
}

float uniform(std::mt19937_64& random) { return static_cast<float>(random() >> 40) * 0x1p-24F; }
float normal(std::mt19937_64& random) {
    return std::sqrt(-2 * std::log(1 - uniform(random))) * std::cos(6.2831853F * uniform(random));
}

/// Points around the origin, the same on every rank; the class of a point is its side of a plane.
class Points final : public ddp::Dataset {
  public:
    Points(std::size_t count, std::size_t dimensions, std::uint64_t seed)
        : dimensions_(dimensions), values_(count * dimensions), labels_(count) {
        std::mt19937_64 random(seed);
        for (float& value : values_) value = normal(random);
        for (std::size_t i = 0; i < count; ++i) {
            float sum = 0;
            for (std::size_t d = 0; d < dimensions; ++d) sum += values_[i * dimensions + d];
            labels_[i] = sum > 0 ? 1 : 0;
        }
    }
    [[nodiscard]] std::size_t size() const override { return labels_.size(); }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override {
        return {dimensions_ * sizeof(float), sizeof(std::int32_t)};
    }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        std::memcpy(fields[0].data(), &values_[index * dimensions_], fields[0].size());
        std::memcpy(fields[1].data(), &labels_[index], fields[1].size());
    }

  private:
    std::size_t dimensions_;
    std::vector<float> values_;
    std::vector<std::int32_t> labels_;
};

/// Linear -> 64 -> ReLU -> 2, cross entropy.
class Network {
  public:
    Network(std::size_t inputs, std::uint64_t seed)
        : inputs_(inputs), w1_(kHidden * inputs), b1_(kHidden), w2_(kClasses * kHidden), b2_(kClasses) {
        std::mt19937_64 random(seed);
        const auto fill = [&](std::vector<float>& weights, std::size_t fan_in) {
            for (float& weight : weights)
                weight = (2 * uniform(random) - 1) / std::sqrt(static_cast<float>(fan_in));
        };
        fill(w1_, inputs);
        fill(b1_, inputs);
        fill(w2_, kHidden);
        fill(b2_, kHidden);
    }

    [[nodiscard]] std::vector<ddp::Tensor> parameters() {
        const auto wide = [](std::size_t n) { return static_cast<std::int64_t>(n); };
        return {ddp::tensor_of("fc1.weight", std::span(w1_), {wide(kHidden), wide(inputs_)}),
                ddp::tensor_of("fc1.bias", std::span(b1_), {wide(kHidden)}),
                ddp::tensor_of("fc2.weight", std::span(w2_), {wide(kClasses), wide(kHidden)}),
                ddp::tensor_of("fc2.bias", std::span(b2_), {wide(kClasses)})};
    }

    /// Returns the sum of the batch's losses; writes the gradients of their mean into the model, last layer
    /// first.
    double forward_backward(std::span<const float> x, std::span<const std::int32_t> labels,
                            ddp::DistributedDataParallel& model) const {
        model.zero_gradients();
        const std::span<float> gw1 = model.gradient_as<float>(0), gb1 = model.gradient_as<float>(1),
                               gw2 = model.gradient_as<float>(2), gb2 = model.gradient_as<float>(3);
        const float share = 1 / static_cast<float>(labels.size());
        double loss = 0;
        std::vector<float> hidden(kHidden);
        for (std::size_t n = 0; n < labels.size(); ++n) {
            const float* in = &x[n * inputs_];
            for (std::size_t h = 0; h < kHidden; ++h) {
                float sum = b1_[h];
                for (std::size_t i = 0; i < inputs_; ++i) sum += w1_[h * inputs_ + i] * in[i];
                hidden[h] = std::max(0.F, sum);
            }
            float out[kClasses], total = 0;
            for (std::size_t c = 0; c < kClasses; ++c) {
                out[c] = b2_[c];
                for (std::size_t h = 0; h < kHidden; ++h) out[c] += w2_[c * kHidden + h] * hidden[h];
            }
            const float largest = std::max(out[0], out[1]);
            for (float& one : out) total += one = std::exp(one - largest);
            const auto label = static_cast<std::size_t>(labels[n]);
            loss -= std::log(static_cast<double>(std::max(out[label] / total, 1e-30F)));
            float slope[kClasses];
            for (std::size_t c = 0; c < kClasses; ++c) {
                slope[c] = (out[c] / total - (c == label ? 1.F : 0.F)) * share;
                gb2[c] += slope[c];
                for (std::size_t h = 0; h < kHidden; ++h) gw2[c * kHidden + h] += slope[c] * hidden[h];
            }
            for (std::size_t h = 0; h < kHidden; ++h) {
                if (hidden[h] <= 0) continue;
                const float of_hidden = slope[0] * w2_[h] + slope[1] * w2_[kHidden + h];
                gb1[h] += of_hidden;
                for (std::size_t i = 0; i < inputs_; ++i) gw1[h * inputs_ + i] += of_hidden * in[i];
            }
        }
        for (const std::size_t parameter : {3, 2, 1, 0}) model.mark_ready(parameter);
        model.finish();
        return loss;
    }

  private:
    std::size_t inputs_;
    std::vector<float> w1_, b1_, w2_, b2_;
};

/// Counts how often all ranks together got each sample: each at least once, and only existing ones.
bool covers_the_data(ddp::ProcessGroup& group, std::span<const std::size_t> mine, std::size_t samples) {
    std::vector<std::int32_t> seen(samples);
    for (const std::size_t index : mine) ++seen.at(index);
    group.all_reduce(ddp::buffer_of(std::span(seen))).wait();
    return std::count(seen.begin(), seen.end(), 0) == 0;
}

bool run(const ddp::Context& context, const Options& options) {
    const auto group = ddp::ProcessGroup::create(context, {.backend = options.backend});
    const auto ranks = static_cast<std::size_t>(group->size());
    const bool is_first = group->rank() == 0;
    const Points points(options.dataset_size, options.input_dim, options.seed);
    Network network(options.input_dim, options.seed + 1);
    const std::vector<ddp::Tensor> parameters = network.parameters();
    ddp::DistributedDataParallel model(*group, parameters);
    const auto optimizer = ddp::make_sgd(parameters, {.learning_rate = 0.01, .momentum = 0.9});
    ddp::DistributedSampler sampler(points.size(), group->size(), group->rank(), {.seed = options.seed});
    if (is_first) {
        const std::size_t batches = (sampler.size() + options.batch_size - 1) / options.batch_size;
        std::printf(
            "Running on %s with %zu processes\nDataset size: %zu, samples per rank: %zu, batches per rank: %zu, effective batch size: %zu\n",
            group->describe().c_str(), ranks, points.size(), sampler.size(), batches,
            options.batch_size * ranks);
    }

    std::vector<double> losses;
    bool complete = true;
    for (std::size_t epoch = 0; epoch < options.num_epochs; ++epoch) {
        sampler.set_epoch(epoch);
        complete = covers_the_data(*group, sampler.indices(), points.size()) && complete;
        std::printf("Local Rank %d, Epoch %zu, Training ...\n", context.local_rank(), epoch);
        ddp::Loader loader(points, sampler, {.batch_size = options.batch_size});
        std::vector<double> sums(2);  // losses, samples
        while (const ddp::Batch* batch = loader.next()) {
            sums[0] +=
                network.forward_backward(batch->field<float>(0).first(batch->size() * options.input_dim),
                                         batch->field<std::int32_t>(1).first(batch->size()), model);
            sums[1] += static_cast<double>(batch->size());
            optimizer->step(model.gradients());
        }
        group->all_reduce(ddp::buffer_of(std::span(sums))).wait();
        losses.push_back(sums[0] / sums[1]);
        if (is_first)
            std::printf("----\nEpoch %zu, mean loss %.4f of %.0f samples\n----\n", epoch, losses.back(),
                        sums[1]);
    }

    const std::string sum = model.verify_equal_parameters();  // throws when a single bit differs
    if (is_first && !options.save_dir.empty())
        ddp::CheckpointDirectory(options.save_dir)
            .save(parameters, optimizer->state(),
                  {.epoch = options.num_epochs, .step = optimizer->steps(), .sampler = {}, .notes = {}});
    group->barrier().wait();
    const bool learned = losses.size() < 2 || losses.back() < losses.front();
    if (!complete)
        std::fprintf(stderr, "distributed_loader: rank %d: a sample was given to no rank\n", group->rank());
    if (!learned)
        std::fprintf(stderr, "distributed_loader: rank %d: the loss has not fallen: %g, then %g\n",
                     group->rank(), losses.front(), losses.back());
    if (is_first && complete && learned)
        std::printf(
            "parameters are bitwise equal on %zu ranks, sha256 %s\nTraining completed successfully!\n", ranks,
            sum.c_str());
    return complete && learned;
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    return run(ddp::Context::from_env(), read_options(argc, argv)) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "distributed_loader: %s\n", error.what());
    return 1;
}
