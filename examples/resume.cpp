// A training run that stops in the middle of an epoch and resumes without a difference: one checkpoint holds
// model, optimizer, schedule and position in the data, listed once so that none is forgotten.
//
//     ddprun --nproc-per-node=4 ./resume
//
// Exits 0 when the resumed run ends with the same bits as an uninterrupted one, 1 otherwise.

#include <ddp/checkpoint.h>
#include <ddp/loader.h>
#include <ddp/model.h>
#include <ddp/optimizer.h>
#include <ddp/run.h>
#include <ddp/sampler.h>
#include <ddp/schedule.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace {

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

struct Run {
    explicit Run(ddp::ProcessGroup& group)
        : model(group, {{"w", {1}}, {"b", {1}}}),
          sampler(points.size(), group.size(), group.rank(), {.seed = 1}) {}

    [[nodiscard]] float w() const { return model.weights<float>(0)[0]; }
    [[nodiscard]] float b() const { return model.weights<float>(1)[0]; }

    void learn(std::span<const float> batch) {
        model.zero_gradients();
        const auto count = static_cast<float>(batch.size() / 2);
        for (std::size_t i = 0; i < batch.size(); i += 2) {
            const float error = w() * batch[i] + b() - batch[i + 1];
            model.gradient_as<float>(0)[0] += 2 * error * batch[i] / count;
            model.gradient_as<float>(1)[0] += 2 * error / count;
        }
        model.mark_ready(1);
        model.mark_ready(0);
        model.finish();
        optimizer->step();
        rate.step();
    }

    /// Trains; false when it stopped after `steps` steps in all.
    bool train(std::uint64_t epochs, std::uint64_t steps) {
        for (; sampler.epoch() < epochs; sampler.next_epoch()) {
            ddp::Loader loader(points, sampler, {.batch_size = 16});  // the rest of the epoch
            while (optimizer->steps() < steps) {
                const ddp::Batch* batch = loader.next();
                if (batch == nullptr) break;
                learn(batch->field<float>(0));
            }
            if (optimizer->steps() >= steps) return false;
        }
        return true;
    }

    const Points points;
    ddp::Model model;
    std::unique_ptr<ddp::Optimizer> optimizer = ddp::make_adamw(model, {.learning_rate = 0.1});
    ddp::ScheduledRate rate{*optimizer,
                            {.shape = ddp::Schedule::Shape::Cosine, .warmup_steps = 5, .total_steps = 200}};
    ddp::DistributedSampler sampler;
    const ddp::Training training{model, *optimizer, sampler, {{"schedule", &rate}}};
};

bool run(ddp::ProcessGroup& group, const std::string& directory) {
    constexpr std::uint64_t kEpochs = 3, kStop = 20, kNever = UINT64_MAX;
    Run whole(group);
    whole.train(kEpochs, kNever);

    ddp::CheckpointDirectory checkpoints(directory);
    Run first(group);
    const bool is_done = first.train(kEpochs, kStop);
    checkpoints.save(group, first.training);
    Run second(group);
    const bool is_found = checkpoints.load(group, second.training).has_value();
    const std::uint64_t epoch = second.sampler.epoch(), consumed = second.sampler.state().consumed;
    second.train(kEpochs, kNever);

    const std::string sum = second.model.verify_equal_parameters();
    if (group.rank() == 0)
        std::printf(
            "%d workers: stopped in epoch %d behind %d samples; ended after %d steps with y = %.4f x + %.4f, sha256 %s\n",
            group.size(), static_cast<int>(epoch), static_cast<int>(consumed),
            static_cast<int>(second.optimizer->steps()), second.w(), second.b(), sum.c_str());
    return !is_done && is_found && sum == whole.model.verify_equal_parameters();
}

int run_in_scratch(ddp::World& world) {
    std::string directory = "used by rank 0 only";
    if (world.rank() == 0) {
        directory = std::filesystem::temp_directory_path() / "ddp-resume-XXXXXX";
        if (::mkdtemp(directory.data()) == nullptr) throw ddp::FileError(directory + ": cannot be made");
    }
    const bool is_right = run(world, directory);
    if (world.rank() == 0) std::filesystem::remove_all(directory);
    return is_right ? 0 : 1;
}

}  // namespace

int main() { return ddp::run(run_in_scratch); }
