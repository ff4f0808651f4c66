#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/workers/nccl_world.h"
#include "tests/workers/reference_reduction.h"

namespace {

using namespace ddp;
using namespace ddp::testing;
using reference::Bytes;
using reference::joined;
using reference::slice;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kRanks = 3;
using reference::kTypes;
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::Product};
/// Entry points that are new in 2.28.
const std::vector<std::string> kNative = {"ncclAlltoAll", "ncclGather", "ncclScatter"};

std::vector<Bytes> inputs_of(DType type, std::size_t count) {
    std::vector<Bytes> all;
    for (unsigned r = 0; r < kRanks; ++r) all.push_back(reference::random_values(type, count, 60 + r));
    return all;
}

TEST(NcclCollectives, ReduceAllTypesWithAllOperations) {
    expect_all_well(failures_of(kRanks, [](NcclRank& rank) {
        const int me = rank.group.rank();
        for (const DType type : kTypes) {
            for (const ReduceOp op : kOps) {
                if (!is_reducible(type, op)) continue;
                const auto inputs = inputs_of(type, 3 * 41);
                const Bytes& mine = inputs[static_cast<std::size_t>(me)];
                const Bytes expected = reference::reduce(inputs, type, op);

                const Buffer everywhere = rank.holding(mine, type);
                rank.group.all_reduce(everywhere, op).synchronize();
                EXPECT_EQ(rank.bytes_of(everywhere), expected) << name_of(type) << name_of(op);

                const Buffer input = rank.holding(mine, type);
                const Buffer output = rank.holding(Bytes(mine.size()), type);
                rank.group.all_reduce(output, input, op).synchronize();
                EXPECT_EQ(rank.bytes_of(output), expected) << name_of(type) << name_of(op);
                EXPECT_EQ(rank.bytes_of(input), mine) << name_of(type) << name_of(op);

                const Buffer on_root = rank.holding(mine, type);
                rank.group.reduce(on_root, 1, op).synchronize();
                EXPECT_EQ(rank.bytes_of(on_root), me == 1 ? expected : mine) << name_of(type) << name_of(op);

                const Buffer whole = rank.holding(mine, type);
                const Buffer part = rank.holding(Bytes(41 * size_of(type)), type);
                rank.group.reduce_scatter(part, whole, op).synchronize();
                EXPECT_EQ(rank.bytes_of(part), slice(expected, me, 41 * size_of(type)));
            }
        }
    }));
}

TEST(NcclCollectives, CoalescedCallsStartTogether) {
    expect_all_well(failures_of(kRanks, [](NcclRank& rank) {
        const auto me = static_cast<std::size_t>(rank.group.rank());
        const auto inputs = inputs_of(DType::I32, 3);
        const Buffer sum = rank.holding(inputs[me], DType::I32), copy = rank.holding(inputs[me], DType::I32),
                     all = rank.holding(Bytes(kRanks * inputs[me].size()), DType::I32);
        rank.group
            .coalesced([&] {
                (void)rank.group.all_gather(all, copy);
                (void)rank.group.all_reduce(sum);
            })
            .synchronize();
        EXPECT_EQ(rank.bytes_of(all), joined(inputs));
        EXPECT_EQ(rank.bytes_of(sum), reference::reduce(inputs, DType::I32, ReduceOp::Sum));
    }));
}

void move_every_type(NcclRank& rank) {
    const int me = rank.group.rank();
    for (const DType type : kTypes) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1001}}) {
            const auto inputs = inputs_of(type, kRanks * count);
            const std::size_t each = count * size_of(type);
            const Buffer whole = rank.holding(inputs[static_cast<std::size_t>(me)], type);
            const Buffer part = rank.holding(slice(inputs[static_cast<std::size_t>(me)], 0, each), type);
            const Buffer all = rank.holding(Bytes(kRanks * each), type);
            std::vector<Bytes> firsts, own_slices;
            for (const Bytes& input : inputs) {
                firsts.push_back(slice(input, 0, each));
                own_slices.push_back(slice(input, me, each));
            }
            rank.group.gather(me == 2 ? all : Buffer{}, part, 2).synchronize();
            if (me == 2) {
                EXPECT_EQ(rank.bytes_of(all), joined(firsts)) << name_of(type);
            }
            rank.group.scatter(part, me == 0 ? whole : Buffer{}, 0).synchronize();
            EXPECT_EQ(rank.bytes_of(part), slice(inputs[0], me, each)) << name_of(type);
            rank.group.all_to_all(all, whole).synchronize();
            EXPECT_EQ(rank.bytes_of(all), joined(own_slices)) << name_of(type);
            if (me == 0) rank.group.send(whole, 2).synchronize();
            if (me == 2) {
                rank.group.recv(all, 0).synchronize();
                EXPECT_EQ(rank.bytes_of(all), inputs[0]) << name_of(type);
            }
        }
    }
}

TEST(NcclCollectives, MoveAllTypesWithNcclsOwnCalls) {
    expect_all_well(failures_of(kRanks, move_every_type));
}

TEST(NcclCollectives, MoveAllTypesInGroupsOfMessagesOnAnOlderNccl) {
    expect_all_well(failures_of(kRanks, move_every_type, {.hidden = kNative}));
}

TEST(NcclCollectives, TakeSlicesOfDifferentLengths) {
    expect_all_well(failures_of(kRanks, [](NcclRank& rank) {
        const int me = rank.group.rank();
        const auto own = static_cast<std::size_t>(me);
        const Counts counts{3, 0, 40};
        const std::size_t firsts[] = {0, 3, 3};
        const auto inputs = inputs_of(DType::F16, 43);
        const auto part = [&](const Bytes& whole) {
            const auto begin = whole.begin() + static_cast<long>(2 * firsts[me]);
            return Bytes(begin, begin + static_cast<long>(2 * counts[own]));
        };
        const Buffer mine = rank.holding(part(inputs[0]), DType::F16),
                     all = rank.holding(Bytes(86), DType::F16);
        rank.group.all_gather_v(all, mine, counts).synchronize();
        EXPECT_EQ(rank.bytes_of(all), inputs[0]);

        const Buffer whole = rank.holding(inputs[own], DType::F16);
        rank.group.reduce_scatter_v(mine, whole, counts, ReduceOp::Product).synchronize();
        EXPECT_EQ(rank.bytes_of(mine), part(reference::reduce(inputs, DType::F16, ReduceOp::Product)));

        // Rank r sends r elements to every rank.
        const Bytes sent = reference::random_bytes(2 * kRanks * own, 80 + static_cast<unsigned>(me));
        const Buffer got = rank.holding(Bytes(6), DType::F16);
        rank.group.all_to_all_v(got, {0, 1, 2}, rank.holding(sent, DType::F16), {own, own, own})
            .synchronize();
        Bytes expected = slice(reference::random_bytes(6, 81), me, 2);
        const Bytes two = slice(reference::random_bytes(12, 82), me, 4);
        expected.insert(expected.end(), two.begin(), two.end());
        EXPECT_EQ(rank.bytes_of(got), expected);
    }));
}

TEST(NcclCollectives, SendAndReceiveSeveralMessagesAtOnce) {
    expect_all_well(failures_of(kRanks, [](NcclRank& rank) {
        const int me = rank.group.rank(), next = (me + 1) % kRanks, previous = (me + 2) % kRanks;
        const Buffer mine = rank.filled({static_cast<float>(me)}), a = rank.filled({-1}),
                     b = rank.filled({-1});
        using enum Message::Direction;
        rank.group
            .batch_send_recv(
                {{Send, mine, next}, {Send, mine, previous}, {Recv, a, next}, {Recv, b, previous}})
            .synchronize();
        EXPECT_EQ(rank.values_of(a), std::vector<float>{static_cast<float>(next)});
        EXPECT_EQ(rank.values_of(b), std::vector<float>{static_cast<float>(previous)});
    }));
}

TEST(NcclCollectives, RefuseWrongBuffersAtTheCall) {
    expect_all_well(failures_of(2, [](NcclRank& rank) {
        const Buffer two = rank.filled({1, 2}), three = rank.filled({1, 2, 3});
        EXPECT_THROW((void)rank.group.reduce(two, 2), InvalidInput);
        EXPECT_THROW((void)rank.group.gather(three, two, rank.group.rank()), InvalidInput);
        EXPECT_THROW((void)rank.group.scatter(two, three, rank.group.rank()), InvalidInput);
        EXPECT_THROW((void)rank.group.all_to_all(three, three), InvalidInput);
        EXPECT_THROW((void)rank.group.send(two, rank.group.rank()), InvalidInput);
        float on_host = 0;
        EXPECT_THROW((void)rank.group.recv({&on_host, 1, DType::F32, {}}, 1), InvalidInput);
    }));
}

TEST(NcclCollectives, NumberMessagesSeparately) {
    expect_all_well(failures_of(3, [](NcclRank& rank) {
        const Buffer buffer = rank.filled({1});
        const ddprun::RankLine& line = rank.segment.line(static_cast<std::uint32_t>(rank.group.rank()));
        const std::uint64_t before = line.started_seq;
        if (rank.group.rank() == 0) rank.group.send(buffer, 1).synchronize();
        if (rank.group.rank() == 1) rank.group.recv(buffer, 0).synchronize();
        EXPECT_EQ(line.started_seq, before);
        rank.group.all_reduce(buffer).synchronize();
        EXPECT_EQ(line.started_seq, before + 1);
    }));
}

/// Disturbs call 2 of the communicator, which follows the barrier of `filled`, and returns its error.
std::string error_of(const std::function<void(NcclRank&, Buffer)>& call, const char* fault,
                     const std::vector<std::string>& hidden = {}) {
    const auto failures = failures_of(1,
                                      [&](NcclRank& rank) {
                                          call(rank, rank.filled({1, 2, 3, 4}));
                                      },
                                      {.faults = fault, .hidden = hidden});
    return message_of(failures[0]);
}

TEST(NcclCollectives, NameTheCallThatFails) {
    const auto reduce = [](NcclRank& rank, Buffer b) { rank.group.reduce(b, 0).synchronize(); };
    const auto gather = [](NcclRank& rank, Buffer b) { rank.group.gather(b, b, 0).synchronize(); };
    const auto scatter = [](NcclRank& rank, Buffer b) { rank.group.scatter(b, b, 0).synchronize(); };
    const auto all_to_all = [](NcclRank& rank, Buffer b) {
        rank.group.all_to_all(rank.filled({0, 0, 0, 0}), b).synchronize();
    };
    for (const char* fault : {"0:2:fail:3", "0:2:async:3"}) {
        const auto internal = [](const char* text) {
            return AllOf(StartsWith(text), HasSubstr("(ncclInternalError)"));
        };
        EXPECT_THAT(error_of(reduce, fault), internal("rank 0: reduce #2 (4 float32, 16 B, sum, root 0): "));
        EXPECT_THAT(error_of(gather, fault), internal("rank 0: gather #2 (4 float32, 16 B, root 0): "));
        EXPECT_THAT(error_of(scatter, fault), internal("rank 0: scatter #2 (4 float32, 16 B, root 0): "));
        // The second buffer took a barrier too.
        const std::string third = "0:3" + std::string(fault).substr(3);
        const auto named = internal("rank 0: all_to_all #3 (4 float32, 16 B): ");
        EXPECT_THAT(error_of(all_to_all, third.c_str()), named);
        EXPECT_THAT(error_of(all_to_all, third.c_str(), kNative), named);
    }
}

TEST(NcclCollectives, EndAMessageWithoutItsReceiverAtTheTimeOut) {
    const auto failures = failures_of(2,
                                      [](NcclRank& rank) {
                                          const Buffer buffer = rank.filled({1});
                                          if (rank.group.rank() == 0)
                                              rank.group.recv(buffer, 1).synchronize();
                                      },
                                      {.timeout = std::chrono::milliseconds(300)});
    EXPECT_TRUE(is<TimeoutError>(failures[0]));
    EXPECT_THAT(message_of(failures[0]),
                HasSubstr("rank 0: recv #1 (1 float32, 4 B, from 1): did not finish"));
}

}  // namespace
