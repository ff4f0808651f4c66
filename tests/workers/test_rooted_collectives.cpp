#include <gtest/gtest.h>

#include <cstring>

#include "ddp/shm/kernels.h"
#include "ddp/testing.h"
#include "reference_reduction.h"

namespace {

using namespace ddp;
using ddp::testing::run_ranks;
using reference::Bytes;
using reference::joined;
using reference::slice;

using reference::kTypes;
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::Product};
// Counts around the limits: a cache line, a rank's part of an area, an area.
constexpr std::size_t kCounts[] = {0, 1, 3, 65, 4099, 300'007};

Buffer at(Bytes& bytes, DType type, std::size_t first = 0, std::size_t count = ~std::size_t{0}) {
    const std::size_t all = bytes.size() / size_of(type);
    return {bytes.data() + first * size_of(type), std::min(count, all - first), type, {}};
}

Bytes values_of_rank(int rank, DType type, std::size_t count) {
    return reference::random_values(type, count, 40 + static_cast<unsigned>(rank));
}

std::vector<Bytes> all_values(int ranks, DType type, std::size_t count) {
    std::vector<Bytes> all;
    for (int r = 0; r < ranks; ++r) all.push_back(values_of_rank(r, type, count));
    return all;
}

TEST(Reduce, GivesTheRootTheRankOrderedReductionAndKeepsTheOthersBuffers) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const std::size_t count : kCounts) {
                const auto inputs = all_values(ranks, DType::F32, count);
                const int root = static_cast<int>(count) % ranks;
                Bytes mine = inputs[static_cast<std::size_t>(group.rank())];
                group.reduce(at(mine, DType::F32), root).wait();
                ASSERT_EQ(mine, group.rank() == root ? reference::reduce(inputs, DType::F32, ReduceOp::Sum)
                                                     : inputs[static_cast<std::size_t>(group.rank())])
                    << ranks << " ranks, " << count;
            }
        });
    }
}

TEST(Reduce, TakesAllTypesAndOperations) {
    run_ranks(3, [&](ProcessGroup& group) {
        for (const DType type : kTypes) {
            for (const ReduceOp op : kOps) {
                if (!is_reducible(type, op)) continue;
                const auto inputs = all_values(3, type, 1237);
                Bytes mine = inputs[static_cast<std::size_t>(group.rank())];
                group.reduce(at(mine, type), 1, op).wait();
                if (group.rank() != 1) continue;
                ASSERT_EQ(mine, reference::reduce(inputs, type, op)) << name_of(type) << " " << name_of(op);
            }
        }
    });
}

TEST(Gather, PutsEveryRanksInputInItsPlaceOnTheRootAndNeedsNoOutputElsewhere) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const DType type : kTypes) {
                for (const std::size_t count : {std::size_t{0}, std::size_t{7}, std::size_t{1'100'003}}) {
                    if (count > 1000 && (ranks > 3 || size_of(type) > 2)) continue;
                    const int root = (ranks - 1) / 2;
                    const auto inputs = all_values(ranks, type, count);
                    Bytes mine = inputs[static_cast<std::size_t>(group.rank())];
                    Bytes all(group.rank() == root ? mine.size() * inputs.size() : 0);
                    group.gather(at(all, type), at(mine, type), root).wait();
                    if (group.rank() == root) {
                        ASSERT_EQ(all, joined(inputs)) << name_of(type);
                    }
                }
            }
        });
    }
}

TEST(Gather, TakesAnInputInsideItsOutput) {
    run_ranks(3, [](ProcessGroup& group) {
        std::vector<std::int32_t> all(3 * 700, -1);
        const auto mine = std::span(all).subspan(static_cast<std::size_t>(group.rank()) * 700, 700);
        std::fill(mine.begin(), mine.end(), group.rank());
        group.gather(buffer_of(std::span(all)), buffer_of(mine), 2).wait();
        for (std::size_t i = 0; group.rank() == 2 && i < all.size(); ++i)
            ASSERT_EQ(all[i], static_cast<int>(i / 700));
    });
}

TEST(Scatter, GivesEveryRankItsSliceAndNeedsNoInputElsewhere) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const DType type : kTypes) {
                for (const std::size_t count : {std::size_t{0}, std::size_t{9}, std::size_t{600'001}}) {
                    if (count > 1000 && (ranks > 3 || size_of(type) > 2)) continue;
                    const int root = ranks / 2;
                    const auto parts = all_values(ranks, type, count);
                    Bytes whole = group.rank() == root ? joined(parts) : Bytes{};
                    Bytes mine(count * size_of(type));
                    group.scatter(at(mine, type), at(whole, type), root).wait();
                    ASSERT_EQ(mine, parts[static_cast<std::size_t>(group.rank())]) << name_of(type) << count;
                }
            }
        });
    }
}

TEST(AllToAll, GivesEveryRankItsSliceOfAllRanks) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
        run_ranks(ranks, [&](ProcessGroup& group) {
            for (const DType type : kTypes) {
                for (const std::size_t count : {std::size_t{0}, std::size_t{5}, std::size_t{400'001}}) {
                    if (count > 1000 && (ranks > 3 || size_of(type) > 2)) continue;
                    const std::size_t each = count * size_of(type);
                    const auto inputs = all_values(ranks, type, count * static_cast<std::size_t>(ranks));
                    const auto rank = static_cast<std::size_t>(group.rank());
                    std::vector<Bytes> expected;
                    for (const Bytes& input : inputs) expected.push_back(slice(input, rank, each));
                    Bytes mine = inputs[rank], got(mine.size());
                    group.all_to_all(at(got, type), at(mine, type)).wait();
                    ASSERT_EQ(got, joined(expected)) << name_of(type) << " " << count;
                }
            }
        });
    }
}

TEST(RootedCollectives, RefuseWrongBuffersAtTheCall) {
    run_ranks(1, [](ProcessGroup& group) {
        std::vector<float> two(2), three(3);
        std::vector<double> wide(2);
        std::vector<std::uint8_t> bytes(2);
        const Buffer a = buffer_of(std::span(two)), b = buffer_of(std::span(three)),
                     c = buffer_of(std::span(wide));
        EXPECT_THROW((void)group.reduce(a, 1), InvalidInput);
        EXPECT_THROW((void)group.reduce(buffer_of(std::span(bytes)), 0, ReduceOp::Avg), InvalidInput);
        EXPECT_THROW((void)group.gather(b, a, 0), InvalidInput);
        EXPECT_THROW((void)group.gather(a, a, -1), InvalidInput);
        EXPECT_THROW((void)group.scatter(a, b, 0), InvalidInput);
        EXPECT_THROW((void)group.scatter(a, c, 0), InvalidInput);
        EXPECT_THROW((void)group.all_to_all(a, b), InvalidInput);
        EXPECT_THROW((void)group.all_to_all(a, c), InvalidInput);
        EXPECT_THROW((void)group.send(a, 0), InvalidInput);
        EXPECT_THROW((void)group.recv(a, 1), InvalidInput);
    });
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> three(3), other(3);
        EXPECT_THROW((void)group.all_to_all(buffer_of(std::span(three)), buffer_of(std::span(other))),
                     InvalidInput);
    });
}

TEST(Collectives, RefuseBuffersThatOverlapUnlessOneIsTheRanksSliceOfTheOther) {
    run_ranks(2, [](ProcessGroup& group) {
        std::vector<float> memory(9, 1);
        const auto at = [&](std::size_t first, std::size_t count) {
            return buffer_of(std::span(memory).subspan(first, count));
        };
        EXPECT_THROW((void)group.all_to_all(at(0, 4), at(0, 4)), InvalidInput);
        EXPECT_THROW((void)group.all_to_all(at(0, 4), at(3, 4)), InvalidInput);
        const auto own = static_cast<std::size_t>(group.rank()) * 2, other = 2 - own;
        EXPECT_THROW((void)group.all_gather(at(0, 4), at(other, 2)), InvalidInput);
        EXPECT_THROW((void)group.all_gather(at(0, 4), at(own + 1, 2)), InvalidInput);
        EXPECT_THROW((void)group.reduce_scatter(at(other, 2), at(0, 4)), InvalidInput);
        EXPECT_THROW((void)group.gather(at(0, 4), at(other, 2), group.rank()), InvalidInput);
        EXPECT_THROW((void)group.scatter(at(other, 2), at(0, 4), group.rank()), InvalidInput);

        group.all_to_all(at(0, 4), at(4, 4)).wait();
        group.all_gather(at(0, 4), at(own, 2)).wait();
        group.reduce_scatter(at(own, 2), at(0, 4)).wait();
        EXPECT_EQ(memory[own], 2);
    });
}

TEST(AllocateShared, RefusesASizeThatOverflows) {
    run_ranks(1, [](ProcessGroup& group) {
        EXPECT_THROW(group.allocate_shared(SIZE_MAX), InvalidInput);
        EXPECT_THROW(group.allocate_shared(SIZE_MAX - 4096), InvalidInput);
        EXPECT_EQ(group.allocate_shared(8).size(), 8U);
    });
}

TEST(Testing, RefusesAWorldWithoutRanks) {
    EXPECT_THROW(run_ranks(0, [](ProcessGroup&) {}), InvalidInput);
    EXPECT_THROW((void)ddp::testing::failures_of_ranks(-1, [](ProcessGroup&) {}), InvalidInput);
}

}  // namespace
