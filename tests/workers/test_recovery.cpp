#include "ddp/recovery.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>
#include <set>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/loader.h"
#include "ddp/objects.h"
#include "ddp/optimizer.h"
#include "ddp/sampler.h"
#include "ddp/schedule.h"
#include "ddp/testing.h"
#include "failures.h"

namespace ddp {
namespace {

using testing::run_recovering;
using Workers = testing::RecoveringOptions::Workers;

/// Points of y = 3 x - 1.
class Points final : public Dataset {
  public:
    [[nodiscard]] std::size_t size() const override { return 96; }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override { return {sizeof(float)}; }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        const float x = static_cast<float>(index) / 96;
        std::memcpy(fields[0].data(), &x, sizeof x);
    }
};

/// Points in a training run at which a test can interrupt it.
enum class Point { UnitBegin, Backward, BeforeFinish, BeforeCommit, InCommit, AfterCommit };

/// Called at every point with the rank, the generation and the number of commits.
using Interrupt = std::function<void(Point, int rank, std::uint64_t generation, std::uint64_t commits)>;

/// A training run with state of every kind; every rank ends with the same weights.
class Training3 {
  public:
    Training3(const Context& context, Interrupt interrupt)
        : context_(context), interrupt_(std::move(interrupt)), rng_(static_cast<unsigned>(context.rank())) {
        recovery_.keep("weights", parameters());
        recovery_.keep("optimizer", *optimizer_);
        recovery_.keep("schedule", rate_);
        recovery_.keep_value("losses", losses_);
        recovery_.keep_value("position", position_, Recovery::Kind::Moving);
        recovery_.keep_value("rng", rng_, Recovery::Kind::Own);
        recovery_.keep_value("noise", noise_, Recovery::Kind::Own);
    }

    void run() {
        recovery_.run([this](ProcessGroup& group, const Start& start) { train(group, start); });
    }

    /// Everything that a recovery must restore.
    [[nodiscard]] std::string digest() const {
        std::string digest;
        for (const float one : w_) digest += fmt::format("{:a} ", one);
        const std::string noise = fmt::format("{:a}", noise_);
        return fmt::format("{}{} losses, noise {}, rng {}, {} commits, position {}", digest, losses_.size(),
                           noise, std::mt19937_64(rng_)(), recovery_.commits(), position_);
    }

  private:
    std::vector<Tensor> parameters() { return {tensor_of("w", w_, {4})}; }
    void reach(Point point) {
        interrupt_(point, context_.rank(), recovery_.context().generation(), recovery_.commits());
    }

    void train(ProcessGroup& group, const Start& start) {
        DistributedDataParallel model(group, parameters(), {.broadcast_parameters = start.is_new()});
        const auto part = group.split(group.rank() % 2, 0);
        while (losses_.size() < 12) {
            reach(Point::UnitBegin);
            model.zero_gradients();
            position_ += 3;  // as a loader does
            const double draw = std::uniform_real_distribution<double>(-1, 1)(rng_);
            noise_ += draw;
            const auto gradient = model.gradient_as<float>(0);
            for (std::size_t i = 0; i < 4; ++i)
                gradient[i] = w_[i] - static_cast<float>(static_cast<double>(i + position_) + 0.1 * draw);
            reach(Point::Backward);
            double loss = std::abs(draw);
            group.all_reduce(buffer_of(std::span(&loss, 1))).wait();
            part->barrier().wait();
            recovery_.prepare();
            model.mark_ready(0);
            reach(Point::BeforeFinish);
            model.finish();
            reach(Point::BeforeCommit);
            recovery_.commit([&] {
                optimizer_->step(model.gradients());
                reach(Point::InCommit);
                rate_.step();
                losses_.push_back(loss);
            });
            reach(Point::AfterCommit);
        }
    }

    Context context_;
    Interrupt interrupt_;
    std::vector<float> w_ = {0, 0, 0, 0};
    std::unique_ptr<Optimizer> optimizer_ = make_adamw(parameters(), {.learning_rate = 0.1});
    ScheduledRate rate_{*optimizer_, {.shape = Schedule::Shape::Cosine, .total_steps = 12}};
    std::vector<double> losses_;
    std::uint64_t position_ = 0;
    std::mt19937_64 rng_;
    double noise_ = 0;
    Recovery recovery_{context_, {.timeout = std::chrono::seconds(20)}};
};

struct Outcome {
    std::vector<std::string> digests;  ///< by rank
    int generations = 0;
    bool operator==(const Outcome&) const = default;
};

/// Runs the training with processes that `interrupt` may kill.
Outcome train_interrupted(int ranks, const Interrupt& interrupt) {
    const std::filesystem::path directory =
        std::filesystem::temp_directory_path() / fmt::format("test-recovery-{}", ::getpid());
    std::filesystem::create_directory(directory);
    Outcome outcome;
    outcome.generations = run_recovering(ranks,
                                         [&](const Context& context) {
                                             Training3 training(context, interrupt);
                                             training.run();
                                             std::ofstream(directory / std::to_string(context.rank()))
                                                 << training.digest();
                                         },
                                         {.workers = Workers::Processes});
    for (int rank = 0; rank < ranks; ++rank) {
        std::string& digest = outcome.digests.emplace_back();
        std::ifstream file(directory / std::to_string(rank));
        std::getline(file, digest);
    }
    std::filesystem::remove_all(directory);
    return outcome;
}

const Interrupt kUndisturbed = [](Point, int, std::uint64_t, std::uint64_t) {};

void kill_this_process() { ::kill(::getpid(), SIGKILL); }

TEST(Recovery, EndsWithTheBitsOfAnUndisturbedRunWhenARankIsKilledInAnAllReduce) {
    const Outcome undisturbed = train_interrupted(3, kUndisturbed);
    EXPECT_EQ(undisturbed.generations, 1);
    const Outcome disturbed =
        train_interrupted(3, [](Point point, int rank, std::uint64_t generation, std::uint64_t commits) {
            if (point == Point::BeforeFinish && rank == 1 && generation == 1 && commits == 5)
                kill_this_process();
        });
    EXPECT_EQ(disturbed.generations, 2);
    EXPECT_EQ(disturbed.digests, undisturbed.digests);
}

}  // namespace
}  // namespace ddp
