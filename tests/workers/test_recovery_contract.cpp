#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>

#include "ddp/ddp.h"
#include "ddp/objects.h"
#include "ddp/optimizer.h"
#include "ddp/recovery.h"
#include "ddp/testing.h"
#include "env/worker_env.h"
#include "failures.h"

// The contract of Recovery without an agent: each broken rule is an error that names the object and the
// remedy.
namespace ddp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::thrown_by;
using Kind = Recovery::Kind;
using Body = std::function<void(ProcessGroup&, const Start&)>;

/// Two ranks, in whose body `unit` runs once; returns rank 0's exception.
std::string thrown_in_body(
    const std::function<void(Recovery&, ProcessGroup&)>& unit,
    const std::function<void(Recovery&)>& keep = [](Recovery&) {},
    ProcessGroupOptions options = {.timeout = std::chrono::seconds(20)}) {
    std::array<std::string, 2> thrown;
    try {
        testing::run_recovering(2, [&](const Context& context) {
            Recovery recovery(context, options);
            keep(recovery);
            recovery.run([&](ProcessGroup& group, const Start&) {
                thrown[static_cast<std::size_t>(group.rank())] = thrown_by([&] { unit(recovery, group); });
            });
        });
    } catch (const std::exception& error) {
        return error.what();
    }
    return thrown[0];
}

void meet(ProcessGroup& group) { group.barrier().wait(); }

TEST(RecoveryContract, RunsTheBodyOnceAsNewWithoutAnAgent) {
    int value = 3;
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.keep_value("value", value);
    int bodies = 0;
    recovery.run([&](ProcessGroup& group, const Start& start) {
        ++bodies;
        EXPECT_TRUE(start.is_new());
        EXPECT_EQ(start.commits, 0u);
        meet(group);
        recovery.commit([&] { value = 4; });
    });
    EXPECT_EQ(bodies, 1);
    EXPECT_EQ(recovery.commits(), 1u);
    EXPECT_EQ(value, 4);
}

TEST(RecoveryContract, PassesTheBodysExceptionOnWithoutAnAgent) {
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    EXPECT_THROW(recovery.run([](ProcessGroup&, const Start&) { throw PeerLostError("lost"); }),
                 PeerLostError);
}

TEST(RecoveryContract, AllowsOneRecovery) {
    const Recovery recovery(Context(ddprun::WorkerEnv{}));
    EXPECT_EQ(thrown_by([] { const Recovery second(Context(ddprun::WorkerEnv{})); }),
              "Error: rank 0: there is a Recovery already; a process has one, which keeps all state");
}

TEST(RecoveryContract, RunsOnce) {
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.run([](ProcessGroup&, const Start&) {});
    EXPECT_EQ(thrown_by([&] { recovery.run([](ProcessGroup&, const Start&) {}); }),
              "Error: rank 0: recovery: run() was called before; one run() covers the whole training");
}

TEST(RecoveryContract, RefusesACollectiveInsideCommit) {
    EXPECT_EQ(
        thrown_in_body([](Recovery& recovery, ProcessGroup& group) {
            meet(group);
            recovery.commit([&] { meet(group); });
        }),
        "Error: rank 0: barrier was called inside Recovery::commit; call it before: no rank may wait for another "
        "there");
}

TEST(RecoveryContract, RefusesAUnitWithoutAnAllRankCollective) {
    EXPECT_THAT(
        thrown_in_body([](Recovery& recovery, ProcessGroup& group) {
            meet(group);
            recovery.commit();
            float value = 0;
            group.broadcast(buffer_of(std::span(&value, 1)), 0).wait();
            recovery.commit();
        }),
        AllOf(HasSubstr("rank 0: recovery: unit 2 had no collective in which all ranks wait for each other"),
              HasSubstr("before commit()")));
}

TEST(RecoveryContract, RefusesACommitWhileACollectiveIsInFlight) {
    std::atomic<bool> has_tried = false;
    const auto thrown = thrown_in_body(
        [&](Recovery& recovery, ProcessGroup& group) {
            meet(group);
            float value = 0;
            if (group.rank() == 1) has_tried.wait(false);
            Work work = group.all_reduce(buffer_of(std::span(&value, 1)));
            const std::string error = group.rank() == 0 ? thrown_by([&] { recovery.commit(); }) : "";
            if (group.rank() == 0) has_tried = true, has_tried.notify_all();
            work.wait();
            if (!error.empty()) throw Error(error);
        },
        [](Recovery&) {},
        {.timeout = std::chrono::seconds(20), .progress = ProcessGroupOptions::Progress::Thread});
    EXPECT_THAT(thrown, HasSubstr("rank 0: a collective is in flight; wait for its Work first"));
}

TEST(RecoveryContract, ThrowsAtCommitTheFailureOfAWorkThatNobodyWaitedFor) {
    EXPECT_THAT(thrown_in_body([](Recovery& recovery, ProcessGroup& group) {
                    float value = 0;
                    if (group.rank() == 0) (void)group.all_reduce(buffer_of(std::span(&value, 1)));
                    else (void)group.barrier();
                    recovery.commit();
                }),
                HasSubstr("rank 1 called barrier"));
}

TEST(RecoveryContract, ThrowsAtCommitTheFailureOfAForgottenWorkOfASubGroup) {
    for (const auto progress :
         {ProcessGroupOptions::Progress::Inline, ProcessGroupOptions::Progress::Thread}) {
        EXPECT_THAT(thrown_in_body(
                        [](Recovery& recovery, ProcessGroup& group) {
                            const auto part = group.split(0, 0);
                            float value = 0;
                            if (group.rank() == 0) (void)part->all_reduce(buffer_of(std::span(&value, 1)));
                            else (void)part->barrier();
                            thrown_by([&] { part->barrier().wait(); });
                            meet(group);
                            recovery.commit();
                        },
                        [](Recovery&) {}, {.timeout = std::chrono::seconds(20), .progress = progress}),
                    HasSubstr("rank 1 called barrier"));
    }
}

TEST(RecoveryContract, RefusesACommitWhileACollectiveOfASubGroupIsInFlight) {
    std::atomic<bool> has_tried = false;
    const auto thrown = thrown_in_body(
        [&](Recovery& recovery, ProcessGroup& group) {
            const auto part = group.split(0, 0);
            meet(group);
            if (group.rank() == 1) has_tried.wait(false);
            Work work = part->barrier();
            const std::string error = group.rank() == 0 ? thrown_by([&] { recovery.commit(); }) : "";
            if (group.rank() == 0) has_tried = true, has_tried.notify_all();
            work.wait();
            if (!error.empty()) throw Error(error);
        },
        [](Recovery&) {},
        {.timeout = std::chrono::seconds(20), .progress = ProcessGroupOptions::Progress::Thread});
    EXPECT_THAT(thrown, HasSubstr("rank 0: a collective is in flight; wait for its Work first"));
}

TEST(RecoveryContract, RequiresPrepareWhereThereAreOwnValues) {
    int sum = 0;
    EXPECT_THAT(thrown_in_body(
                    [](Recovery& recovery, ProcessGroup& group) {
                        meet(group);
                        recovery.commit();
                    },
                    [&](Recovery& recovery) { recovery.keep_value("sum", sum, Kind::Own); }),
                AllOf(HasSubstr("unit 1 has no prepare(), and there are Own values"),
                      HasSubstr("call it before the unit's last collective")));
}

TEST(RecoveryContract, RequiresPrepareBeforeTheLastCollective) {
    int sum = 0;
    EXPECT_THAT(thrown_in_body(
                    [](Recovery& recovery, ProcessGroup& group) {
                        meet(group);
                        recovery.prepare();
                        recovery.commit();
                    },
                    [&](Recovery& recovery) { recovery.keep_value("sum", sum, Kind::Own); }),
                HasSubstr("prepare() of unit 1 came after its last collective; call it before that"));
}

TEST(RecoveryContract, NamesAnOwnValueThatChangedAfterPrepare) {
    std::array<int, 2> sums{}, others{};
    EXPECT_THAT(thrown_in_body(
                    [&](Recovery& recovery, ProcessGroup& group) {
                        recovery.prepare();
                        meet(group);
                        ++sums[static_cast<std::size_t>(group.rank())];
                        recovery.commit();
                    },
                    [&](Recovery& recovery) {
                        const auto rank = static_cast<std::size_t>(recovery.context().rank());
                        recovery.keep_value("other", others[rank], Kind::Own);
                        recovery.keep_value("sum", sums[rank], Kind::Own);
                    }),
                HasSubstr("Own value 'sum' changed after prepare()"));
}

TEST(RecoveryContract, RefusesOwnValuesThatAreTooLong) {
    static std::array<std::vector<float>, 2> memory;
    for (auto& one : memory) one.resize(5 << 20);
    EXPECT_THAT(thrown_in_body([](Recovery& recovery, ProcessGroup&) { recovery.prepare(); },
                               [&](Recovery& recovery) {
                                   auto& mine = memory[static_cast<std::size_t>(recovery.context().rank())];
                                   recovery.keep("cache", {tensor_of("c", mine, {5 << 20})}, Kind::Own);
                               }),
                AllOf(HasSubstr("the Own values have 20 MiB, and the kept memory takes 16 MiB of each rank"),
                      HasSubstr("keep less as Own")));
}

TEST(RecoveryContract, RefusesCommitOutsideOfTheBodyAndInsideItself) {
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    EXPECT_EQ(thrown_by([&] { recovery.commit(); }),
              "Error: rank 0: recovery: commit() is called in the body of run()");
    recovery.run([&](ProcessGroup&, const Start&) {
        EXPECT_EQ(thrown_by([&] { recovery.commit([&] { recovery.prepare(); }); }),
                  "Error: rank 0: recovery: prepare() was called inside commit()");
    });
}

TEST(RecoveryContract, RefusesStateThatIsNamedTwiceOrTooLate) {
    int value = 0;
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.keep_value("value", value);
    EXPECT_EQ(thrown_by([&] { recovery.keep_value("value", value); }),
              "InvalidInput: recovery: keep(\"value\"): another state has this name");
    EXPECT_EQ(thrown_by([&] { recovery.keep_value("", value); }),
              "InvalidInput: recovery: keep(\"\"): the state needs a name");
    recovery.run([](ProcessGroup&, const Start&) {});
    EXPECT_EQ(thrown_by([&] { recovery.keep_value("late", value); }),
              "Error: rank 0: recovery: keep(\"late\") was called after run()");
}

TEST(RecoveryContract, ShowsTheFirstDifferenceBetweenTheStatesOfTwoRanks) {
    std::array<std::vector<float>, 2> weights = {std::vector<float>(3), std::vector<float>(4)};
    EXPECT_THAT(
        thrown_in_body([](Recovery&, ProcessGroup&) {},
                       [&](Recovery& recovery) {
                           auto& mine = weights[static_cast<std::size_t>(recovery.context().rank())];
                           const auto size = static_cast<std::int64_t>(mine.size());
                           recovery.keep("weights", {tensor_of("w", mine, {size})});
                       }),
        HasSubstr("rank 0 keeps 'weights' (0), w float32[3], rank 1 keeps 'weights' (0), w float32[4]; call "
                  "keep() equally on all ranks"));
}

TEST(RecoveryContract, NamesStateThatOnlyOneRankKeeps) {
    std::array<int, 2> values{};
    EXPECT_THAT(thrown_in_body([](Recovery&, ProcessGroup&) {},
                               [&](Recovery& recovery) {
                                   recovery.keep_value("step", values[0]);
                                   if (recovery.context().rank() == 1) recovery.keep_value("more", values[1]);
                               }),
                HasSubstr("rank 0 keeps nothing, rank 1 keeps 'more' (0), uint8[4]; call keep() equally"));
}

TEST(RecoveryContract, KeepsValuesWithAJsonForm) {
    std::map<std::string, std::vector<double>> curves;
    std::string name = "first";
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.keep_value("curves", curves, Kind::Moving);
    recovery.keep_value("name", name, Kind::Own);
    recovery.run([&](ProcessGroup& group, const Start&) {
        curves["loss"] = {0.5};
        name = "second";
        recovery.prepare();
        meet(group);
        recovery.commit();
    });
    EXPECT_EQ(recovery.commits(), 1u);
}

class CheckMode : public ::testing::Test {
  protected:
    void SetUp() override { ::setenv("DDP_CHECK_RECOVERY", "1", 1); }
    void TearDown() override { ::unsetenv("DDP_CHECK_RECOVERY"); }
};

TEST_F(CheckMode, NamesCommittedStateThatChangesOutsideOfCommit) {
    std::vector<float> w = {1, 2}, b = {0};
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.keep("weights", {tensor_of("w", w, {2}), tensor_of("b", b, {1})});
    recovery.run([&](ProcessGroup& group, const Start&) {
        meet(group);
        w[0] = 5;  // before the first commit: a checkpoint, say
        recovery.commit([&] { w[1] = 3; });
        b[0] = 1;
        meet(group);
        EXPECT_EQ(
            thrown_by([&] { recovery.commit(); }),
            "Error: rank 0: recovery: 'weights', b changed outside of commit() after 1 units; change it inside, "
            "or keep it as Moving or Own");
        b[0] = 0;
    });
}

TEST_F(CheckMode, NamesAValueThatChangesAfterTheLastCommit) {
    int epoch = 0;
    Recovery recovery(Context(ddprun::WorkerEnv{}));
    recovery.keep_value("epoch", epoch);
    EXPECT_THAT(thrown_by([&] {
                    recovery.run([&](ProcessGroup& group, const Start&) {
                        meet(group);
                        recovery.commit();
                        ++epoch;
                    });
                }),
                HasSubstr("'epoch' changed outside of commit() after 1 units"));
}

TEST(StepSeed, DiffersByRankAndUnit) {
    EXPECT_EQ(step_seed(1, 2, 3), step_seed(1, 2, 3));
    EXPECT_NE(step_seed(1, 2, 3), step_seed(1, 3, 2));
    EXPECT_NE(step_seed(1, 2, 3), step_seed(2, 2, 3));
}

}  // namespace
}  // namespace ddp
