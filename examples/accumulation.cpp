// Gradient accumulation: four small batches make one step, for a model whose memory allows small batches
// only. The first three send nothing, and the step equals that of the large batch.
//
//     ddprun --nproc-per-node=4 ./accumulation
//
// Exits 0 when the small batches have found the same line as the large one and sent a quarter as often, 1
// otherwise.

#include <ddp/ddp.h>
#include <ddp/optimizer.h>
#include <ddp/run.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int kSteps = 60, kBatch = 32, kParts = 4;

/// y = 3 x - 1.
struct Line {
    explicit Line(ddp::ProcessGroup& group)
        : model(group, {ddp::tensor_of("w", w, {1}), ddp::tensor_of("b", b, {1})}) {}

    /// Adds the gradients of `count` samples to the stored ones, as parts of a mean over kBatch.
    void backward(int first, int count) {
        for (int sample = first; sample < first + count; ++sample) {
            const float x = static_cast<float>(sample % 97) / 97, error = w[0] * x + b[0] - (3 * x - 1);
            model.gradient_as<float>(0)[0] += 2 * error * x / kBatch;
            model.gradient_as<float>(1)[0] += 2 * error / kBatch;
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
    }

    void train(int rank, int parts) {
        const auto optimizer =
            ddp::make_sgd({model.parameters().begin(), model.parameters().end()}, {.learning_rate = 0.5});
        for (int step = 0; step < kSteps; ++step) {
            const int first = (step * 16 + rank) * kBatch;
            model.zero_gradients();  // gradients keep their values between steps, and backward adds to them
            for (int part = 0; part < parts; ++part) {
                const auto accumulating = model.no_sync(part + 1 < parts);
                backward(first + part * kBatch / parts, kBatch / parts);
            }
            optimizer->step(model.gradients());
        }
    }

    std::vector<float> w = {0}, b = {0};
    ddp::DistributedDataParallel model;
};

int compare(ddp::World& world) {
    Line at_once(world), in_parts(world);
    at_once.train(world.rank(), 1);
    in_parts.train(world.rank(), kParts);

    in_parts.model.verify_equal_parameters();  // throws when a single bit differs
    const bool is_same =
        std::abs(at_once.w[0] - in_parts.w[0]) < 1e-4F && std::abs(at_once.b[0] - in_parts.b[0]) < 1e-4F;
    const bool is_quiet = in_parts.model.statistics().steps == at_once.model.statistics().steps;
    if (world.rank() == 0)
        std::printf(
            "%d workers: y = %.4f x + %.4f at once, y = %.4f x + %.4f in %d parts, %d averages each\n",
            world.size(), at_once.w[0], at_once.b[0], in_parts.w[0], in_parts.b[0], kParts,
            static_cast<int>(in_parts.model.statistics().steps));
    return is_same && is_quiet ? 0 : 1;
}

}  // namespace

int main() { return ddp::run(compare); }
