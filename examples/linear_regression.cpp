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
#include <memory>
#include <span>
#include <vector>

namespace {

constexpr std::size_t kSamples = 1000;
constexpr float kSlope = 3, kOffset = -1;

float x_of(std::size_t sample) { return static_cast<float>(sample) / kSamples; }
float y_of(std::size_t sample) { return kSlope * x_of(sample) + kOffset; }

/// A line with the state of its training. Every worker starts with another slope.
struct Line {
    explicit Line(const ddp::Context& context)
        : w{static_cast<float>(context.rank())},
          sampler(kSamples, context.world_size(), context.rank(), {.seed = 1}) {}

    /// The gradient of the mean squared error over `batch`, last parameter first, as a backward pass computes
    /// it.
    void backward(ddp::DistributedDataParallel& model, std::span<const std::size_t> batch) const {
        float& of_w = model.gradient_as<float>(0)[0];
        float& of_b = model.gradient_as<float>(1)[0];
        of_w = of_b = 0;
        for (const std::size_t sample : batch) {
            const float error = w[0] * x_of(sample) + b[0] - y_of(sample);
            of_w += 2 * error * x_of(sample) / static_cast<float>(batch.size());
            of_b += 2 * error / static_cast<float>(batch.size());
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
    }

    /// Trains on from the sampler's position.
    void train(ddp::ProcessGroup& group) {
        ddp::DistributedDataParallel model(group, parameters);  // gives all workers rank 0's values
        for (; sampler.epoch() < 100; sampler.next_epoch()) {
            const std::vector<std::size_t> mine = sampler.indices();
            constexpr std::size_t kBatch = 25;
            for (std::size_t at = 0; at + kBatch <= mine.size(); at += kBatch) {
                backward(model, std::span(mine).subspan(at, kBatch));
                optimizer->step(model.gradients());
            }
        }
        model.verify_equal_parameters();  // throws when a single bit differs
    }

    std::vector<float> w, b = {0.5F};
    const std::vector<ddp::Tensor> parameters = {ddp::tensor_of("w", std::span(w), {1}),
                                                 ddp::tensor_of("b", std::span(b), {1})};
    std::unique_ptr<ddp::Optimizer> optimizer =
        ddp::make_sgd(parameters, {.learning_rate = 0.1, .momentum = 0.9});
    ddp::DistributedSampler sampler;
};

}  // namespace

int main() try {
    const ddp::Context context = ddp::Context::from_env();
    Line line(context);
    const auto group = ddp::ProcessGroup::create(context);
    line.train(*group);
    const float w = line.w[0], b = line.b[0];
    if (context.rank() == 0) std::printf("%d workers found y = %.3f x + %.3f\n", context.world_size(), w, b);
    return std::abs(w - kSlope) < 0.01F && std::abs(b - kOffset) < 0.01F ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "linear_regression: %s\n", error.what());
    return 1;
}
