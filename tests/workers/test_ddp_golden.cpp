// Whole training runs with DistributedDataParallel, compared with PyTorch's. golden/torch_ddp.py defines
// model, numbers and schedule.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/optimizer.h"
#include "ddp/testing.h"
#include "tests/workers/golden/torch_ddp.h"

namespace {

using ddp::DistributedDataParallel;
using ddp::ProcessGroup;
using ddp::Tensor;
using Floats = std::vector<float>;

constexpr auto kBatch = static_cast<std::size_t>(golden::kBatch),
               kInputs = static_cast<std::size_t>(golden::kInputs),
               kHidden = static_cast<std::size_t>(golden::kHidden),
               kOutputs = static_cast<std::size_t>(golden::kOutputs);

/// number() of torch_ddp.py.
float number(std::uint32_t stream, std::uint32_t i) {
    std::uint32_t z = stream * 0x9E3779B9U + i * 0x85EBCA6BU + 0x1234567U;
    z ^= z >> 16;
    z *= 0x7FEB352DU;
    z ^= z >> 15;
    z *= 0x846CA68BU;
    z ^= z >> 16;
    return static_cast<float>(z >> 8) * 0x1p-23F - 1;
}
Floats numbers(std::uint32_t stream, std::size_t count, float scale = 1) {
    Floats all(count);
    for (std::size_t i = 0; i < count; ++i) all[i] = scale * number(stream, static_cast<std::uint32_t>(i));
    return all;
}

struct Samples {
    Samples(int rank, int step, int part)
        : stream(static_cast<std::uint32_t>(100 + 2 * ((step * 4 + part) * golden::kRanks + rank))),
          inputs(numbers(stream, kBatch * kInputs)),
          targets(numbers(stream + 1, kBatch * kOutputs)) {}
    std::uint32_t stream;
    Floats inputs, targets;
};

/// A fully connected layer. weights[of][from].
struct Layer {
    Layer(std::string layer_name, std::uint32_t stream, std::size_t inputs, std::size_t outputs)
        : name(std::move(layer_name)),
          from(inputs),
          to(outputs),
          weights(numbers(stream, from * to, 0.5F)),
          bias(numbers(stream + 1, to, 0.5F)) {}
    void append_to(std::vector<Tensor>& parameters) {
        parameters.push_back(
            ddp::tensor_of(name + ".weight", std::span(weights),
                           {static_cast<std::int64_t>(to), static_cast<std::int64_t>(from)}));
        parameters.push_back(
            ddp::tensor_of(name + ".bias", std::span(bias), {static_cast<std::int64_t>(to)}));
    }
    [[nodiscard]] double output(std::size_t o, const double* in) const {
        double sum = bias[o];
        for (std::size_t i = 0; i < from; ++i) sum += double{weights[o * from + i]} * in[i];
        return sum;
    }
    std::string name;
    std::size_t from, to;
    Floats weights, bias;
};

/// Gradients of one pass, in double, because the test compares the library's float sums and steps.
struct Gradients {
    explicit Gradients(const Layer& layer) : weights(layer.weights.size()), bias(layer.bias.size()) {}
    void add(std::size_t o, double slope, const double* in, std::size_t inputs) {
        bias[o] += slope;
        for (std::size_t i = 0; i < inputs; ++i) weights[o * inputs + i] += slope * in[i];
    }
    std::vector<double> weights, bias;
};

class Model {
  public:
    std::vector<Tensor> parameters() {
        std::vector<Tensor> all;
        for (Layer* layer : {&trunk_, &head_, &extra_}) layer->append_to(all);
        return all;
    }
    /// Adds to the gradients of used parameters and marks them ready, last layer first. Returns the loss.
    double backward(DistributedDataParallel& model, const Samples& samples, bool with_extra) const {
        Gradients of_trunk(trunk_), of_head(head_), of_extra(extra_);
        double loss = 0;
        for (std::size_t s = 0; s < kBatch; ++s) {
            const std::vector<double> in(
                samples.inputs.begin() + static_cast<std::ptrdiff_t>(s * kInputs),
                samples.inputs.begin() + static_cast<std::ptrdiff_t>((s + 1) * kInputs));
            std::vector<double> hidden(kHidden), of_hidden(kHidden);
            for (std::size_t h = 0; h < kHidden; ++h) hidden[h] = std::tanh(trunk_.output(h, in.data()));
            for (std::size_t o = 0; o < kOutputs; ++o) {
                const double error = head_.output(o, hidden.data()) +
                                     (with_extra ? extra_.output(o, hidden.data()) : 0) -
                                     samples.targets[s * kOutputs + o];
                loss += error * error / (kBatch * kOutputs);
                const double slope = 2 * error / (kBatch * kOutputs);
                of_head.add(o, slope, hidden.data(), kHidden);
                if (with_extra) of_extra.add(o, slope, hidden.data(), kHidden);
                for (std::size_t h = 0; h < kHidden; ++h)
                    of_hidden[h] += slope * (double{head_.weights[o * kHidden + h]} +
                                             (with_extra ? double{extra_.weights[o * kHidden + h]} : 0));
            }
            for (std::size_t h = 0; h < kHidden; ++h)
                of_trunk.add(h, of_hidden[h] * (1 - hidden[h] * hidden[h]), in.data(), kInputs);
        }
        if (with_extra) give(model, 4, of_extra);
        give(model, 2, of_head);
        give(model, 0, of_trunk);
        return loss;
    }

  private:
    static void give(DistributedDataParallel& model, std::size_t first, const Gradients& gradients) {
        add(model, first + 1, gradients.bias);
        add(model, first, gradients.weights);
    }
    static void add(DistributedDataParallel& model, std::size_t parameter,
                    const std::vector<double>& values) {
        const std::span<float> gradient = model.gradient_as<float>(parameter);
        for (std::size_t i = 0; i < values.size(); ++i) gradient[i] += static_cast<float>(values[i]);
        model.mark_ready(parameter);
    }

    Layer trunk_{"trunk", 0, kInputs, kHidden}, head_{"head", 2, kHidden, kOutputs},
        extra_{"extra", 4, kHidden, kOutputs};
};

struct Training {
    std::function<std::unique_ptr<ddp::Optimizer>(std::vector<Tensor>)> make_optimizer = [](auto parameters) {
        return ddp::make_sgd(std::move(parameters),
                             {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01});
    };
    bool find_unused = false;
    int parts = 1;  ///< parts of a step; all but the last in no_sync
    /// Called once per rank: a hook keeps memory of its own group.
    std::function<ddp::CommunicationHook()> make_hook = {};
};

/// extra_is_used() of torch_ddp.py.
bool extra_is_used(int step, int rank) {
    return step == 5 || step == 9 || step == 10 || (step == 6 && rank == 1);
}

struct Trained {
    std::vector<double> losses;
    Floats parameters;
};

double step(DistributedDataParallel& model, const Model& mine, const Training& how, int number, int rank) {
    model.zero_gradients();
    const bool with_extra = !how.find_unused || extra_is_used(number, rank);
    double loss = 0;
    for (int part = 0; part < how.parts; ++part) {
        const auto pass = [&] { loss += mine.backward(model, Samples(rank, number, part), with_extra); };
        if (part + 1 < how.parts) {
            const auto no_sync = model.no_sync();
            pass();
        } else {
            pass();
        }
    }
    model.finish();
    return loss / how.parts;
}

Trained train(ProcessGroup& group, const Training& how) {
    Model mine;
    ddp::DdpOptions options;
    options.reducer.find_unused_parameters = how.find_unused;
    DistributedDataParallel model(group, mine.parameters(), options);
    if (how.make_hook) model.set_hook(how.make_hook());
    const auto optimizer = how.make_optimizer(mine.parameters());
    Trained result;
    for (int s = 0; s < golden::kSteps; ++s) {
        result.losses.push_back(step(model, mine, how, s, group.rank()));
        optimizer->step(model.gradients());
    }
    model.verify_equal_parameters();
    for (const Tensor& parameter : mine.parameters()) {
        const auto* values = static_cast<const float*>(parameter.memory.data);
        result.parameters.insert(result.parameters.end(), values, values + parameter.memory.count);
    }
    return result;
}

/// The distance of two lists, relative to the length of the second (Euclidean).
template <class A, class B>
double distance(const A& a, const B& b) {
    double square = 0, length = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
        const double difference = double{a[i]} - double{b[i]};
        square += difference * difference;
        length += double{b[i]} * double{b[i]};
    }
    return std::sqrt(square / length);
}

/// float32 has a relative precision of 6e-8; some hundred roundings add up.
constexpr double kTolerance = 2e-6;

void expect_as_pytorch(const golden::Run& run, const Training& how, double tolerance = kTolerance) {
    ddp::testing::run_ranks(golden::kRanks, [&](ProcessGroup& group) {
        const Trained trained = train(group, how);
        const auto& losses = run.losses[static_cast<std::size_t>(group.rank())];
        for (std::size_t s = 0; s < losses.size(); ++s)
            EXPECT_NEAR(trained.losses[s], losses[s], tolerance * losses[s]) << run.name << ", step " << s;
        ASSERT_EQ(trained.parameters.size(), run.parameters.size());
        EXPECT_LT(distance(trained.parameters, run.parameters), tolerance) << run.name;
    });
}

TEST(TrainingAsPyTorch, HasTheSameLossCurveAndParameters) { expect_as_pytorch(golden::kPlain, {}); }

TEST(TrainingAsPyTorch, HasTheSameLossCurveWithAdamWAndUnusedParameters) {
    expect_as_pytorch(golden::kUnused, {.make_optimizer =
                                            [](auto parameters) {
                                                return ddp::make_adamw(
                                                    std::move(parameters),
                                                    {.learning_rate = 0.02, .weight_decay = 0.1});
                                            },
                                        .find_unused = true});
}

TEST(TrainingAsPyTorch, HasTheSameLossCurveWithNoSync) {
    expect_as_pytorch(golden::kAccumulated, {.parts = 3});
}

TEST(TrainingAsPyTorch, HasTheSameLossCurveWithLowRankGradients) {
    expect_as_pytorch(
        golden::kPower,
        {.make_hook = [] { return ddp::power_sgd({.rank = 2, .start_step = 2, .min_compression_rate = 1}); }},
        2e-5);
    EXPECT_GT(distance(golden::kPower.parameters, golden::kPlain.parameters), 1e-3) << "compression is lossy";
}

TEST(TrainingAsPyTorch, HasTheSameLossCurveWith16BitGradients) {
    expect_as_pytorch(golden::kBf16, {.make_hook = ddp::bf16_compression});
    expect_as_pytorch(golden::kFp16, {.make_hook = ddp::fp16_compression});
    // The rounding is far larger than the tolerance.
    EXPECT_GT(distance(golden::kBf16.parameters, golden::kPlain.parameters), 20 * kTolerance);
}

}  // namespace
