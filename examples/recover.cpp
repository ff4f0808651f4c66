// A training run that loses one of its processes and goes on: the lost rank is started again and gets the
// state of the others, which keep their processes, and no step is lost (docs/recovery.md).
//
//     ddprun --nproc-per-node=4 ./recover
//
// The last rank kills itself in the middle of the run. Exits 0 when the run ends with the same bits as an
// undisturbed one, 1 otherwise.

#include <ddp/context.h>
#include <ddp/ddp.h>
#include <ddp/loader.h>
#include <ddp/optimizer.h>
#include <ddp/process_group.h>
#include <ddp/recovery.h>
#include <ddp/sampler.h>
#include <ddp/schedule.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace {

constexpr std::uint64_t kEpochs = 3, kLostStep = 20;

/// Points of y = 3 x - 1.
class Points final : public ddp::Dataset {
  public:
    [[nodiscard]] std::size_t size() const override { return 1000; }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override { return {2 * sizeof(float)}; }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        const float x = static_cast<float>(index) / 1000, point[2] = {x, 3 * x - 1};
        std::memcpy(fields[0].data(), point, sizeof point);
    }
};

/// What outlives a generation of the world.
struct Run {
    explicit Run(const ddp::Context& context)
        : sampler(points.size(), context.world_size(), context.rank(), {.seed = 1}) {}

    std::vector<ddp::Tensor> parameters() {
        return {ddp::tensor_of("w", w, {1}), ddp::tensor_of("b", b, {1})};
    }

    void keep_in(ddp::Recovery& recovery) {
        recovery.keep("weights", parameters());
        recovery.keep("optimizer", *optimizer);
        recovery.keep("schedule", rate);
        recovery.keep("sampler", sampler);
    }

    void backward(ddp::DistributedDataParallel& model, std::span<const float> batch) {
        model.zero_gradients();
        const auto count = static_cast<float>(batch.size() / 2);
        for (std::size_t i = 0; i < batch.size(); i += 2) {
            const float error = w[0] * batch[i] + b[0] - batch[i + 1];
            model.gradient_as<float>(0)[0] += 2 * error * batch[i] / count;
            model.gradient_as<float>(1)[0] += 2 * error / count;
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
    }

    /// Trains to the end, from wherever the state is. `commit` calls the step's change once.
    void train(ddp::ProcessGroup& group, bool is_new,
               const std::function<void(const std::function<void()>& change)>& commit) {
        ddp::DistributedDataParallel model(group, parameters(), {.broadcast_parameters = is_new});
        for (; sampler.epoch() < kEpochs; sampler.next_epoch()) {
            ddp::Loader loader(points, sampler, {.batch_size = 16});  // the rest of the epoch
            while (const ddp::Batch* batch = loader.next()) {
                backward(model, batch->field<float>(0));
                commit([&] {
                    optimizer->step(model.gradients());
                    rate.step();
                });
            }
        }
    }

    const Points points;
    std::vector<float> w = {0}, b = {0};
    std::unique_ptr<ddp::Optimizer> optimizer = ddp::make_adamw(parameters(), {.learning_rate = 0.1});
    ddp::ScheduledRate rate{*optimizer,
                            {.shape = ddp::Schedule::Shape::Cosine, .warmup_steps = 5, .total_steps = 200}};
    ddp::DistributedSampler sampler;
};

bool run(ddp::Recovery& recovery) {
    Run disturbed(recovery.context());
    disturbed.keep_in(recovery);
    ddp::Start start;
    recovery.run([&](ddp::ProcessGroup& group, const ddp::Start& now) {
        start = now;
        const bool is_lost = now.is_new() && recovery.refusal().empty() && group.size() > 1 &&
                             group.rank() == group.size() - 1;
        disturbed.train(group, now.is_new(), [&](const std::function<void()>& change) {
            if (is_lost && recovery.commits() == kLostStep) std::raise(SIGKILL);
            recovery.commit(change);
        });
    });

    const auto group = ddp::ProcessGroup::create(recovery.context());
    Run undisturbed(recovery.context());
    undisturbed.train(*group, true, [](const std::function<void()>& change) { change(); });
    group->barrier().wait();
    if (group->rank() == 0) {
        std::printf("%d workers: %d steps in %s; ended with y = %.4f x + %.4f\n", group->size(),
                    static_cast<int>(recovery.commits()),
                    start.is_new() ? "one generation" : "two generations, rank 0 is the process of the first",
                    disturbed.w[0], disturbed.b[0]);
    }
    return disturbed.w == undisturbed.w && disturbed.b == undisturbed.b &&
           recovery.commits() == disturbed.optimizer->steps();
}

}  // namespace

int main() try {
    ddp::Recovery recovery(ddp::Context::from_env());
    if (!recovery.refusal().empty() && recovery.context().rank() == 0)
        std::printf("no rank kills itself: %s\n", recovery.refusal().c_str());
    return run(recovery) ? 0 : 1;
} catch (const std::exception& error) {
    std::fprintf(stderr, "recover: %s\n", error.what());
    return 1;
}
