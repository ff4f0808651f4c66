// Data-parallel training of a model of your own: y = w x + b by gradient descent. The workers share the
// samples, and gradients are averaged while they are computed.
//
//     ddprun --nproc-per-node=4 ./linear_regression
//
// Exits 0 when all workers have found the same, right line, 1 otherwise.

#include <ddp/context.h>
#include <ddp/ddp.h>
#include <ddp/optimizer.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

constexpr std::size_t kSamples = 1000;
constexpr float kSlope = 3, kOffset = -1;

float x_of(std::size_t sample) { return static_cast<float>(sample) / kSamples; }
float y_of(std::size_t sample) { return kSlope * x_of(sample) + kOffset; }

/// The gradient of the mean squared error over `batch`, last parameter first, as a backward pass computes it.
void backward(ddp::DistributedDataParallel& model, std::span<const std::size_t> batch, float w, float b) {
    float& of_w = model.gradient_as<float>(0)[0];
    float& of_b = model.gradient_as<float>(1)[0];
    of_w = of_b = 0;
    for (const std::size_t sample : batch) {
        const float error = w * x_of(sample) + b - y_of(sample);
        of_w += 2 * error * x_of(sample) / static_cast<float>(batch.size());
        of_b += 2 * error / static_cast<float>(batch.size());
    }
    model.mark_ready(1);
    model.mark_ready(0);
    model.finish();
}

}  // namespace

int main() try {
    const ddp::Context context = ddp::Context::from_env();
    const auto group = ddp::ProcessGroup::create(context);

    // Every worker starts with other values; construction gives all of them rank 0's.
    std::vector<float> w = {static_cast<float>(group->rank())}, b = {0.5F};
    const std::vector<ddp::Tensor> parameters = {ddp::tensor_of("w", std::span(w), {1}),
                                                 ddp::tensor_of("b", std::span(b), {1})};
    ddp::DistributedDataParallel model(*group, parameters);
    const auto optimizer = ddp::make_sgd(parameters, {.learning_rate = 0.1, .momentum = 0.9});

    ddp::DistributedSampler sampler(kSamples, group->size(), group->rank(), {.seed = 1});
    for (std::uint64_t epoch = 0; epoch < 100; ++epoch) {
        sampler.set_epoch(epoch);
        const std::vector<std::size_t> mine = sampler.indices();
        constexpr std::size_t kBatch = 25;
        for (std::size_t at = 0; at + kBatch <= mine.size(); at += kBatch) {
            backward(model, std::span(mine).subspan(at, kBatch), w[0], b[0]);
            optimizer->step(model.gradients());
        }
    }

    model.verify_equal_parameters();  // throws when a single bit differs
    if (group->rank() == 0) std::printf("%d workers found y = %.3f x + %.3f\n", group->size(), w[0], b[0]);
    return std::abs(w[0] - kSlope) < 0.01F && std::abs(b[0] - kOffset) < 0.01F ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "linear_regression: %s\n", error.what());
    return 1;
}
