#include "ddp/epochs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ddp/stop_vote.h"
#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/failures.h"
#include "tests/workers/forked_ranks.h"

namespace ddp {
namespace {

using testing::ForkedRanks;
using ::testing::HasSubstr;
using testing::kRight;
using testing::thrown_by;

constexpr std::size_t kSamples = 20;

/// A line through the points of y = 2 x, trained by the program's own loop.
struct Line {
    explicit Line(World& world) : model(world, {{"slope", {1}}}) {}
    Line() : model({{"slope", {1}}}) {}  // for Epochs::run

    /// The mean loss of the rows; adds to the gradient.
    double backward(std::span<const std::size_t> rows, float share) {
        double loss = 0;
        for (const std::size_t row : rows) {
            const float x = static_cast<float>(row) / kSamples, error = (slope() - 2) * x;
            loss += error * error * share;
            model.gradient_as<float>(0)[0] += 2 * error * x * share;
        }
        return loss;
    }
    [[nodiscard]] float slope() const { return model.weights<float>(0)[0]; }

    Model model;
    std::unique_ptr<Optimizer> optimizer = make_adamw(model, {.learning_rate = 0.1});
};

World alone() { return World(Context(testing::environment_of(0, 1))); }

/// Trains until the run is over, or has made `steps` steps. Returns the rows of each step.
std::vector<std::vector<std::size_t>> train(World& world, Line& line, EpochsOptions options,
                                            std::uint64_t steps = UINT64_MAX) {
    options.report = [](const EpochReport&) {};
    std::vector<std::vector<std::size_t>> rows;
    Epochs epochs(world, line.model, *line.optimizer, kSamples, std::move(options));
    for (Epochs::Step& step : epochs) {
        if (step.steps_done() == steps) break;
        rows.emplace_back(step.rows().begin(), step.rows().end());
        step.finish(line.backward(step.rows(), step.share()));
    }
    return rows;
}

/// Runs `body` in two processes with a World each, and expects it to return kRight in both.
void expect_right_on_two(const std::function<int(World&)>& body) {
    const ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
    ForkedRanks ranks(2, [&](int rank) {
        ddprun::WorkerEnv env = testing::environment_of(rank, 2);
        env.segment_fd = fd.get();
        World world(Context(env), {.timeout = std::chrono::seconds(60)});
        return body(world);
    });
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(1), kRight);
}

TEST(Epochs, GiveEachRowOnceInEveryEpochInAnotherOrder) {
    World world = alone();
    Line line(world);
    const auto rows = train(world, line, {.epochs = 2, .batch_size = 8});
    ASSERT_EQ(rows.size(), 6U);
    std::vector<std::size_t> orders[2];
    for (std::size_t step = 0; step < 6; ++step)
        orders[step / 3].insert(orders[step / 3].end(), rows[step].begin(), rows[step].end());
    EXPECT_NE(orders[0], orders[1]);
    for (const auto& order : orders)
        EXPECT_EQ(std::set(order.begin(), order.end()).size(), kSamples) << order.size();
    EXPECT_EQ(rows[2].size(), 4U) << "the rest of an epoch is a smaller step";
}

TEST(Epochs, ResumeInTheMiddleOfAnEpochToTheBitsOfAnUndisturbedRun) {
    const ddprun::test::TemporaryDirectory directory;
    EpochsOptions options{.epochs = 3, .batch_size = 4, .save_every = 2, .clip_norm = 0.5};
    options.schedule = Schedule{.shape = Schedule::Shape::Cosine, .warmup_steps = 3};
    World world = alone();
    Line whole(world), broken(world), resumed(world);
    const auto all = train(world, whole, options);
    options.checkpoints = directory.file("run");
    train(world, broken, options, 7);  // one more than was saved
    const auto rest = train(world, resumed, options);
    EXPECT_EQ(rest, decltype(rest)(all.begin() + 6, all.end()));
    EXPECT_EQ(resumed.slope(), whole.slope());
    EXPECT_EQ(resumed.optimizer->learning_rate(), whole.optimizer->learning_rate());

    Line complete(world);
    EXPECT_TRUE(train(world, complete, options).empty()) << "a complete run has no step left";
    EXPECT_EQ(complete.slope(), whole.slope());
}

TEST(Epochs, KeepTheScheduleWhereTwoRanksResumeTheRunOfOne) {
    const ddprun::test::TemporaryDirectory directory;
    EpochsOptions options{.epochs = 4, .batch_size = 2, .checkpoints = directory.file("run")};
    options.schedule = Schedule{.shape = Schedule::Shape::Cosine};
    {
        World world = alone();
        Line line(world);
        train(world, line, options, 20);  // two epochs of ten steps
    }
    expect_right_on_two([&](World& world) {
        Line line(world);
        Epochs epochs(world, line.model, *line.optimizer, kSamples, options);
        const Schedule of_two{.shape = Schedule::Shape::Cosine, .total_steps = 20};  // five steps an epoch
        const double expected = rate_at(of_two, 0.1, 10);
        return epochs.steps_done() == 20 && line.optimizer->learning_rate() == expected ? kRight : 1;
    });
}

TEST(Epochs, ReportTheMeanLossAndTheLastRateOfTheSchedule) {
    World world = alone();
    Line line(world);
    std::vector<EpochReport> reports;
    EpochsOptions options{.epochs = 2, .batch_size = 8};
    options.schedule = Schedule{.shape = Schedule::Shape::Cosine};
    options.report = [&](const EpochReport& report) { reports.push_back(report); };
    Epochs epochs(world, line.model, *line.optimizer, kSamples, options);
    for (Epochs::Step& step : epochs) step.finish(step.size() == 8 ? 1 : 6);
    ASSERT_EQ(reports.size(), 2U);
    EXPECT_DOUBLE_EQ(reports[0].loss, (8 + 8 + 4 * 6) / 20.0);
    EXPECT_EQ(reports[1].epoch, 2U);
    EXPECT_EQ(reports[1].steps, 6U);
    EXPECT_EQ(reports[1].learning_rate, 0);
    EXPECT_EQ(epochs.last_report().epoch, 2U);
    EXPECT_THAT(describe(EpochReport{.epoch = 3, .epochs = 20, .loss = 0.25, .samples_per_second = 512}),
                HasSubstr("epoch 3 of 20: loss 0.25, 512 samples/s"));
    EXPECT_THAT(describe(EpochReport{.epoch = 3, .epochs = 20}), HasSubstr("of 20: 0 samples/s"));
}

/// One float a sample: its index.
class Indices final : public Dataset {
  public:
    [[nodiscard]] std::size_t size() const override { return kSamples; }
    [[nodiscard]] std::vector<std::size_t> field_bytes() const override { return {sizeof(float)}; }
    void read(std::size_t index, std::span<const std::span<std::byte>> fields) const override {
        const auto value = static_cast<float>(index);
        std::memcpy(fields[0].data(), &value, sizeof value);
    }
};

TEST(Epochs, DeliverBatchesOfADatasetInTheOrderOfTheRows) {
    World world = alone();
    Line by_rows(world), by_batches(world);
    const EpochsOptions options{.epochs = 2, .batch_size = 8, .report = [](const EpochReport&) {}};
    const auto rows = train(world, by_rows, options);
    const Indices dataset;
    Epochs epochs(world, by_batches.model, *by_batches.optimizer, dataset, options);
    std::vector<std::vector<std::size_t>> seen;
    for (Epochs::Step& step : epochs) {
        const std::span<const float> values = step.batch().field<float>(0);
        seen.emplace_back(values.begin(), values.end());
        step.finish();
    }
    EXPECT_EQ(seen, rows);
}

TEST(Epochs, EndTheScheduleWithTheLastWholeBatchWhereTheLoaderDropsTheRest) {
    World world = alone();
    Line line(world);
    const Indices dataset;
    EpochsOptions options{.epochs = 3, .batch_size = 8, .report = [](const EpochReport&) {}};
    options.loader.drop_last = true;
    options.schedule = Schedule{.shape = Schedule::Shape::Cosine};
    Epochs epochs(world, line.model, *line.optimizer, dataset, options);
    for (Epochs::Step& step : epochs) step.finish();
    EXPECT_EQ(epochs.steps_done(), 6U);
    EXPECT_EQ(line.optimizer->learning_rate(), 0);
}

TEST(Epochs, NameAStepThatWasNotFinishedOrFinishedTwice) {
    World world = alone();
    Line line(world);
    Epochs epochs(world, line.model, *line.optimizer, kSamples, EpochsOptions{.epochs = 1});
    auto step = epochs.begin();
    EXPECT_EQ(thrown_by([&] { ++step; }),
              "Error: rank 0: the loop went on after step 0 without Step::finish()");
    EXPECT_THAT(thrown_by([&] { (void)(*step).batch(); }), HasSubstr("made without a Dataset"));
    (*step).finish();
    EXPECT_EQ(thrown_by([&] { (*step).finish(); }),
              "Error: rank 0: Step::finish() was called twice after step 1");
    EXPECT_EQ(thrown_by([&] { Epochs(world, line.model, *line.optimizer, 0, EpochsOptions{}); }),
              "InvalidInput: epochs: there are no samples");
}

TEST(Epochs, RefuseRanksWithOtherNumbersOfSamples) {
    expect_right_on_two([](World& world) {
        Line line(world);
        const std::size_t samples = 20 + static_cast<std::size_t>(world.rank());
        const std::string what =
            thrown_by([&] { Epochs(world, line.model, *line.optimizer, samples, EpochsOptions{}); });
        return what == "Error: number of samples is 21 on rank 1, 20 on rank 0" ? kRight : 1;
    });
}

TEST(Epochs, RefuseRanksWithOtherOptionsThatChangeTheNumbers) {
    struct Difference {
        std::string name;
        std::function<void(EpochsOptions&, AdamWOptions&)> make;
    };
    static const Difference kDifferences[] = {
        {"clip_norm is 0.5 on rank 1, 1 on rank 0", [](auto& o, auto&) { o.clip_norm = 0.5; }},
        {"clip_norm is none on rank 1", [](auto& o, auto&) { o.clip_norm.reset(); }},
        {"schedule is shape", [](auto& o, auto&) { o.schedule->warmup_steps = 2; }},
        {"schedule is none on rank 1", [](auto& o, auto&) { o.schedule.reset(); }},
        {"sampler shuffle is false on rank 1", [](auto& o, auto&) { o.sampler.shuffle = false; }},
        {"sampler drop_last is true on rank 1", [](auto& o, auto&) { o.sampler.drop_last = true; }},
        {"loader drop_last is true on rank 1", [](auto& o, auto&) { o.loader.drop_last = true; }},
        {"initial learning rate is 0.2 on rank 1, 0.1 on rank 0",
         [](auto&, auto& a) { a.learning_rate = 0.2; }},
        {"optimizer is adamw with", [](auto&, auto& a) { a.weight_decay = 0.5; }},
        {"optimizer is adamw with",
         [](auto&, auto& a) {
             a.groups = {{{"slope"}, std::nullopt, 0.5}};
         }},
        {"checkpoint asynchronous is true on rank 1",
         [](auto& o, auto&) { o.checkpoint.asynchronous = true; }},
        {"parts is without counter", [](auto& o, auto&) { o.parts = {{"counter"}}; }}};
    expect_right_on_two([](World& world) {
        for (const auto& [name, make] : kDifferences) {
            EpochsOptions options{.clip_norm = 1, .schedule = Schedule{}};
            AdamWOptions adamw{.learning_rate = 0.1};
            if (world.rank() == 1) make(options, adamw);
            Line line(world);
            const auto optimizer = make_adamw(line.model, adamw);
            const std::string what =
                thrown_by([&] { Epochs(world, line.model, *optimizer, kSamples, options); });
            if (!what.starts_with("Error: " + name)) {
                ADD_FAILURE() << name << ": " << what;
                return 1;
            }
        }
        return kRight;
    });
}

/// State of the program's own.
struct Counter final : Stateful {
    mutable std::int64_t n = 0;
    [[nodiscard]] std::vector<Tensor> state() const override { return {{"n", {}, {&n, 1, DType::I64, {}}}}; }
};

/// Where a rank is lost in the first generation.
struct Loss {
    enum class In { Nothing, Step, AfterStep, Report } in = In::Nothing;
    int rank = 0;
    std::uint64_t at = 0;  ///< steps done, or the epoch of the report
};

struct Recovered {
    float slope = 0;
    std::vector<std::size_t> rows;  ///< of rank 0, in finished steps
    EpochReport report;
    std::int64_t counted_steps = 0;
    int generations = 0;
};

/// Trains three ranks by Epochs::run, of which one may be lost.
Recovered train_recovering(const Loss& loss, const EpochsOptions& of_all, const Dataset* dataset = nullptr) {
    Recovered result;
    result.generations = testing::run_recovering(3, [&](const Context& context) {
        World world(context, {.timeout = std::chrono::seconds(20)});
        const auto lose = [&](Loss::In in, std::uint64_t at) {
            if (in == loss.in && at == loss.at && world.rank() == loss.rank &&
                world.context().generation() == 1)
                throw Error("lost");
        };
        EpochsOptions options = of_all;
        options.report = [&](const EpochReport& report) { lose(Loss::In::Report, report.epoch); };
        Line line;
        Counter counter;
        options.parts = {{"counter", &counter}};
        std::optional<Epochs> epochs;
        if (dataset != nullptr) epochs.emplace(world, line.model, *line.optimizer, *dataset, options);
        else epochs.emplace(world, line.model, *line.optimizer, kSamples, options);
        std::vector<std::size_t> rows;
        epochs->run([&](Epochs::Step& step) {
            rows.assign(step.rows().begin(), step.rows().end());
            if (dataset != nullptr) {
                const auto values = step.batch().field<float>(0);
                rows.assign(values.begin(), values.end());
            }
            const double mean = line.backward(rows, step.share());
            ++counter.n;
            lose(Loss::In::Step, step.steps_done());
            world.group().barrier().wait();  // of the generation
            step.finish(mean);
            lose(Loss::In::AfterStep, step.steps_done());
            if (world.rank() == 0) result.rows.insert(result.rows.end(), rows.begin(), rows.end());
        });
        if (world.rank() == 0) {
            result.slope = line.slope();
            result.report = epochs->last_report();
            result.counted_steps = counter.n;
        }
    });
    return result;
}

TEST(Epochs, LoseNoStepWhereverARankIsLost) {
    const Indices dataset;
    for (const Dataset* source :
         {static_cast<const Dataset*>(nullptr), static_cast<const Dataset*>(&dataset)}) {
        const auto with = [&](const Loss& loss) {
            const ddprun::test::TemporaryDirectory directory;
            EpochsOptions options{.epochs = 3, .batch_size = 2, .save_every = 3, .clip_norm = 0.5};
            options.schedule = Schedule{.shape = Schedule::Shape::Cosine, .warmup_steps = 3};
            options.checkpoints = directory.file("run");
            return train_recovering(loss, options, source);
        };
        const Recovered whole = with({});
        EXPECT_EQ(whole.generations, 1);
        EXPECT_EQ(whole.report.steps, 12U);  // seven rows a rank are four steps
        using enum Loss::In;
        for (const Loss& loss : {Loss{Step, 1, 0},
                                 {Step, 0, 2},
                                 {Step, 2, 3},
                                 {Step, 1, 4},
                                 {Step, 0, 11},
                                 {AfterStep, 1, 4},
                                 {AfterStep, 2, 8},
                                 {Report, 1, 1},
                                 {Report, 0, 3}}) {
            const Recovered disturbed = with(loss);
            const std::string where =
                std::to_string(static_cast<int>(loss.in)) + " at " + std::to_string(loss.at);
            EXPECT_EQ(disturbed.generations, 2) << where;
            EXPECT_EQ(disturbed.slope, whole.slope) << where;
            EXPECT_EQ(disturbed.rows, whole.rows) << where;
            EXPECT_EQ(disturbed.report.steps, whole.report.steps) << where;
            EXPECT_EQ(disturbed.counted_steps, 12) << where;
            EXPECT_EQ(disturbed.report.learning_rate, whole.report.learning_rate) << where;
            // The mean of the epoch in which a process was lost may lack this process's last step.
            const bool is_earlier = loss.in == Step ? loss.at < 8 : loss.at < 3;
            if (is_earlier) {
                EXPECT_EQ(disturbed.report.loss, whole.report.loss) << where;
            }
        }
    }
}

TEST(Epochs, SaveAnEpochWhereARankIsLostBetweenItsEndAndItsSave) {
    const ddprun::test::TemporaryDirectory directory;
    const EpochsOptions options{
        .epochs = 3, .batch_size = 2, .checkpoints = directory.file("run"), .checkpoint = {.keep = 3}};
    EXPECT_EQ(train_recovering({Loss::In::Report, 1, 1}, options).generations, 2);
    for (const std::string step : {"000004", "000008", "000012"})
        EXPECT_EQ(load_state(directory.file("run/step-" + step)).step, std::stoul(step));
}

TEST(Epochs, ThatStopEarlyEndTheProgramAsUnfinished) {
    const auto code_of_run = [](bool is_stopped) {
        return run([&](World& world) {
            Line line(world);
            Epochs epochs(world, line.model, *line.optimizer, kSamples, {.epochs = 3, .batch_size = 2});
            for (Epochs::Step& step : epochs) {
                if (is_stopped && step.steps_done() == 1) ::raise(SIGTERM);
                step.finish(line.backward(step.rows(), step.share()));
            }
        });
    };
    EXPECT_EQ(code_of_run(true), kStoppedEarly);
    EXPECT_EQ(code_of_run(false), 0);
}

TEST(Epochs, RunOnlyWithAWholeModelThatHasNoGroupYet) {
    World world = alone();
    Line grouped(world), line;
    Epochs with_group(world, grouped.model, *grouped.optimizer, kSamples, EpochsOptions{});
    EXPECT_THAT(thrown_by([&] { with_group.run([](Epochs::Step&) {}); }),
                HasSubstr("InvalidInput: epochs: run() makes the groups: make the model without the world"));
    World fresh = alone();
    Model sharded({{"slope", {4}}}, {.shard = Shard::Optimizer});
    Epochs of_parts(fresh, sharded, *line.optimizer, kSamples, EpochsOptions{});
    EXPECT_THAT(
        thrown_by([&] { of_parts.run([](Epochs::Step&) {}); }),
        HasSubstr("InvalidInput: epochs: run() cannot give a new process the weights of a sharded model"));
    Epochs without(world, line.model, *line.optimizer, kSamples, EpochsOptions{});
    EXPECT_THAT(
        thrown_by([&] { without.begin(); }),
        HasSubstr("InvalidInput: epochs: the model has no group: make it with the world, or call run()"));
}

TEST(Epochs, StopAndSaveOnAllRanksAfterTheSameStepWhenOneGetsSigterm) {
    const ddprun::test::TemporaryDirectory directory;
    expect_right_on_two([&](World& world) {
        Line line(world);
        EpochsOptions options{.epochs = 1000, .batch_size = 2, .report = [](const EpochReport&) {}};
        options.checkpoints = directory.file("run");
        Epochs epochs(world, line.model, *line.optimizer, kSamples, options);
        for (Epochs::Step& step : epochs) {
            if (world.rank() == 1 && step.steps_done() == 8) ::raise(SIGTERM);
            step.finish(line.backward(step.rows(), step.share()));
        }
        const auto saved = load_state(*CheckpointDirectory(directory.file("run")).latest());
        // Either way: the request travels with the gradients of the step after the one that was going on.
        const bool is_early = epochs.steps_done() >= 9 && epochs.steps_done() <= 11;
        return epochs.stopped() && is_early && saved.step == epochs.steps_done() ? kRight : 1;
    });
}

TEST(StopVote, PassesAtTheSameStepOnAllRanks) {
    std::array<int, 3> steps{};
    testing::run_ranks(3, [&](ProcessGroup& group) {
        StopVote vote(group);
        int& step = steps[static_cast<std::size_t>(group.rank())];
        const auto wanted = [&] { return group.rank() == 2 && step >= 3; };
        while (!vote.passed(wanted)) ++step;
        EXPECT_TRUE(vote.passed([] { return false; })) << "a vote that has passed stays so";
    });
    EXPECT_GE(steps[0], 3);
    EXPECT_EQ(steps, (std::array<int, 3>{steps[0], steps[0], steps[0]}));
}

}  // namespace
}  // namespace ddp
