#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/worker_env.h"
#include "reference_reduction.h"

namespace {

using namespace ddp;
using ddp::testing::environment_of;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;
using reference::Bytes;
using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Exception>
std::string message_of(const std::exception_ptr& failure) {
    try {
        if (failure) std::rethrow_exception(failure);
    } catch (const Exception& error) {
        return error.what();
    }
    return "no failure";
}

Buffer whole(Bytes& bytes, DType type) { return {bytes.data(), bytes.size() / size_of(type), type, {}}; }

TEST(Messages, OfEveryTypeAndLengthArriveInOrder) {
    run_ranks(2, [](ProcessGroup& group) {
        for (const DType type : reference::kTypes) {
            for (const std::size_t count : {0UL, 1UL, 4095UL, 8193UL, 1'000'001UL}) {
                const Bytes sent =
                    reference::random_bytes(count * size_of(type), static_cast<unsigned>(count));
                Bytes mine = group.rank() == 0 ? sent : Bytes(sent.size());
                group.rank() == 0 ? group.send(whole(mine, type), 1).wait()
                                  : group.recv(whole(mine, type), 0).wait();
                ASSERT_EQ(mine, sent) << name_of(type) << " " << count;
            }
        }
    });
}

TEST(Messages, TravelAroundARingOfAnyNumberOfRanks) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
        run_ranks(ranks, [ranks](ProcessGroup& group) {
            const int next = (group.rank() + 1) % ranks, previous = (group.rank() + ranks - 1) % ranks;
            for (int round = 0; round < 20; ++round) {
                std::vector<std::int64_t> token(5'000, group.rank() == 0 ? round : -1);
                const Buffer buffer = buffer_of(std::span(token));
                if (group.rank() > 0) group.recv(buffer, previous).wait();
                for (std::int64_t& value : token) ++value;
                group.send(buffer, next).wait();
                if (group.rank() == 0) {
                    group.recv(buffer, previous).wait();
                    ASSERT_EQ(token.back(), round + ranks);
                }
            }
        });
    }
}

TEST(Messages, DoNotChangeTheNumbersOfCollectives) {
    run_ranks(3, [](ProcessGroup& group) {
        std::vector<float> value{1.0F};
        const Buffer buffer = buffer_of(std::span(value));
        if (group.rank() == 0) group.send(buffer, 2).wait();
        if (group.rank() == 2) group.recv(buffer, 0).wait();
        group.all_reduce(buffer).wait();
        EXPECT_EQ(value[0], 3.0F);
    });
}

TEST(Messages, WithAnotherLengthOrTypeThrowOnTheReceiverWithBothSides) {
    const auto failures = failures_of_ranks(2, [](ProcessGroup& group) {
        std::vector<float> values(static_cast<std::size_t>(10 + group.rank()));
        const Buffer buffer = buffer_of(std::span(values));
        if (group.rank() == 0) return group.send(buffer, 1).wait();
        EXPECT_THROW(group.recv(buffer, 0).wait(), MismatchError);
        group.barrier().wait();  // the group is unusable
    });
    EXPECT_THAT(message_of<MismatchError>(failures[1]),
                AllOf(HasSubstr("rank 1 called recv #1 (11 float32, 44 B, from 0)"),
                      HasSubstr("rank 0 called send #1 (10 float32, 40 B, to 1)")));
}

TEST(Messages, TooLongForTheirReceiverThrowOnAWaitingSender) {
    const auto failures = failures_of_ranks(2, [](ProcessGroup& group) {
        std::vector<float> values(group.rank() == 0 ? 1'000'000 : 10);
        const Buffer buffer = buffer_of(std::span(values));
        group.rank() == 0 ? group.send(buffer, 1).wait() : group.recv(buffer, 0).wait();
    });
    EXPECT_THAT(
        message_of<MismatchError>(failures[0]),
        HasSubstr("rank 0: send #1 (1000000 float32, 3.8 MiB, to 1): rank 1 expected another message"));
    EXPECT_THAT(message_of<MismatchError>(failures[1]), HasSubstr("called recv #1 (10 float32"));
}

TEST(Messages, ThatWereRefusedThrowOnTheSenderLaterAndOnAllWaitingRanks) {
    const auto failures = failures_of_ranks(3, [](ProcessGroup& group) {
        std::vector<float> values(static_cast<std::size_t>(10 + group.rank()));
        const Buffer buffer = buffer_of(std::span(values));
        if (group.rank() == 0) group.send(buffer, 1).wait();  // fits the channel, so it does not wait
        if (group.rank() == 1) return group.recv(buffer, 0).wait();
        group.barrier().wait();
    });
    const auto both_sides = AllOf(HasSubstr("rank 1 called recv #1 (11 float32, 44 B, from 0)"),
                                  HasSubstr("rank 0 called send #1 (10 float32, 40 B, to 1)"));
    for (const std::exception_ptr& failure : failures)
        EXPECT_THAT(message_of<MismatchError>(failure), both_sides);
    EXPECT_THAT(
        message_of<MismatchError>(failures[2]),
        HasSubstr("rank 2: barrier #1: the group has failed: rank 1: a message is not the one expected"));
}

TEST(Messages, NameTheOtherRanksCallAndTheRemedyWhenBothSendFirst) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::milliseconds(300);
    const auto failures = failures_of_ranks(
        2,
        [](ProcessGroup& group) {
            const TimeoutScope longer(group, std::chrono::milliseconds(group.rank() == 0 ? 300 : 60'000));
            std::vector<float> values(1'000'000);
            group.send(buffer_of(std::span(values)), 1 - group.rank()).wait();
        },
        options);
    EXPECT_THAT(
        message_of<TimeoutError>(failures[0]),
        AllOf(HasSubstr("rank 0: send #1 (1000000 float32, 3.8 MiB, to 1) did not finish within 300 ms: "
                        "rank 1 is in send #1 (3.8 MiB, to rank 0) since "),
              HasSubstr("; both send first: let one of them receive first")));
    EXPECT_THAT(message_of<TimeoutError>(failures[1]),
                HasSubstr("rank 1: send #1 (1000000 float32, 3.8 MiB, to 0): the group has failed: rank 0: "
                          "send #1 (1000000 float32, 3.8 MiB, to 1) did not finish within 300 ms"));
}

TEST(Messages, AreShownToPeersInACollectiveToo) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::milliseconds(300);
    const auto failures = failures_of_ranks(
        3,
        [](ProcessGroup& group) {
            std::vector<float> values(10);
            if (group.rank() != 1) return group.barrier().wait();
            const TimeoutScope longer(group, std::chrono::seconds(60));
            group.recv(buffer_of(std::span(values)), 2).wait();
        },
        options);
    EXPECT_THAT(message_of<TimeoutError>(failures[0]),
                HasSubstr("rank 1 is in recv #1 (40 B, from rank 2) since "));
}

TEST(Messages, EndAtTheTimeOutAndShowTheSendersActivity) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::milliseconds(200);
    const auto failures = failures_of_ranks(
        2,
        [](ProcessGroup& group) {
            std::vector<float> values(10);
            group.all_reduce(buffer_of(std::span(values))).wait();
            if (group.rank() == 0) group.recv(buffer_of(std::span(values)), 1).wait();
        },
        options);
    EXPECT_THAT(message_of<TimeoutError>(failures[0]),
                AllOf(HasSubstr("rank 0: recv #1 (10 float32, 40 B, from 1) did not finish within 200 ms"),
                      HasSubstr("rank 1 finished #1 (all_reduce)")));
}

TEST(Messages, ThatTimeOutEndTheCallsOfOtherRanksAtOnce) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::seconds(5);
    std::atomic<bool> has_failed = false;
    const auto failures = failures_of_ranks(
        2,
        [&](ProcessGroup& group) {
            if (group.rank() == 1) {
                EXPECT_THROW(group.barrier().wait(), TimeoutError);
                has_failed = true, has_failed.notify_all();
                return group.barrier().wait();
            }
            const TimeoutScope shorter(group, std::chrono::milliseconds(200));
            std::vector<float> values(10);
            EXPECT_THROW(group.recv(buffer_of(std::span(values)), 1).wait(), TimeoutError);
            has_failed.wait(false);  // else rank 1 would hear of the end of this rank
        },
        options);
    EXPECT_THAT(message_of<TimeoutError>(failures[1]),
                HasSubstr("the group has failed: rank 0: recv #1 (10 float32, 40 B, from 1) did not finish "
                          "within 200 ms: rank 1 is in barrier #1"));
}

using enum Message::Direction;

TEST(Batch, ExchangesMessagesThatFitNoChannel) {
    run_ranks(2, [](ProcessGroup& group) {
        const int peer = 1 - group.rank();
        std::vector<std::int32_t> mine(1'000'003, group.rank()), theirs(mine.size(), -1);
        group
            .batch_send_recv(
                {{Send, buffer_of(std::span(mine)), peer}, {Recv, buffer_of(std::span(theirs)), peer}})
            .wait();
        EXPECT_EQ(theirs, std::vector<std::int32_t>(mine.size(), peer));
    });
}

TEST(Batch, BetweenAllRanksArrivesInOrderForAnyOrderOfTheList) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
        run_ranks(ranks, [ranks](ProcessGroup& group) {
            constexpr int kEach = 3;
            const int me = group.rank();
            std::vector<std::vector<std::int64_t>> buffers;
            std::vector<Message> messages;
            // Every rank has its own list; its buffers must not move.
            buffers.reserve(static_cast<std::size_t>(2 * kEach * ranks));
            for (int k = 0; k < kEach; ++k) {
                for (int step = 1; step < ranks; ++step) {
                    const int peer = (me + step) % ranks;
                    const auto length = static_cast<std::size_t>(k == 1 ? 40'000 : 3);
                    auto& sent = buffers.emplace_back(length, 100 * me + 10 * peer + k);
                    auto& received = buffers.emplace_back(length, -1);
                    const Message in{Recv, buffer_of(std::span(received)), peer};
                    if (step % 2 == 0) messages.push_back(in);
                    messages.push_back({Send, buffer_of(std::span(sent)), peer});
                    if (step % 2 == 1) messages.push_back(in);
                }
            }
            group.batch_send_recv(messages).wait();
            std::vector<int> seen(static_cast<std::size_t>(ranks), 0);
            for (const Message& one : messages) {
                if (one.direction == Send) continue;
                const int k = seen[static_cast<std::size_t>(one.peer)]++;
                const auto* const values = static_cast<std::int64_t*>(one.buffer.data);
                ASSERT_EQ(values[0], 100 * one.peer + 10 * me + k) << ranks;
                ASSERT_EQ(values[one.buffer.count - 1], values[0]);
            }
        });
    }
}

TEST(BatchOfMessages, WorksWithSingleMessagesOnSharedMemory) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<std::int32_t> mine(200'000, group.rank()), theirs(mine.size(), -1);
        const Buffer out = buffer_of(std::span(mine)), in = buffer_of(std::span(theirs));
        if (group.rank() == 0) {
            group.batch_send_recv({{Send, out, 1}, {Recv, in, 1}}).wait();
        } else {
            group.send(out, 0).wait();
            group.recv(in, 0).wait();
        }
        EXPECT_EQ(theirs.back(), 1 - group.rank());
    });
}

TEST(BatchOfMessages, EndsAtItsTimeOutWithoutAPeerAndNamesTheMessage) {
    ddp::testing::RankOptions options;
    options.group.timeout = std::chrono::milliseconds(200);
    const auto failures = failures_of_ranks(
        3,
        [](ProcessGroup& group) {
            std::vector<float> mine(10), theirs(10);
            const Buffer out = buffer_of(std::span(mine)), in = buffer_of(std::span(theirs));
            if (group.rank() == 0)
                group.batch_send_recv({{Send, out, 1}, {Recv, in, 1}, {Recv, in, 2}}).wait();
            if (group.rank() == 1) group.batch_send_recv({{Send, out, 0}, {Recv, in, 0}}).wait();
        },
        options);
    EXPECT_THAT(message_of<TimeoutError>(failures[0]),
                AllOf(HasSubstr("rank 0: recv #1 (10 float32, 40 B, from 2) did not finish within 200 ms"),
                      HasSubstr("rank 2 has called no collective yet")));
    EXPECT_EQ(message_of<TimeoutError>(failures[1]), "no failure");
}

TEST(BatchOfMessages, RefusesWrongMessagesBeforeAnyMoves) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> values(3);
        const Buffer buffer = buffer_of(std::span(values));
        const int peer = 1 - group.rank();
        EXPECT_THROW((void)group.batch_send_recv({{Send, buffer, peer}, {Send, buffer, 2}}), InvalidInput);
        EXPECT_THROW((void)group.batch_send_recv({{Send, buffer, group.rank()}}), InvalidInput);
        EXPECT_THROW((void)group.batch_send_recv({{Send, {nullptr, 3, DType::F32, {}}, peer}}), InvalidInput);
        group.batch_send_recv({}).wait();
        group.barrier().wait();
    });
}

TEST(Messages, FromARankThatEndedAreAnError) {
    const ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
    const auto group_of = [&](int rank) {
        ddprun::WorkerEnv env = environment_of(rank, 2);
        env.segment_fd = fd.get();
        return ProcessGroup::create(Context(env), {.timeout = std::chrono::seconds(60)});
    };
    const pid_t pid = ::fork();
    if (pid == 0) {
        const auto group = group_of(1);
        std::vector<float> values(10, 7.0F);
        group->send(buffer_of(std::span(values)), 0).wait();
        ::_exit(0);
    }
    const auto group = group_of(0);
    ::waitpid(pid, nullptr, 0);
    std::vector<float> values(10);
    group->recv(buffer_of(std::span(values)), 1).wait();
    EXPECT_EQ(values[9], 7.0F) << "a message sent before the end still arrives";
    const auto begin = ddprun::MonotonicClock::now();
    try {
        group->recv(buffer_of(std::span(values)), 1).wait();
        FAIL();
    } catch (const PeerLostError& error) {
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("rank 0: recv #2"), HasSubstr("ended without taking part")));
    }
    EXPECT_LT(ddprun::MonotonicClock::now() - begin, std::chrono::seconds(15));
}

}  // namespace
