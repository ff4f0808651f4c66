#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "ddp/testing.h"
#include "reference_reduction.h"

namespace {

using namespace ddp;
using ddp::testing::failures_of_ranks;
using ddp::testing::run_ranks;
using reference::Bytes;
using ::testing::HasSubstr;

using reference::kTypes;

Buffer whole(Bytes& bytes, DType type) { return {bytes.data(), bytes.size() / size_of(type), type, {}}; }
std::size_t sum(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

Bytes part(const Bytes& bytes, DType type, const Counts& counts, std::size_t index) {
    const std::size_t first =
        std::accumulate(counts.begin(), counts.begin() + static_cast<long>(index), std::size_t{0});
    const auto begin = bytes.begin() + static_cast<long>(first * size_of(type));
    return {begin, begin + static_cast<long>(counts[index] * size_of(type))};
}

Bytes& append(Bytes& bytes, const Bytes& more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
    return bytes;
}

/// Different counts, among them 0 and one that exceeds one piece.
Counts counts_of(int ranks, std::size_t longest) {
    Counts counts;
    for (int r = 0; r < ranks; ++r)
        counts.push_back(r == 1 ? 0 : longest / static_cast<std::size_t>(r + 1) + 3);
    return counts;
}

TEST(Uneven, AllGatherPutsSlicesOfAllLengthsOneAfterTheOther) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            const auto me = static_cast<std::size_t>(group.rank());
            for (const DType type : kTypes) {
                const Counts counts = counts_of(ranks, type == DType::F64 && ranks == 3 ? 300'001 : 701);
                const Bytes expected = reference::random_bytes(sum(counts) * size_of(type), 5);
                Bytes mine = part(expected, type, counts, me), all(expected.size());
                group.all_gather_v(whole(all, type), whole(mine, type), counts).wait();
                ASSERT_EQ(all, expected) << ranks << name_of(type);
            }
        });
    }
}

TEST(Uneven, AllGatherTakesAnInputInsideItsOutput) {
    run_ranks(3, [](ProcessGroup& group) {
        const Counts counts{2, 0, 5};
        std::vector<int> all(7, -1);
        const auto mine = group.rank() == 0   ? std::span(all).first(2)
                          : group.rank() == 1 ? std::span(all).subspan(2, 0)
                                              : std::span(all).subspan(2);
        std::ranges::fill(mine, group.rank());
        group.all_gather_v(buffer_of(std::span(all)), buffer_of(mine), counts).wait();
        EXPECT_THAT(all, ::testing::ElementsAre(0, 0, 2, 2, 2, 2, 2));
    });
}

TEST(Uneven, ReduceScatterGivesEveryRankItsSliceOfTheReduction) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            const auto me = static_cast<std::size_t>(group.rank());
            for (const DType type : kTypes) {
                const Counts counts = counts_of(ranks, type == DType::F32 && ranks == 4 ? 300'001 : 333);
                std::vector<Bytes> inputs;
                for (int r = 0; r < ranks; ++r)
                    inputs.push_back(
                        reference::random_values(type, sum(counts), 70 + static_cast<unsigned>(r)));
                const ReduceOp op = type == DType::Bool ? ReduceOp::Min : ReduceOp::Product;
                const Bytes reduced = reference::reduce(inputs, type, op);
                Bytes input = inputs[me], mine(counts[me] * size_of(type));
                group.reduce_scatter_v(whole(mine, type), whole(input, type), counts, op).wait();
                ASSERT_EQ(mine, part(reduced, type, counts, me)) << ranks << name_of(type);
                ASSERT_EQ(input, inputs[me]) << "the input is unchanged";
            }
        });
    }
}

TEST(Uneven, AllToAllTakesADifferentLengthForEveryPair) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            const int me = group.rank();
            const auto count = [&](int from, int to) {
                return (from + 2 * to) % 3 == 1 ? std::size_t{0}
                                                : static_cast<std::size_t>(100'000 * from + 7 * to + 1);
            };
            const auto message = [&](int from, int to) {
                return reference::random_bytes(count(from, to) * 2, static_cast<unsigned>(10 * from + to));
            };
            Counts sent, received;
            Bytes input, expected;
            for (int r = 0; r < ranks; ++r) {
                sent.push_back(count(me, r)), received.push_back(count(r, me));
                append(input, message(me, r)), append(expected, message(r, me));
            }
            Bytes got(expected.size());
            group.all_to_all_v(whole(got, DType::F16), received, whole(input, DType::F16), sent).wait();
            ASSERT_EQ(got, expected) << ranks;
        });
    }
}

TEST(Uneven, DifferentCountsThrowOnAllRanksWithBothSides) {
    const auto failures = failures_of_ranks(3, [](ProcessGroup& group) {
        const Counts counts = group.rank() == 2 ? Counts{2, 3, 4} : Counts{3, 2, 4};
        std::vector<float> all(9), mine(counts[static_cast<std::size_t>(group.rank())]);
        group.all_gather_v(buffer_of(std::span(all)), buffer_of(std::span(mine)), counts).wait();
    });
    for (const auto& failure : failures) {
        try {
            ASSERT_TRUE(failure);
            std::rethrow_exception(failure);
        } catch (const MismatchError& error) {
            EXPECT_THAT(error.what(), HasSubstr("rank 0 counts 3, 2, 4, rank 2 counts 2, 3, 4"));
        }
    }
}

TEST(Uneven, AllToAllNamesUnmatchedCountsOnAllRanks) {
    const auto failures = failures_of_ranks(3, [](ProcessGroup& group) {
        Counts sent{1, 1, 1};
        if (group.rank() == 2) sent = {5, 1, 1};
        std::vector<float> out(3), in(sent[0] + 2);
        group.all_to_all_v(buffer_of(std::span(out)), {1, 1, 1}, buffer_of(std::span(in)), sent).wait();
    });
    for (const auto& failure : failures) {
        try {
            ASSERT_TRUE(failure);
            std::rethrow_exception(failure);
        } catch (const MismatchError& error) {
            EXPECT_THAT(error.what(), HasSubstr("rank 2 sends 5 elements to rank 0, which receives 1"));
        }
    }
}

TEST(UnevenCall, DiffersFromTheEvenCall) {
    const auto failures = failures_of_ranks(2, [](ProcessGroup& group) {
        std::vector<float> all(2), mine(1);
        const Buffer output = buffer_of(std::span(all)), input = buffer_of(std::span(mine));
        (group.rank() == 0 ? group.all_gather_v(output, input, {1, 1}) : group.all_gather(output, input))
            .wait();
    });
    for (const auto& failure : failures) EXPECT_THROW(std::rethrow_exception(failure), MismatchError);
}

TEST(UnevenCall, RefusesWrongBuffersAtTheCall) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> two(2), three(3);
        std::vector<double> wide(2);
        const Buffer a = buffer_of(std::span(two)), b = buffer_of(std::span(three)),
                     w = buffer_of(std::span(wide));
        EXPECT_THROW((void)group.all_gather_v(a, b, {2}), InvalidInput);
        EXPECT_THROW((void)group.all_gather_v(a, a, {2, 0}), InvalidInput);
        EXPECT_THROW((void)group.all_gather_v(w, a, {2}), InvalidInput);
        EXPECT_THROW((void)group.reduce_scatter_v(a, b, {2}), InvalidInput);
        EXPECT_THROW((void)group.all_to_all_v(a, {2}, b, {2}), InvalidInput);
        EXPECT_THROW((void)group.all_to_all_v(a, {2}, a, {2}), InvalidInput) << "they overlap";
        EXPECT_THROW((void)group.all_to_all_v(a, {~std::size_t{0}}, b, {3}), InvalidInput);
        group.barrier().wait();
    });
}

TEST(TimeoutScope, AppliesToTheCallsInIt) {
    run_ranks(2, [](ProcessGroup& group) {
        const auto usual = group.timeout();
        {
            const TimeoutScope limit(group, std::chrono::seconds(30));
            EXPECT_EQ(group.timeout(), std::chrono::seconds(30));
            const TimeoutScope shorter(group, std::chrono::seconds(20));
            EXPECT_EQ(group.timeout(), std::chrono::seconds(20));
            group.barrier().wait();
        }
        EXPECT_EQ(group.timeout(), usual);
        EXPECT_THROW((void)TimeoutScope(group, std::chrono::seconds(0)), InvalidInput);
        EXPECT_EQ(group.timeout(), usual);
    });
}

class Limited : public ::testing::TestWithParam<ProcessGroupOptions::Progress> {};
INSTANTIATE_TEST_SUITE_P(Threads, Limited,
                         ::testing::Values(ProcessGroupOptions::Progress::Inline,
                                           ProcessGroupOptions::Progress::Thread));

TEST_P(Limited, CollectivesAndMessagesEndAtTheirOwnTimeOut) {
    ddp::testing::RankOptions options;
    options.group.progress = GetParam();
    const auto failures = failures_of_ranks(
        3,
        [](ProcessGroup& group) {
            if (group.rank() == 1) return;
            const TimeoutScope limit(group, std::chrono::milliseconds(100));
            std::vector<float> values(10);
            const Buffer buffer = buffer_of(std::span(values));
            (group.rank() == 0 ? group.recv(buffer, 1) : group.all_reduce(buffer)).wait();
        },
        options);
    for (const std::size_t rank : {0UL, 2UL}) {
        try {
            ASSERT_TRUE(failures[rank]);
            std::rethrow_exception(failures[rank]);
        } catch (const TimeoutError& error) {
            EXPECT_THAT(error.what(), HasSubstr("did not finish within 100 ms"));
        }
    }
}

TEST(MonitoredBarrier, NamesEveryMissingRank) {
    const auto failures = failures_of_ranks(5, [](ProcessGroup& group) {
        const int me = group.rank();
        if (me == 1 || me == 2 || me == 4) return;
        group.monitored_barrier(std::chrono::milliseconds(150));
    });
    for (const std::size_t present : {0UL, 3UL}) {
        try {
            ASSERT_TRUE(failures[present]);
            std::rethrow_exception(failures[present]);
        } catch (const TimeoutError& error) {
            EXPECT_THAT(error.what(),
                        HasSubstr("barrier #1 did not finish within 150 ms: ranks 1-2, 4 missing: "));
        }
    }
}

TEST(MonitoredBarrier, IsABarrierWhenAllArrive) {
    run_ranks(3, [](ProcessGroup& group) {
        group.monitored_barrier(std::chrono::seconds(30));
        group.barrier().wait();
    });
}

}  // namespace
