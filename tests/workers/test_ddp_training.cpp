// Tests of the state of a training run, which all ranks save and load together.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "ddp/checkpoint.h"
#include "ddp/ddp.h"
#include "ddp/optimizer.h"
#include "ddp/testing.h"
#include "tests/support/temporary_directory.h"
#include "tests/workers/on_nodes.h"

namespace {

using ddp::CheckpointDirectory;
using ddp::DistributedDataParallel;
using ddp::DistributedSampler;
using ddp::ProcessGroup;
using ddp::Tensor;
using ddp::Training;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;
using ddprun::test::TemporaryDirectory;

/// A number in the program's state, such as a schedule's step.
struct Counter : ddp::Stateful {
    mutable std::int64_t value = 0;
    int loads = 0;
    std::vector<Tensor> state() const override { return {{"value", {}, {&value, 1, ddp::DType::I64, {}}}}; }
    void state_loaded() override { ++loads; }
};

/// One parameter, trained by AdamW on gradients of one.
struct Job {
    explicit Job(ProcessGroup& group, std::size_t width = 3)
        : w(width, 1.0F), model(group, parameters()), sampler(100, group.size(), group.rank(), {.seed = 1}) {}
    std::vector<Tensor> parameters() {
        return {ddp::tensor_of("w", std::span(w), {static_cast<std::int64_t>(w.size())})};
    }
    void step() {
        for (float& slope : model.gradient_as<float>(0)) slope = 1;
        model.mark_ready(0);
        model.finish();
        adamw->step(model.gradients());
        sampler.advance(5);
        ++counter.value;
    }
    Training training() { return {model, *adamw, sampler, {{"counter", &counter}}}; }

    std::vector<float> w;
    DistributedDataParallel model;
    std::unique_ptr<ddp::Optimizer> adamw = ddp::make_adamw(parameters(), {.learning_rate = 0.1});
    DistributedSampler sampler;
    Counter counter;
};

std::string message_of(const std::function<void()>& act) {
    try {
        act();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "nothing";
}
std::string message_of(const std::exception_ptr& failure) {
    return message_of([&] {
        if (failure) std::rethrow_exception(failure);
    });
}

void save_after_two_steps(const TemporaryDirectory& place) {
    run_ranks(2, [&](ProcessGroup& group) {
        Job job(group);
        job.step();
        job.step();
        CheckpointDirectory(place.path()).save(group, job.training(), {{"note", "mine"}});
    });
}

TEST(Training, ResumesOnEveryRankWithoutADifference) {
    const TemporaryDirectory place;
    std::vector<float> whole;
    run_ranks(2, [&](ProcessGroup& group) {
        Job job(group);
        for (int t = 0; t < 4; ++t) job.step();
        if (group.rank() == 0) whole = job.w;
    });
    save_after_two_steps(place);
    run_ranks(2, [&](ProcessGroup& group) {
        Job job(group);
        const auto state = CheckpointDirectory(place.path()).load(group, job.training());
        ASSERT_TRUE(state);
        EXPECT_EQ(*state, (ddp::TrainingState{0, 2, {0, 20}, {{"note", "mine"}}}));
        EXPECT_EQ(job.sampler.state(), (ddp::SamplerState{0, 20}));
        EXPECT_EQ(job.counter.value, 2);
        EXPECT_EQ(job.counter.loads, 1);
        EXPECT_EQ(job.adamw->steps(), 2U);
        for (int t = 0; t < 2; ++t) job.step();
        EXPECT_EQ(job.w, whole);
    });
}

TEST(Training, KeepsTheOrderOfItsSamples) {
    const TemporaryDirectory place;
    save_after_two_steps(place);
    EXPECT_EQ(ddp::load_state(place.file("step-000002")).sampler.order,
              (ddp::SamplerState::Order{.samples = 100, .shuffle = true, .seed = 1}));
}

TEST(Training, StaysUnchangedWithoutACheckpoint) {
    const TemporaryDirectory place;
    run_ranks(2, [&](ProcessGroup& group) {
        Job job(group);
        EXPECT_EQ(CheckpointDirectory(place.file("none")).load(group, job.training()), std::nullopt);
        EXPECT_EQ(job.counter.loads, 0);
    });
}

class CheckpointOfAll : public ddp::testing::OnNodes {};
INSTANTIATE_TEST_SUITE_P(, CheckpointOfAll, ddp::testing::three_ranks(), ddp::testing::name_of_nodes);

TEST_P(CheckpointOfAll, IsRefusedForAnotherModelOnAllRanksWithOneMessageAndChangesNothing) {
    const TemporaryDirectory place;
    save_after_two_steps(place);
    const auto failed = failures([&](ProcessGroup& group) {
        Job job(group, 4);
        try {
            CheckpointDirectory(place.path()).load(group, job.training());
        } catch (const ddp::InvalidInput&) {
            EXPECT_EQ(job.w, std::vector<float>(4, 1));
            EXPECT_EQ(job.counter.value, 0);
            EXPECT_EQ(job.sampler.state(), ddp::SamplerState{});
            throw;
        }
    });
    for (const auto& failure : failed)
        EXPECT_EQ(
            message_of(failure),
            place.file(
                "step-000002/model.safetensors: tensor 'w' is float32[3] there, float32[4] in this program"));
}

TEST_P(CheckpointOfAll, IsRefusedWhenDamagedOnAllRanksWithTheNameOfTheFile) {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
        for (const bool is_cut : {true, false}) {
            const TemporaryDirectory place;
            save_after_two_steps(place);
            const std::string path = place.file("step-000002/" + file);
            if (is_cut) std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
            else std::ofstream(path, std::ios::in | std::ios::binary) << std::string(8, '\xff');
            const auto failed = failures([&](ProcessGroup& group) {
                Job job(group);
                CheckpointDirectory(place.path()).load(group, job.training());
            });
            for (const auto& failure : failed) {
                EXPECT_TRUE(ddp::testing::is<ddp::InvalidInput>(failure));
                EXPECT_EQ(message_of(failure), message_of(failed[0]));
            }
            EXPECT_NE(message_of(failed[0]).find(path), std::string::npos) << message_of(failed[0]);
        }
    }
}

TEST_P(CheckpointOfAll, IsRankZerosWhateverOtherNodesHave) {
    const TemporaryDirectory place;
    save_after_two_steps(place);
    run([&](ProcessGroup& group) {
        Job job(group);
        // Another node's disk holds nothing, or an unreadable file.
        const std::string own =
            group.rank() == 0 ? place.path() : place.file(group.rank() == 1 ? "none" : "step-000002");
        const auto state = CheckpointDirectory(own).load(group, job.training());
        ASSERT_TRUE(state);
        EXPECT_EQ(job.counter.value, 2);
    });
}

TEST(Training, NamesAPartThatTheProgramDoesNotLoad) {
    const TemporaryDirectory place;
    save_after_two_steps(place);
    run_ranks(1, [&](ProcessGroup& group) {
        Job job(group);
        const Training forgetful{job.model, *job.adamw, job.sampler};
        EXPECT_EQ(
            message_of([&] { CheckpointDirectory(place.path()).load(group, forgetful); }),
            "checkpoint " + place.file("step-000002") +
                ": holds 'counter', which this program does not resume: another program wrote it, or the same with other data or options");
        const Training without_it{job.model, *job.adamw, job.sampler, {{"counter", nullptr}}};
        EXPECT_TRUE(CheckpointDirectory(place.path()).load(group, without_it));
        EXPECT_EQ(job.counter.value, 0);
    });
}

TEST(Training, NamesAPartThatTheCheckpointLacksUnlessItIsOptional) {
    const TemporaryDirectory place;
    save_after_two_steps(place);
    run_ranks(1, [&](ProcessGroup& group) {
        Job job(group);
        Counter scale;
        Training training = job.training();
        training.parts.push_back({"scale", &scale});
        EXPECT_EQ(
            message_of([&] { CheckpointDirectory(place.path()).load(group, training); }),
            "checkpoint " + place.file("step-000002") +
                ": lacks 'scale', which this program resumes: another program wrote it, or the same with other data or options");
        training.parts.back().optional = true;
        scale.value = 9;
        EXPECT_TRUE(CheckpointDirectory(place.path()).load(group, training));
        EXPECT_EQ(scale.value, 9);
        EXPECT_EQ(job.counter.value, 2);
    });
}

TEST(Training, RefusesPartNamesThatAreNoFileNamesOrAreTaken) {
    const TemporaryDirectory place;
    run_ranks(1, [&](ProcessGroup& group) {
        for (const char* name : {"", "../x", "a b", "model", "optimizer", "counter"}) {
            Job job(group);
            Training training = job.training();
            training.parts.push_back({name, &job.counter});
            EXPECT_THROW(CheckpointDirectory(place.path()).save(group, training), ddp::InvalidInput) << name;
        }
    });
    EXPECT_TRUE(std::filesystem::is_empty(place.path()));
}

TEST(Training, IsSavedUnderATimeOutOfItsOwn) {
    const TemporaryDirectory place;
    struct Timing : Counter {
        std::vector<Tensor> state() const override {
            seen = group->timeout();
            return Counter::state();
        }
        ProcessGroup* group = nullptr;
        mutable std::chrono::nanoseconds seen{};
    };
    const auto body = [&](ProcessGroup& group) {
        Job job(group);
        Timing timing;
        timing.group = &group;
        const Training training{job.model, *job.adamw, job.sampler, {{"timing", &timing}}};
        CheckpointDirectory(place.path()).save(group, training);
        if (group.rank() == 0) {
            EXPECT_GE(timing.seen, std::chrono::hours(1));
        }
        EXPECT_EQ(group.timeout(), std::chrono::seconds(60));
    };
    run_ranks(2, body, {.group = {.timeout = std::chrono::seconds(60)}});
}

TEST(Training, FailsOnAllRanksWithTheNameOfAFileThatCannotBeWritten) {
    const TemporaryDirectory place;
    std::ofstream(place.file("file")) << "x";
    const auto failures = failures_of_ranks(2, [&](ProcessGroup& group) {
        Job job(group);
        try {
            CheckpointDirectory(place.file("file/below")).save(group, job.training());
        } catch (const ddp::FileError&) {
            throw;
        } catch (const std::exception& error) {
            ADD_FAILURE() << "not a FileError: " << error.what();
        }
    });
    for (const auto& failure : failures)
        EXPECT_EQ(message_of(failure), "checkpoint " + place.file("file/below") + ": mkdir: Not a directory");
}

}  // namespace
