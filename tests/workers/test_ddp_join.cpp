#include <gtest/gtest.h>

#include <mutex>

#include "ddp/ddp.h"
#include "ddp/optimizer.h"
#include "ddp/shm/segment.h"
#include "ddp/testing.h"
#include "env/worker_env.h"
#include "tests/workers/forked_ranks.h"
#include "tests/workers/on_nodes.h"

namespace {

using ddp::DistributedDataParallel;
using ddp::Join;
using ddp::JoinOptions;
using ddp::ProcessGroup;
using ddp::Tensor;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;

/// Two parameters whose gradients the test sets, and a buffer that counts this rank's passes.
struct Counter {
    std::vector<float> a = {0}, b = {0}, passes = {0};
    std::vector<Tensor> parameters() {
        return {ddp::tensor_of("a", std::span(a), {1}), ddp::tensor_of("b", std::span(b), {1})};
    }
    std::vector<Tensor> buffers() { return {ddp::tensor_of("passes", std::span(passes), {1})}; }
    void pass(DistributedDataParallel& model, float slope) {
        model.begin_forward();
        passes[0] += 1;
        for (const std::size_t i : {1, 0}) {
            model.gradient_as<float>(i)[0] = slope;
            model.mark_ready(i);
        }
        model.finish();
    }
};

/// Rank r has 2 (r + 1) batches of slope r + 1.
int batches_of(int rank) { return 2 * (rank + 1); }

/// The result of torch.distributed.algorithms.Join: averages over ranks with batches, zeros from the others.
double trained_alone(int ranks, bool by_initial_world_size, double rate) {
    double parameter = 0;
    for (int step = 0; step < batches_of(ranks - 1); ++step) {
        double sum = 0;
        int active = 0;
        for (int r = 0; r < ranks; ++r) {
            if (step >= batches_of(r)) continue;
            sum += r + 1;
            ++active;
        }
        parameter -= rate * sum / (by_initial_world_size ? ranks : active);
    }
    return parameter;
}

class UnevenBatches : public ddp::testing::OnNodes {};
INSTANTIATE_TEST_SUITE_P(, UnevenBatches, ddp::testing::three_ranks(), ddp::testing::name_of_nodes);

TEST_P(UnevenBatches, AreAllUsedInAJoin) {
    for (const bool by_initial : {true, false}) {
        for (const bool find_unused : {true, false}) {
            run([&](ProcessGroup& group) {
                Counter mine;
                ddp::DdpOptions options{.buffers = mine.buffers()};
                options.reducer.find_unused_parameters = find_unused;
                DistributedDataParallel model(group, mine.parameters(), options);
                const auto sgd = ddp::make_sgd(mine.parameters(), {.learning_rate = 0.5});
                Join join(model, {.divide_by_initial_world_size = by_initial});
                for (int batch = 0; batch < batches_of(group.rank()); ++batch) {
                    mine.pass(model, static_cast<float>(group.rank() + 1));
                    sgd->step(model.gradients());
                }
                join.finish();
                EXPECT_NEAR(mine.a[0], trained_alone(3, by_initial, 0.5), 1e-5);
                EXPECT_EQ(mine.a, mine.b);
                EXPECT_EQ(mine.passes[0], 6)
                    << "the last rank's buffers began each pass with those of the last active rank";
                model.verify_equal_parameters();
            });
        }
    }
}

TEST(Join, KeepsAllRanksOptimizersEqualWithAfterStep) {
    run_ranks(3, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        const auto sgd = ddp::make_sgd(mine.parameters(), {.learning_rate = 0.5, .momentum = 0.9});
        {
            Join join(model);
            for (int batch = 0; batch < batches_of(group.rank()); ++batch) {
                mine.pass(model, 1);
                sgd->step(model.gradients());
            }
            join.finish([&] { sgd->step(model.gradients()); });
        }
        EXPECT_EQ(sgd->steps(), 6U);
        // After the Join all ranks train together again: equal momenta give equal parameters.
        mine.pass(model, 2);
        EXPECT_EQ(model.gradient_as<float>(0)[0], 2);
        sgd->step(model.gradients());
        model.verify_equal_parameters();
    });
}

TEST(Join, TakesTheStaticGraphOfARankFromItsFirstOwnStep) {
    run_ranks(2, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters(), {.reducer = {.static_graph = true}});
        {
            Join join(model);
            for (int batch = 0; batch < 2 * group.rank(); ++batch) mine.pass(model, 1);
            join.finish();
        }
        for (int step = 0; step < 2; ++step) {
            mine.pass(model, 2);
            EXPECT_EQ(model.gradient_as<float>(0)[0], 2);
        }
    });
}

TEST(Join, TakesPartOnlyInReducedPasses) {
    run_ranks(2, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        Join join(model);
        for (int batch = 0; batch < 4 * group.rank(); ++batch) {
            const auto accumulating = model.no_sync(batch % 2 == 0);
            mine.pass(model, 8);
            if (batch % 2 == 1) {
                EXPECT_EQ(model.gradient_as<float>(0)[0], 4) << "rank 0 has no batch";
            }
        }
        int steps = 0;
        join.finish([&] { ++steps; });
        EXPECT_EQ(steps, group.rank() == 0 ? 2 : 0);
    });
}

TEST(Join, TellsRanksWithoutBatchesThatOthersAskToStop) {
    run_ranks(2, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        Join join(model, {.divide_by_initial_world_size = false});
        if (group.rank() == 1) {
            model.request_stop();
            mine.pass(model, 8);
        }
        join.finish();
        EXPECT_TRUE(model.stop_requested());
    });
}

TEST(Join, EndsAtOnceWithoutBatches) {
    run_ranks(2, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        Join(model).finish();
        EXPECT_EQ(model.statistics().steps, 0U);
    });
}

std::string message_of(const std::exception_ptr& failure) {
    try {
        if (failure) std::rethrow_exception(failure);
    } catch (const ddp::Error& error) {
        return error.what();
    }
    return "nothing";
}

TEST_P(UnevenBatches, FailOnAllRanksWhenOneEndsEarlyUnderThrowOnEarlyTermination) {
    const auto failed = failures([](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        Join join(model, {.throw_on_early_termination = true});
        for (int batch = 0; batch < (group.rank() == 1 ? 1 : 2); ++batch) mine.pass(model, 1);
        join.finish();
    });
    for (std::size_t r = 0; r < failed.size(); ++r)
        EXPECT_EQ(message_of(failed[r]),
                  "rank " + std::to_string(r) +
                      ": rank 1 has no more batches, others have; give all the same number, or do "
                      "without throw_on_early_termination");
}

TEST(Join, NamesTheRemedyWhenARankContinuesWithoutFinish) {
    const auto failed = failures_of_ranks(2, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        {
            Join join(model);
            for (int batch = 0; batch <= group.rank(); ++batch) mine.pass(model, 1);
        }
        group.barrier().wait();
    });
    EXPECT_EQ(message_of(failed[0]).find("Join::finish()"), std::string::npos) << message_of(failed[0]);
    EXPECT_NE(message_of(failed[1]).find("Join::finish()"), std::string::npos) << message_of(failed[1]);
}

TEST(Join, NamesTheRemedyWhenARankExitsWithoutFinish) {
    const ddprun::UniqueFd fd = ddp::make_segment({.local_world_size = 2, .world_size = 2});
    const auto train = [&](int rank) {
        ddprun::WorkerEnv env = ddp::testing::environment_of(rank, 2);
        env.segment_fd = fd.get();
        const auto group = ProcessGroup::create(ddp::Context(env), {.timeout = std::chrono::seconds(60)});
        Counter mine;
        DistributedDataParallel model(*group, mine.parameters());
        Join join(model);
        for (int batch = 0; batch < 2 - rank; ++batch) mine.pass(model, 1);
        return 0;
    };
    ddp::testing::ForkedRanks other(2, [&](int rank) { return rank == 0 ? 0 : train(1); });
    try {
        train(0);
        FAIL();
    } catch (const ddp::PeerLostError& error) {
        EXPECT_NE(std::string(error.what()).find("Join::finish()"), std::string::npos) << error.what();
    }
}

TEST(Join, NamesTheDestroyedGroupAsTheModelDoes) {
    run_ranks(2, [](ProcessGroup& world) {
        std::unique_ptr<ProcessGroup> group = world.split(0, world.rank());
        Counter mine;
        DistributedDataParallel model(*group, mine.parameters(), {.buffers = mine.buffers()});
        const auto says_so = [](const auto& call) {
            try {
                call();
            } catch (const ddp::Error& error) {
                return std::string(error.what()).find("the ProcessGroup was destroyed before") !=
                       std::string::npos;
            }
            return false;
        };
        {
            Join join(model);
            mine.pass(model, 1);
            const ddp::TimeoutScope limit(*group, std::chrono::minutes(1));
            group.reset();
            EXPECT_TRUE(says_so([&] { model.begin_forward(); }));
            EXPECT_TRUE(says_so([&] { join.finish(); }));
        }
        EXPECT_TRUE(says_so([&] { model.begin_forward(); }));
        EXPECT_TRUE(says_so([&] { static_cast<void>(model.gradient(0)); }));
        EXPECT_TRUE(says_so([&] { static_cast<void>(model.gradients()); }));
        EXPECT_TRUE(says_so([&] { model.zero_gradients(); }));
        EXPECT_TRUE(says_so([&] { model.mark_ready(0); }));
        EXPECT_TRUE(says_so([&] { model.finish(); }));
        EXPECT_TRUE(says_so([&] { model.verify_equal_parameters(); }));
    });
}

TEST(Join, RequiresBeginForward) {
    run_ranks(1, [](ProcessGroup& group) {
        Counter mine;
        DistributedDataParallel model(group, mine.parameters());
        Join join(model);
        EXPECT_THROW(model.mark_ready(0), ddp::Error);
        EXPECT_THROW(Join{model}, ddp::InvalidInput);
        mine.pass(model, 1);
        EXPECT_THROW(model.mark_ready(0), ddp::Error) << "each pass needs its own";
    });
}

}  // namespace
