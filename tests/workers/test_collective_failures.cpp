#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "ddp/shm/segment.h"
#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/worker_env.h"
#include "tests/workers/failures.h"
#include "tests/workers/forked_child.h"
#include "tests/workers/forked_ranks.h"
#include "tests/workers/on_nodes.h"

namespace {

using namespace ddp;
using ddp::testing::environment_of;
using ddp::testing::failures_of_ranks;
using ddp::testing::ForkedRanks;
using ddp::testing::InChild;
using ddp::testing::is;
using ddp::testing::is_refused_in_child;
using ddp::testing::kRight;
using ddp::testing::message_of;
using ddp::testing::misdeeds_of_child;
using ddp::testing::Pipe;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AssertionFailure;
using ::testing::AssertionSuccess;

::testing::AssertionResult says(const std::string& message, std::initializer_list<std::string> parts) {
    for (const std::string& part : parts) {
        if (message.find(part) == std::string::npos)
            return AssertionFailure() << "no '" << part << "' in: " << message;
    }
    return AssertionSuccess();
}

void reduce_floats(ProcessGroup& group, std::size_t count) {
    std::vector<float> values(count, 1.0F);
    group.all_reduce(buffer_of(std::span(values))).wait();
}

void barrier(ProcessGroup& group) { group.barrier().wait(); }

class Mismatch : public ddp::testing::OnNodes {
  protected:
    /// The test's second call; between nodes the rendezvous takes two calls.
    static std::string second(const std::string& call) {
        return call + (GetParam().size() == 1 ? " #2" : " #4");
    }
    /// One rank calls `other`, the others call `usual`; every rank must learn of both. Across nodes that rank
    /// is alone on its node in one run, and shares it in the next.
    static void expect_mismatch(const std::function<void(ProcessGroup&)>& usual,
                                const std::function<void(ProcessGroup&)>& other,
                                std::initializer_list<std::string> parts) {
        for (const int odd : {1, 2}) {
            const auto failed = failures([&](ProcessGroup& group) {
                reduce_floats(group, 10);
                group.rank() == odd ? other(group) : usual(group);
            });
            for (const std::exception_ptr& failure : failed) {
                EXPECT_TRUE(is<MismatchError>(failure));
                EXPECT_TRUE(says(message_of(failure), parts));
                EXPECT_TRUE(says(message_of(failure), {odd == 1 ? "rank 1" : "rank 2"}));
            }
        }
    }
};
INSTANTIATE_TEST_SUITE_P(, Mismatch, ddp::testing::three_ranks(), ddp::testing::name_of_nodes);

TEST_P(Mismatch, IsThrownOnEveryRankWithBothSidesAndTheNumberOfTheCall) {
    expect_mismatch(
        [](ProcessGroup& group) { reduce_floats(group, 100'000); }, barrier,
        {second("called barrier"), second("called all_reduce") + " (100000 float32, 390.6 KiB, sum)"});
}

TEST_P(Mismatch, CoversSizes) {
    for (const std::size_t count :
         {std::size_t{10}, std::size_t{1024}, std::size_t{100'000}, std::size_t{700'001}}) {
        const std::string here = second("all_reduce") + " (" + std::to_string(count) + " float32",
                          there = second("all_reduce") + " (" + std::to_string(count + 1) + " float32";
        expect_mismatch([&](ProcessGroup& group) { reduce_floats(group, count); },
                        [&](ProcessGroup& group) { reduce_floats(group, count + 1); }, {here, there});
    }
}

TEST_P(Mismatch, CoversTypesReductionsAndRoots) {
    expect_mismatch([](ProcessGroup& group) { reduce_floats(group, 2); },
                    [](ProcessGroup& group) {
                        std::vector<double> one(1);
                        group.all_reduce(buffer_of(std::span(one))).wait();
                    },
                    {"float32", "float64"});
    const auto reduce_by = [](ReduceOp op) {
        return [op](ProcessGroup& group) {
            std::vector<float> values(40'000);
            group.all_reduce(buffer_of(std::span(values)), op).wait();
        };
    };
    expect_mismatch(reduce_by(ReduceOp::Sum), reduce_by(ReduceOp::Avg), {", sum)", ", avg)"});
    const auto broadcast_from = [](int root) {
        return [root](ProcessGroup& group) {
            std::vector<float> values(4);
            group.broadcast(buffer_of(std::span(values)), root).wait();
        };
    };
    expect_mismatch(broadcast_from(0), broadcast_from(2), {"root 0", "root 2"});
}

TEST_P(Mismatch, CoversEveryKindOfCall) {
    const auto even = [](Work (ProcessGroup::*call)(Buffer, ddp::ConstBuffer), std::size_t out,
                         std::size_t in) {
        return [=](ProcessGroup& group) {
            std::vector<float> output(out), input(in);
            (group.*call)(buffer_of(output), buffer_of(input)).wait();
        };
    };
    const auto gather_unevenly = [](ProcessGroup& group) {
        std::vector<float> all(3), mine(1);
        group.all_gather_v(buffer_of(all), buffer_of(mine), {1, 1, 1}).wait();
    };
    const auto gather = even(&ProcessGroup::all_gather, 3, 1),
               exchange = even(&ProcessGroup::all_to_all, 3, 3);
    expect_mismatch(gather, exchange, {second("called all_gather"), second("called all_to_all")});
    expect_mismatch(exchange, barrier, {second("called all_to_all"), second("called barrier")});
    expect_mismatch(gather_unevenly, gather, {second("called all_gather_v"), second("called all_gather")});
    const auto scatter = [](ProcessGroup& group) {
        std::vector<float> mine(1), sum(3);
        group.reduce_scatter(buffer_of(mine), buffer_of(sum)).wait();
    };
    expect_mismatch(scatter, gather, {second("called reduce_scatter"), second("called all_gather")});
    expect_mismatch(
        [](ProcessGroup& group) { group.allocate_shared(4096); },
        [](ProcessGroup& group) { group.allocate_shared(8192); },
        {second("allocate_shared") + " (4096 bytes)", second("allocate_shared") + " (8192 bytes)"});
    expect_mismatch([](ProcessGroup& group) { group.all_gather_bytes("x"); },
                    [](ProcessGroup& group) { group.split(0, 0); },
                    {second("called split"), second("called all_gather_bytes")});
}

TEST_P(Mismatch, CoversTheOrderOfCalls) {
    const auto reduce_both = [](std::size_t first, std::size_t second) {
        return [=](ProcessGroup& group) {
            reduce_floats(group, first);
            reduce_floats(group, second);
        };
    };
    expect_mismatch(reduce_both(5, 90'000), reduce_both(90'000, 5),
                    {second("all_reduce") + " (5 float32", second("all_reduce") + " (90000 float32"});
}

TEST_P(Mismatch, IsDetectedInTheNextCallWhenOneRankCallsTwice) {
    expect_mismatch(barrier, [](ProcessGroup& group) { reduce_floats(group, 10), barrier(group); },
                    {second("called all_reduce"), second("called barrier")});
}

TEST_P(Mismatch, ShowsBothSidesOfUnequalCounts) {
    const auto failed = failures([](ProcessGroup& group) {
        const Counts counts = group.rank() == 2 ? Counts{2, 3, 4} : Counts{3, 2, 4};
        std::vector<float> all(9), mine(counts[static_cast<std::size_t>(group.rank())]);
        group.all_gather_v(buffer_of(all), buffer_of(mine), counts).wait();
    });
    for (const auto& failure : failed) {
        EXPECT_TRUE(is<MismatchError>(failure));
        EXPECT_TRUE(says(message_of(failure), {"rank 0 counts 3, 2, 4, rank 2 counts 2, 3, 4"}));
    }
}

TEST_P(Mismatch, MakesTheGroupUnusable) {
    run([](ProcessGroup& group) {
        const auto bad = [&] { group.rank() < 2 ? group.barrier().wait() : reduce_floats(group, 1); };
        EXPECT_THROW(bad(), MismatchError);
        EXPECT_THROW(group.barrier().wait(), MismatchError);
        EXPECT_THROW(group.all_gather_bytes("x"), MismatchError);
    });
}

TEST(Failure, IsKeptInTheWorkUntilItIsWaitedFor) {
    ddp::testing::RankOptions options;
    options.group.progress = ProcessGroupOptions::Progress::Thread;
    (void)failures_of_ranks(
        2,
        [](ProcessGroup& group) {
            std::vector<float> values(static_cast<std::size_t>(group.rank()) + 1);
            Work work = group.all_reduce(buffer_of(std::span(values)));
            EXPECT_THROW(work.wait(), MismatchError);
            EXPECT_TRUE(work.done());
            EXPECT_THROW(work.wait(), MismatchError);
        },
        options);
}

TEST(Failure, IsThrownToAThreadThatCallsAGroupWhileAnotherIsInside) {
    std::promise<void> refused;
    ddp::testing::RankOptions options;
    options.group.progress = ProcessGroupOptions::Progress::Inline;
    ddp::testing::run_ranks(
        2,
        [&refused](ProcessGroup& group) {
            if (group.rank() == 1) {
                refused.get_future().wait();
                group.all_gather_bytes("");
                return;
            }
            // The first thread stays inside until the other rank comes, which happens after the second thread
            // was refused.
            std::atomic<int> refusals = 0;
            const auto call = [&] {
                try {
                    group.all_gather_bytes("");
                } catch (const Error& error) {
                    EXPECT_TRUE(says(
                        error.what(),
                        {"rank 0: all_gather_bytes was called while another thread was in all_gather_bytes",
                         "split"}));
                    ++refusals;
                    refused.set_value();
                }
            };
            std::thread other(call);
            call();
            other.join();
            EXPECT_EQ(refusals, 1);
        },
        options);
}

TEST(Timeout, ShowsTheActivityOfEveryPeer) {
    const auto failures = failures_of_ranks(3, [](ProcessGroup& group) {
        reduce_floats(group, 10);
        if (group.rank() == 2) return;
        // Rank 0 is the first whose time is over.
        const TimeoutScope limit(group, group.rank() == 0 ? milliseconds(500) : milliseconds(60'000));
        reduce_floats(group, 100'000);
    });
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_TRUE(is<TimeoutError>(failures[1]));
    EXPECT_FALSE(failures[2]);
    EXPECT_TRUE(says(message_of(failures[0]),
                     {"rank 0: all_reduce #2 (100000 float32, 390.6 KiB, sum) did not finish within 500 ms",
                      "rank 1 is in all_reduce #2 (390.6 KiB)", "rank 2 finished #1 (all_reduce)",
                      "has not called the next"}));
}

TEST(Timeout, FailsARankThatArrivesAfterTheOthersTimedOut) {
    for (const int ranks : {2, 3}) {
        std::vector<std::promise<void>> gave_up(static_cast<std::size_t>(ranks - 1));
        const auto failures = failures_of_ranks(ranks, [&](ProcessGroup& group) {
            if (group.rank() == ranks - 1) {
                for (std::promise<void>& one : gave_up) one.get_future().wait();
                return reduce_floats(group, 100);
            }
            try {
                const TimeoutScope impatient(group, std::chrono::milliseconds(50));
                reduce_floats(group, 100);
            } catch (const TimeoutError&) {
                gave_up[static_cast<std::size_t>(group.rank())].set_value();
                throw;
            }
        });
        for (const std::exception_ptr& failure : failures) {
            EXPECT_TRUE(is<TimeoutError>(failure));
            // Another rank too may be missing, where it came later than 50 ms after the first one.
            EXPECT_TRUE(says(message_of(failure),
                             {"did not finish within 50 ms: rank", " missing",
                              "rank " + std::to_string(ranks - 1) + " has called no collective yet"}));
        }
    }
}

TEST(Timeout, NamesTheMissingRanksWhenJoining) {
    // Only rank 1 of 4 joins.
    ddprun::UniqueFd fd = make_segment({.local_world_size = 4, .world_size = 4});
    ddprun::WorkerEnv env = environment_of(1, 4);
    env.segment_fd = fd.get();
    ProcessGroupOptions options;
    options.timeout = milliseconds(100);
    try {
        (void)ProcessGroup::create(Context(env), options);
        FAIL() << "joined an incomplete world";
    } catch (const TimeoutError& error) {
        EXPECT_TRUE(says(error.what(), {"missing", "rank 0, 2-3"}));
    }
}

TEST(Join, ThrowsOnAllRanksWhenWorldSizesDisagree) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    std::vector<std::exception_ptr> failures(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
        ranks.emplace_back([&, rank] {
            ddprun::WorkerEnv env = environment_of(rank, rank == 2 ? 8 : 3);
            env.segment_fd = fd.get();
            ProcessGroupOptions options;
            options.timeout = seconds(20);
            try {
                (void)ProcessGroup::create(Context(env), options);
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const std::exception_ptr& failure : failures) {
        EXPECT_TRUE(is<MismatchError>(failure)) << message_of(failure);
        EXPECT_TRUE(says(message_of(failure), {"rank 2", "8", "3", "WORLD_SIZE"}));
    }
}

TEST(Join, RefusesAWorldOfSeveralNodesAndADescriptorThatIsNoSegment) {
    ddprun::WorkerEnv env = environment_of(0, 2);
    env.world_size = 4;
    EXPECT_THROW((void)ProcessGroup::create(Context(env)), InvalidInput);

    ddprun::WorkerEnv wrong = environment_of(0, 1);
    const ddprun::UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
    wrong.segment_fd = null.get();
    EXPECT_THROW((void)ProcessGroup::create(Context(wrong)), InvalidInput);
    wrong.segment_fd = 987654;
    EXPECT_THROW((void)ProcessGroup::create(Context(wrong)), InvalidInput);
    ProcessGroupOptions options;
    options.backend = "gloo";
    EXPECT_THROW((void)ProcessGroup::create(Context(environment_of(0, 1)), options), InvalidInput);
}

TEST(Join, MakesAWorldOfOneAnyNumberOfTimes) {
    for (int round = 0; round < 20; ++round) {
        const auto group = ProcessGroup::create(Context(environment_of(0, 1)));
        std::vector<float> values{1.5F, 2.5F};
        group->all_reduce(buffer_of(std::span(values)), ReduceOp::Avg).wait();
        EXPECT_EQ(values, (std::vector<float>{1.5F, 2.5F}));
    }
}

TEST(RankLines, ShowTheActivityOfEveryRankToTheLauncher) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 1, .world_size = 1});
    const SegmentMap launcher(ddprun::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
    ddprun::WorkerEnv env = environment_of(0, 1);
    env.segment_fd = fd.get();
    const auto group = ProcessGroup::create(Context(env));
    const ddprun::RankLine& line = launcher.line(0);
    EXPECT_EQ(line.pid, static_cast<std::uint32_t>(::getpid()));
    EXPECT_EQ(line.joined, 1U);
    EXPECT_EQ(line.started_seq, 0U);

    reduce_floats(*group, 25);
    group->report_progress(7, 448);
    EXPECT_EQ(line.started_seq, 1U);
    EXPECT_EQ(line.finished_seq, 1U);
    EXPECT_EQ(line.bytes, 100U);
    EXPECT_EQ(static_cast<ddprun::SegmentOp>(line.operation.load()), ddprun::SegmentOp::AllReduce);
    EXPECT_GE(line.finished_ns, line.started_ns);
    EXPECT_GT(line.started_ns, 0);
    EXPECT_EQ(line.step, 7U);
    EXPECT_EQ(line.samples, 448U);
    EXPECT_GT(line.progress_ns, 0);
}

std::unique_ptr<ProcessGroup> group_on(int segment, int rank, int ranks, milliseconds timeout) {
    ddprun::WorkerEnv env = environment_of(rank, ranks);
    env.segment_fd = segment;
    ProcessGroupOptions options;
    options.timeout = timeout;
    return ProcessGroup::create(Context(env), options);
}

/// Reduces until PeerLostError is thrown; writes to `reached` once the ranks are in the middle of it.
int reduce_until_peer_lost(ProcessGroup& group, int reached) {
    try {
        for (int round = 0;; ++round) {
            reduce_floats(group, 100'000);
            if (round == 20) (void)!::write(reached, "x", 1);
        }
    } catch (const PeerLostError& error) {
        const bool names_it = std::string(error.what()).find("rank 1") != std::string::npos &&
                              std::string(error.what()).find("all_reduce #") != std::string::npos;
        return names_it ? kRight : 4;
    }
}

/// Runs in a child of rank 0 that was forked while `pending` was in flight; it must not wait.
int as_forked_child(std::unique_ptr<ProcessGroup> group, std::unique_ptr<ProcessGroup> part, Work pending) {
    if (!is_refused_in_child([&] { reduce_floats(*group, 3); })) return 4;
    if (!is_refused_in_child([&] { barrier(*part); })) return 5;
    if (!is_refused_in_child([&] { pending.wait(); })) return 6;
    part.reset();
    group.reset();
    return kRight;
}

TEST(ForkedChild, CanExitWithOrWithoutDestroyingItsParentsGroup) {
    using Progress = ProcessGroupOptions::Progress;
    for (const Progress progress : {Progress::Inline, Progress::Thread}) {
        ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
        ForkedRanks ranks(2, [&](int rank) {
            ddprun::WorkerEnv env = environment_of(rank, 2);
            env.segment_fd = fd.get();
            auto group = ProcessGroup::create(Context(env), {.timeout = seconds(60), .progress = progress});
            barrier(*group);
            for (const InChild what : {InChild::DestroysGroup, InChild::LeavesGroup}) {
                const std::string misdeeds = misdeeds_of_child(*group, what);
                if (!misdeeds.empty()) throw Error(misdeeds);
                barrier(*group);
            }
            return kRight;
        });
        for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
    }
}

TEST(ForkedChild, IsRefusedEveryCallAndDestroysNothingThatTheRankUses) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
    const Pipe tried;
    ForkedRanks ranks(2, [&](int rank) {
        ddprun::WorkerEnv env = environment_of(rank, 2);
        env.segment_fd = fd.get();
        const ProcessGroupOptions options{.timeout = seconds(60),
                                          .progress = ProcessGroupOptions::Progress::Thread};
        auto group = ProcessGroup::create(Context(env), options);
        auto part = group->split(0, rank);
        const auto shared = group->allocate_shared(4 * sizeof(float));
        const std::span<float> values(reinterpret_cast<float*>(shared.data()), 4);
        std::ranges::fill(values, 1.0F);
        if (rank == 1) tried.await_one();
        Work pending = group->all_reduce(buffer_of(values));
        if (rank == 0) {
            const pid_t child = ::fork();
            if (child == 0) {
                ::alarm(30);  // ends a child that waits for ever
                ::_exit(as_forked_child(std::move(group), std::move(part), std::move(pending)));
            }
            int status = 0;
            ::waitpid(child, &status, 0);
            tried.say_one();
            if (!WIFEXITED(status) || WEXITSTATUS(status) != kRight)
                return WIFEXITED(status) ? WEXITSTATUS(status) : 7;
        }
        pending.wait();
        barrier(*part);
        return values[3] == 2.0F ? kRight : 8;
    });
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
}

TEST(PeerLost, IsThrownLongBeforeTheTimeOutOnceTheLauncherEndsTheGeneration) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    const SegmentMap launcher(ddprun::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
    const Pipe reached;
    // Rank 1 stops instead of dying, so that the others can learn of it only from the launcher.
    ForkedRanks ranks(3, [&](int rank) {
        const auto group = group_on(fd.get(), rank, 3, seconds(60));
        if (rank != 1) return reduce_until_peer_lost(*group, reached.write.get());
        for (int round = 0; round < 30; ++round) reduce_floats(*group, 100'000);
        ::raise(SIGSTOP);
        return 5;
    });
    reached.await_one();
    const auto before = ddprun::MonotonicClock::now();
    launcher.header().aborted.store(1 + 1);
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(2), kRight);
    EXPECT_LT(ddprun::MonotonicClock::now() - before, seconds(15));
}

TEST(PeerLost, LeavesTheSharedBufferToAPeerThatIsStillInTheCollective) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
    const SegmentMap launcher(ddprun::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
    const Pipe filled, left;
    ForkedRanks ranks(2, [&](int rank) {
        auto group = group_on(fd.get(), rank, 2, seconds(60));
        const std::span<std::byte> mine = group->allocate_shared(4096);
        std::ranges::fill(mine, std::byte{7});
        barrier(*group);
        if (rank == 0) {
            filled.say_one();
            const int thrown = reduce_until_peer_lost(*group, -1);
            group.reset();
            left.say_one();
            return thrown;
        }
        left.await_one();
        const std::byte* const peers = mine.data() - 4096;  // buffers lie in the order of ranks
        return peers[0] == std::byte{7} ? kRight : 4;
    });
    filled.await_one();
    launcher.header().aborted.store(1 + 1);
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(1), kRight);
}

TEST(PeerLost, IsThrownForAKilledPeerWithoutALauncher) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    const Pipe reached;
    ForkedRanks ranks(3, [&](int rank) {
        const auto group = group_on(fd.get(), rank, 3, seconds(60));
        return reduce_until_peer_lost(*group, reached.write.get());
    });
    reached.await_one();
    ranks.kill_one(1);
    EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);  // reaped: from now on the pid does not exist
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(2), kRight);
}

TEST(Processes, ReduceOverAnInheritedSegment) {
    ddprun::UniqueFd fd = make_segment({.local_world_size = 4, .world_size = 4});
    ForkedRanks ranks(4, [&](int rank) {
        const auto group = group_on(fd.get(), rank, 4, seconds(60));
        const std::span<std::byte> region = group->allocate_shared(4 * 500'000);
        const std::span<float> values(reinterpret_cast<float*>(region.data()), 500'000);
        for (int round = 0; round < 5; ++round) {
            std::fill(values.begin(), values.end(), static_cast<float>(rank + round));
            group->all_reduce(buffer_of(values), ReduceOp::Avg).wait();
            for (const float value : values) {
                if (value != 1.5F + static_cast<float>(round)) return 4;
            }
        }
        return kRight;
    });
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
}

TEST(Processes, ShareASegmentWithoutALauncherInAnyOrderOfArrival) {
    const std::string run = "share-" + std::to_string(::getpid());
    for (const int late : {0, 2}) {  // rank 0 last, or another rank last
        const Pipe go;
        ForkedRanks ranks(3, [&](int rank) {
            ddprun::WorkerEnv env = environment_of(rank, 3);
            env.run_id = run;
            char byte;
            if (rank == late && ::read(go.read.get(), &byte, 1) != 1) return 6;
            if (rank == 1 && ::write(go.write.get(), "x", 1) != 1) return 6;
            ProcessGroupOptions options;
            options.timeout = seconds(30);
            const auto group = ProcessGroup::create(Context(env), options);
            std::vector<std::int32_t> values(10'000, rank);
            group->all_reduce(buffer_of(std::span(values))).wait();
            return values.back() == 3 ? kRight : 4;
        });
        for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
    }
}

TEST(Processes, LearnOfDisagreeingWorldSizesWithoutALauncher) {
    const std::string run = "disagree-" + std::to_string(::getpid());
    ForkedRanks ranks(3, [&](int rank) {
        ddprun::WorkerEnv env = environment_of(rank, rank == 1 ? 4 : 3);
        env.run_id = run;
        ProcessGroupOptions options;
        options.timeout = seconds(20);
        try {
            (void)ProcessGroup::create(Context(env), options);
        } catch (const MismatchError& error) {
            return says(error.what(), {"rank 1", "4", "3"}) ? kRight : 4;
        }
        return 5;
    });
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
}

TEST(Processes, AreNamedByRankZeroWhenMissingWithoutALauncher) {
    ddprun::WorkerEnv env = environment_of(0, 3);
    env.run_id = "absent-" + std::to_string(::getpid());
    ProcessGroupOptions options;
    options.timeout = milliseconds(50);
    try {
        (void)ProcessGroup::create(Context(env), options);
        FAIL();
    } catch (const TimeoutError& error) {
        EXPECT_TRUE(says(error.what(), {"missing", "rank 1-2"}));
    }
}

TEST(Processes, WithAnImpossibleRankDoNotCountAsArrivedWithoutALauncher) {
    for (const int impossible : {7, -3}) {
        ddprun::WorkerEnv first = environment_of(0, 2), stray = environment_of(impossible, 2);
        first.run_id = stray.run_id = "stray-" + std::to_string(::getpid()) + std::to_string(impossible);
        const auto in = [](milliseconds limit) { return ddprun::MonotonicClock::now() + limit; };
        std::thread foreign_claim([&] { EXPECT_THROW(share_segment(stray, in(seconds(2))), Error); });
        try {
            share_segment(first, in(milliseconds(500)));
            ADD_FAILURE() << "rank " << impossible << " was counted as rank 1";
        } catch (const TimeoutError& error) {
            EXPECT_TRUE(says(error.what(), {"missing", "rank 1"}));
        }
        foreign_claim.join();
    }
}

}  // namespace
