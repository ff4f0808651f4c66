#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <future>
#include <latch>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "ddp/worker/encoded_failure.h"
#include "failures.h"
#include "fake_link.h"
#include "forked_child.h"
#include "reference_reduction.h"
#include "several_nodes.h"
#include "tests/support/half_float.h"

namespace {

using namespace ddp;
using ddp::testing::FakeNetwork;
using ddp::testing::is;
using ddp::testing::message_of;
using ddp::testing::SeveralNodes;
using reference::Bytes;
using reference::joined;
using reference::slice;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

const std::vector<std::vector<int>> kWorlds = {{1, 1}, {2, 2}, {3, 1}, {2, 1, 3}, {1, 2, 1, 2, 1}};
// Counts around the limits of the algorithms: sent with the headers, in one and several ranges, in one and in
// two rounds.
constexpr std::size_t kCounts[] = {0, 1, 17, 2048, 2049, 40'003};
constexpr std::size_t kManyStretches = 700'001;

Bytes values_of(int rank, DType type, std::size_t count) {
    return reference::random_values(type, count, 90 + static_cast<unsigned>(rank));
}

std::vector<Bytes> all_values(int ranks, DType type, std::size_t count) {
    std::vector<Bytes> all;
    for (int rank = 0; rank < ranks; ++rank) all.push_back(values_of(rank, type, count));
    return all;
}

/// Reduces in rank order within each node, then in node order.
Bytes reduced_by_nodes(const std::vector<int>& nodes, const std::vector<Bytes>& inputs, DType type,
                       ReduceOp op) {
    std::vector<Bytes> sums;
    auto next = inputs.begin();
    for (const int ranks : nodes) {
        sums.push_back(reference::reduce({next, next + ranks}, type, op));
        next += ranks;
    }
    return reference::reduce(sums, type, op);
}

float widened(std::uint16_t bits, DType type) {
    return type == DType::BF16 ? half_float::from_bf16(bits) : half_float::from_f16(bits);
}
std::uint16_t rounded(float value, DType type) {
    return type == DType::BF16 ? half_float::to_bf16(value) : half_float::to_f16(value);
}

template <class To, class From, class Convert>
Bytes converted(const Bytes& bytes, Convert convert) {
    Bytes out(bytes.size() / sizeof(From) * sizeof(To));
    for (std::size_t i = 0; i < bytes.size() / sizeof(From); ++i) {
        From from;
        std::memcpy(&from, bytes.data() + i * sizeof from, sizeof from);
        const To to = convert(from);
        std::memcpy(out.data() + i * sizeof to, &to, sizeof to);
    }
    return out;
}

/// 16-bit floats stay float32 until the end.
Bytes reduced(const std::vector<int>& nodes, const std::vector<Bytes>& inputs, DType type, ReduceOp op) {
    if (type != DType::BF16 && type != DType::F16) return reduced_by_nodes(nodes, inputs, type, op);
    std::vector<Bytes> wide;
    for (const Bytes& one : inputs)
        wide.push_back(
            converted<float, std::uint16_t>(one, [&](std::uint16_t bits) { return widened(bits, type); }));
    return converted<std::uint16_t, float>(reduced_by_nodes(nodes, wide, DType::F32, op),
                                           [&](float value) { return rounded(value, type); });
}

Buffer whole(Bytes& bytes, DType type = DType::F32) {
    return {bytes.data(), bytes.size() / size_of(type), type, {}};
}
Bytes& own(std::vector<Bytes>& of_all, const ProcessGroup& group) {
    return of_all[static_cast<std::size_t>(group.rank())];
}

/// Calls `check` on every world and for every number of elements.
void for_each_case(const std::function<void(ProcessGroup&, const std::vector<int>&, std::size_t)>& check) {
    for (const std::vector<int>& nodes : kWorlds) {
        SeveralNodes world(nodes);
        world.run([&](ProcessGroup& group) {
            for (const std::size_t count : kCounts) check(group, nodes, count);
        });
    }
}

TEST(AcrossNodes, AllReduceGivesEveryRankTheSumInNodeOrderBitForBit) {
    for_each_case([](ProcessGroup& group, const std::vector<int>& nodes, std::size_t count) {
        auto values = all_values(group.size(), DType::F32, count);
        const Bytes expected = reduced(nodes, values, DType::F32, ReduceOp::Sum);
        group.all_reduce(whole(own(values, group))).wait();
        ASSERT_EQ(own(values, group), expected) << nodes.size() << " nodes, " << count;
    });
}

TEST(AcrossNodes, AllReduceSplitsLargeBuffersIntoRanges) {
    for (const std::vector<int>& nodes : {std::vector<int>{1, 1}, {2, 3}, {1, 2, 1}}) {
        SeveralNodes(nodes).run([&](ProcessGroup& group) {
            auto values = all_values(group.size(), DType::F32, kManyStretches);
            const Bytes expected = reduced(nodes, values, DType::F32, ReduceOp::Sum);
            group.all_reduce(whole(own(values, group))).wait();
            ASSERT_EQ(own(values, group), expected) << nodes.size() << " nodes";
        });
    }
}

TEST(AcrossNodes, AllReduceTakesAllTypesAndOperations) {
    const std::vector<int> nodes{2, 1};
    SeveralNodes(nodes).run([&](ProcessGroup& group) {
        for (const DType type : reference::kTypes) {
            for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product}) {
                for (const std::size_t count : {std::size_t{33}, std::size_t{40'003}}) {
                    if (!is_reducible(type, op)) continue;
                    auto values = all_values(3, type, count);
                    const Bytes expected = reduced(nodes, values, type, op), input = own(values, group);
                    Bytes output(input.size());
                    group.all_reduce(whole(output, type), {input.data(), count, type, {}}, op).wait();
                    ASSERT_EQ(output, expected) << name_of(type) << " " << name_of(op) << " " << count;
                    ASSERT_EQ(input, own(values, group)) << name_of(type) << " " << name_of(op);
                    group.all_reduce(whole(own(values, group), type), op).wait();
                    ASSERT_EQ(own(values, group), expected)
                        << name_of(type) << " " << name_of(op) << " " << count;
                }
            }
        }
    });
}

TEST(AcrossNodes, AverageDividesTheSumOnceByTheNumberOfAllRanks) {
    SeveralNodes({2, 1}).run([](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{33}, std::size_t{40'003}}) {
            std::vector<double> values(count, group.rank() + 1.5);
            group.all_reduce(buffer_of(std::span<double>(values)), ReduceOp::Avg).wait();
            ASSERT_EQ(values, std::vector<double>(count, 7.5 / 3)) << count;
        }
    });
}

TEST(AcrossNodes, SumsOf16BitFloatsAreRoundedOnce) {
    // The values are 1 and two halves of the last bit of 1: intermediate rounding would lose them. Each
    // number of nodes and each algorithm is tested.
    for (const std::vector<int>& nodes : {std::vector<int>{2, 1}, {1, 1, 1}}) {
        SeveralNodes(nodes).run([](ProcessGroup& group) {
            for (const DType type : {DType::BF16, DType::F16}) {
                const float half_of_last = type == DType::BF16 ? 0x1p-8F : 0x1p-11F;
                const std::uint16_t mine = rounded(group.rank() == 0 ? 1.0F : half_of_last, type),
                                    sum = rounded(1.0F + 2 * half_of_last, type);
                ASSERT_NE(sum, rounded(1.0F, type));
                for (const std::size_t count : {std::size_t{9}, std::size_t{60'003}, std::size_t{700'002}}) {
                    std::vector<std::uint16_t> values(count, mine), slice(count / 3);
                    const Buffer buffer{values.data(), count, type, {}};
                    group.reduce_scatter({slice.data(), slice.size(), type, {}}, buffer).wait();
                    ASSERT_EQ(slice, std::vector<std::uint16_t>(count / 3, sum))
                        << name_of(type) << " " << count;
                    group.all_reduce(buffer).wait();
                    ASSERT_EQ(values, std::vector<std::uint16_t>(count, sum))
                        << name_of(type) << " " << count;
                    values.assign(count, rounded(static_cast<float>(group.rank() + 1), type));
                    group.all_reduce(buffer, ReduceOp::Avg).wait();
                    ASSERT_EQ(values, std::vector<std::uint16_t>(count, rounded(2.0F, type)));
                }
            }
        });
    }
}

TEST(AcrossNodes, AllReduceTakesSharedMemoryOnOneNodeAndPrivateOnAnother) {
    const std::vector<int> nodes{2, 2};
    SeveralNodes(nodes).run([&](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{40'003}, kManyStretches}) {
            auto values = all_values(4, DType::F32, count);
            const std::span<std::byte> shared = group.allocate_shared(count * 4);
            std::memcpy(shared.data(), own(values, group).data(), count * 4);
            const Bytes expected = reduced(nodes, values, DType::F32, ReduceOp::Sum);
            const bool in_shared = group.rank() < 2;
            group
                .all_reduce(in_shared ? Buffer{shared.data(), count, DType::F32, {}}
                                      : whole(own(values, group)))
                .wait();
            const std::byte* const result = in_shared ? shared.data() : own(values, group).data();
            ASSERT_EQ(std::memcmp(result, expected.data(), expected.size()), 0) << count;
        }
    });
}

TEST(AcrossNodes, RanksOfANodeNeedNotBeConsecutive) {
    SeveralNodes(SeveralNodes::Ranks{{0, 2, 4}, {1, 3}}).run([](ProcessGroup& group) {
        const std::int64_t own_rank = group.rank(), n = group.size();
        for (const std::size_t each : {std::size_t{3}, std::size_t{5'001}}) {
            const auto filled = [&](std::int64_t value) { return std::vector<std::int64_t>(each, value); };
            const auto by_rank = [&](const std::function<std::int64_t(std::int64_t)>& value) {
                std::vector<std::int64_t> slices;
                for (std::int64_t r = 0; r < n; ++r) slices.insert(slices.end(), each, value(r));
                return slices;
            };
            std::vector<std::int64_t> sum = filled(own_rank + 1), last = filled(own_rank),
                                      mine = filled(own_rank), everyones = by_rank([](auto) { return 0; });
            group.all_reduce(buffer_of(sum)).wait();
            ASSERT_EQ(sum, filled(15));
            group.broadcast(buffer_of(last), 3).wait();
            ASSERT_EQ(last, filled(3));
            group.all_gather(buffer_of(everyones), buffer_of(mine)).wait();
            ASSERT_EQ(everyones, by_rank([](auto r) { return r; }));
            std::vector<std::int64_t> to_all = by_rank([&](auto r) { return 10 * own_rank + r; });
            group.all_to_all(buffer_of(everyones), buffer_of(to_all)).wait();
            ASSERT_EQ(everyones, by_rank([&](auto r) { return 10 * r + own_rank; }));
            group.reduce_scatter(buffer_of(mine), buffer_of(to_all)).wait();
            ASSERT_EQ(mine, filled(100 + n * own_rank));
        }
        const auto part = group.split(static_cast<int>(own_rank % 2), 0);
        ASSERT_EQ(part->size(), own_rank % 2 == 0 ? 3 : 2);
        ASSERT_EQ(part->rank(), own_rank / 2);
    });
}

TEST(AcrossNodes, BroadcastSendsTheBytesOfEveryRoot) {
    for_each_case([](ProcessGroup& group, const std::vector<int>&, std::size_t count) {
        for (int root = 0; root < group.size(); ++root) {
            auto values = all_values(group.size(), DType::F32, count);
            group.broadcast(whole(own(values, group)), root).wait();
            ASSERT_EQ(own(values, group), values_of(root, DType::F32, count)) << root;
        }
    });
}

TEST(AcrossNodes, GatherAndAllGatherPutEveryRanksInputAtItsPlace) {
    for_each_case([](ProcessGroup& group, const std::vector<int>&, std::size_t count) {
        auto values = all_values(group.size(), DType::F32, count);
        const Bytes expected = joined(values);
        Bytes all(expected.size());
        group.all_gather(whole(all), whole(own(values, group))).wait();
        ASSERT_EQ(all, expected) << count;
        Bytes gathered(expected.size());
        const int root = group.size() - 1;
        group.gather(group.rank() == root ? whole(gathered) : Buffer{}, whole(own(values, group)), root)
            .wait();
        if (group.rank() == root) {
            ASSERT_EQ(gathered, expected) << count;
        }
    });
}

TEST(AcrossNodes, ReduceScatterAndReduceGiveTheBitsOfAllReduce) {
    for_each_case([](ProcessGroup& group, const std::vector<int>& nodes, std::size_t count) {
        const std::size_t n = static_cast<std::size_t>(group.size());
        auto values = all_values(group.size(), DType::F32, count * n);
        const Bytes expected = reduced(nodes, values, DType::F32, ReduceOp::Sum);
        Bytes mine(count * 4);
        group.reduce_scatter(whole(mine), whole(own(values, group))).wait();
        ASSERT_EQ(mine, slice(expected, static_cast<std::size_t>(group.rank()), count * 4)) << count;
        const Bytes before = own(values, group);
        group.reduce(whole(own(values, group)), 1).wait();
        ASSERT_EQ(own(values, group), group.rank() == 1 ? expected : before) << count;
    });
}

TEST(AcrossNodes, ScatterAndAllToAllGiveEveryRankItsSlices) {
    for_each_case([](ProcessGroup& group, const std::vector<int>&, std::size_t count) {
        const std::size_t n = static_cast<std::size_t>(group.size()),
                          rank = static_cast<std::size_t>(group.rank()), each = count * 4;
        auto values = all_values(group.size(), DType::F32, count * n);
        Bytes mine(each), all(each * n), expected;
        group.scatter(whole(mine), group.rank() == 1 ? whole(values[1]) : Buffer{}, 1).wait();
        ASSERT_EQ(mine, slice(values[1], rank, each)) << count;
        group.all_to_all(whole(all), whole(own(values, group))).wait();
        for (const Bytes& from : values) {
            const Bytes part = slice(from, rank, each);
            expected.insert(expected.end(), part.begin(), part.end());
        }
        ASSERT_EQ(all, expected) << count;
    });
}

TEST(AcrossNodes, UnevenCollectivesKeepTheirSlices) {
    for (const std::vector<int>& nodes : kWorlds) {
        SeveralNodes world(nodes);
        world.run([&](ProcessGroup& group) {
            Counts counts;
            for (int rank = 0; rank < group.size(); ++rank)
                counts.push_back(rank == 1 ? 0 : static_cast<std::size_t>(rank) * 1000 + 3);
            const std::size_t rank = static_cast<std::size_t>(group.rank());
            const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
            const std::size_t before =
                std::accumulate(counts.begin(), counts.begin() + group.rank(), std::size_t{0});
            std::vector<std::int32_t> mine(counts[rank], group.rank()), all(total), expected;
            for (std::size_t r = 0; r < counts.size(); ++r)
                expected.insert(expected.end(), counts[r], static_cast<std::int32_t>(r));
            const auto buffer = [](std::vector<std::int32_t>& values) {
                return buffer_of(std::span<std::int32_t>(values));
            };
            group.all_gather_v(buffer(all), buffer(mine), counts).wait();
            ASSERT_EQ(all, expected);
            std::iota(all.begin(), all.end(), 0);
            group.reduce_scatter_v(buffer(mine), buffer(all), counts).wait();
            for (std::size_t i = 0; i < mine.size(); ++i)
                ASSERT_EQ(mine[i], static_cast<std::int32_t>(before + i) * group.size());
            // Each rank sends as many elements to a rank as that rank's number.
            Counts sent(counts.size()), received(counts.size(), rank);
            std::iota(sent.begin(), sent.end(), 0);
            std::vector<std::int32_t> out(std::accumulate(sent.begin(), sent.end(), std::size_t{0}),
                                          group.rank()),
                in(rank * counts.size()), in_order;
            group.all_to_all_v(buffer(in), received, buffer(out), sent).wait();
            for (std::size_t r = 0; r < counts.size(); ++r)
                in_order.insert(in_order.end(), rank, static_cast<std::int32_t>(r));
            ASSERT_EQ(in, in_order);
        });
    }
}

TEST(AcrossNodes, BytesOfAnyLengthReachEveryRank) {
    for (const std::vector<int>& nodes : kWorlds) {
        SeveralNodes(nodes).run([](ProcessGroup& group) {
            for (const std::size_t length : {0, 5, 100'000}) {
                const auto of = [&](int rank) {
                    return std::string(length * static_cast<std::size_t>(rank),
                                       static_cast<char>('a' + rank));
                };
                const std::vector<std::string> all = group.all_gather_bytes(of(group.rank()));
                ASSERT_EQ(all.size(), static_cast<std::size_t>(group.size()));
                for (int rank = 0; rank < group.size(); ++rank)
                    ASSERT_EQ(all[static_cast<std::size_t>(rank)], of(rank));
            }
        });
    }
}

TEST(AcrossNodes, MessagesReachRanksOfTheSameAndOfAnotherNodeInOrder) {
    SeveralNodes({2, 1, 1}).run([](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{300'007}}) {
            for (int from = 0; from < group.size(); ++from) {
                for (int to = 0; to < group.size(); ++to) {
                    if (from == to) continue;
                    Bytes values = values_of(from, DType::F32, count);
                    if (group.rank() == from) group.send(whole(values), to).wait();
                    if (group.rank() != to) continue;
                    Bytes got(values.size());
                    group.recv(whole(got), from).wait();
                    ASSERT_EQ(got, values);
                }
            }
        }
        group.barrier().wait();
    });
}

TEST(AcrossNodes, ABatchOfMessagesHasNoOrderBetweenRanks) {
    SeveralNodes({2, 2}).run([](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{3}, std::size_t{300'007}}) {
            std::vector<Bytes> out, in;
            std::vector<Message> messages;
            for (int peer = 0; peer < group.size(); ++peer) {
                out.push_back(values_of(group.rank() * 10 + peer, DType::F32, count));
                in.emplace_back(count * 4);
            }
            for (int peer = 0; peer < group.size(); ++peer) {
                if (peer == group.rank()) continue;
                messages.push_back(
                    {Message::Direction::Send, whole(out[static_cast<std::size_t>(peer)]), peer});
                messages.push_back(
                    {Message::Direction::Recv, whole(in[static_cast<std::size_t>(peer)]), peer});
            }
            group.batch_send_recv(messages).wait();
            for (int peer = 0; peer < group.size(); ++peer) {
                if (peer == group.rank()) continue;
                ASSERT_EQ(in[static_cast<std::size_t>(peer)],
                          values_of(peer * 10 + group.rank(), DType::F32, count));
            }
        }
    });
}

TEST(AcrossNodes, ABatchSendsToOtherNodesWhileItWaitsOnItsOwn) {
    // Rank 0 waits for 1 on its node, which waits for 2, which waits for a message of 0's batch.
    SeveralNodes({2, 1}).run([](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{3}, std::size_t{3'000'007}}) {
            Bytes here = values_of(7, DType::F32, count), there = values_of(8, DType::F32, count),
                  got(count * 4);
            if (group.rank() == 0) {
                group
                    .batch_send_recv({{Message::Direction::Recv, whole(got), 1},
                                      {Message::Direction::Send, whole(there), 2}})
                    .wait();
                ASSERT_EQ(got, here);
            } else if (group.rank() == 1) {
                group.recv(whole(got), 2).wait();
                ASSERT_EQ(got, there);
                group.batch_send_recv({{Message::Direction::Send, whole(here), 0}}).wait();
            } else {
                group.batch_send_recv({{Message::Direction::Recv, whole(got), 0}}).wait();
                group.send(whole(got), 1).wait();
            }
        }
    });
}

TEST(AcrossNodes, SplitsCrossNodesOrStayOnOneOrTakeOneRankOfEach) {
    SeveralNodes({2, 1, 2}).run([](ProcessGroup& group) {
        const auto sum_of = [](ProcessGroup& part, int value) {
            std::vector<float> values(5000, static_cast<float>(value));
            part.all_reduce(buffer_of(std::span<float>(values))).wait();
            return values.back();
        };
        // Ranks 0 2 4, and 1 3, in reverse order.
        const auto crossing = group.split(group.rank() % 2, -group.rank());
        EXPECT_EQ(sum_of(*crossing, group.rank()), group.rank() % 2 == 0 ? 6.F : 4.F);
        EXPECT_EQ(crossing->rank(), group.rank() % 2 == 0 ? (4 - group.rank()) / 2 : (3 - group.rank()) / 2);
        const int node = group.rank() < 2 ? 0 : group.rank() == 2 ? 1 : 2;
        const auto within = group.split(node == 1 ? -1 : node, 0);
        ASSERT_EQ(within == nullptr, node == 1);
        if (within) {
            EXPECT_EQ(sum_of(*within, group.rank()), node == 0 ? 1.F : 7.F);
        }
        const auto leaders = group.split(group.rank() == 1 || group.rank() == 4 ? -1 : 0, 0);
        if (leaders) {
            EXPECT_EQ(sum_of(*leaders, 1), 3.F);
        }
        EXPECT_EQ(sum_of(group, 1), 5.F);
    });
}

TEST(AcrossNodes, APartOfTheWorldIsMadeWithoutTheOtherRanks) {
    SeveralNodes({2, 1, 2}).run([](ProcessGroup& group) {
        const auto sum_of = [](ProcessGroup& part, int value) {
            std::vector<float> values(5000, static_cast<float>(value));
            part.all_reduce(buffer_of(values)).wait();
            return values.back();
        };
        if (group.rank() == 4 || group.rank() == 0) {
            const auto crossing = group.create_part({4, 0}, "crossing");
            EXPECT_EQ(crossing->rank(), group.rank() == 4 ? 0 : 1);
            EXPECT_EQ(sum_of(*crossing, group.rank()), 4.F);
        }
        if (group.rank() < 2) {
            EXPECT_EQ(sum_of(*group.create_part({0, 1}, "within"), group.rank()), 1.F);
        }
        if (group.rank() != 2) {
            EXPECT_EQ(sum_of(*group.create_part({3, 0, 1, 4}, "both"), 1), 4.F);
        }
        EXPECT_EQ(sum_of(group, 1), 5.F);
    });
}

/// Sends all kinds of messages between nodes, over a transport with these properties.
void all_collectives_are_right_over(FakeNetwork::Habits habits) {
    const std::vector<int> nodes{2, 1, 2};
    FakeNetwork network(habits);
    SeveralNodes world(nodes);
    world.set_links([&] { return network.open(); });
    world.run([&](ProcessGroup& group) {
        for (const std::size_t count : {std::size_t{17}, std::size_t{40'003}}) {
            auto values = all_values(group.size(), DType::F32, count);
            const Bytes sum = reduced(nodes, values, DType::F32, ReduceOp::Sum);
            Bytes gathered(joined(values).size()), moved = values[1];
            group.all_gather(whole(gathered), whole(own(values, group))).wait();
            EXPECT_EQ(gathered, joined(values));
            if (group.rank() == 1) group.send(whole(moved), 4).wait();
            if (group.rank() == 4) group.recv(whole(moved), 1).wait();
            group.broadcast(whole(moved), 4).wait();
            EXPECT_EQ(moved, values[1]);
            group.all_reduce(whole(own(values, group))).wait();
            EXPECT_EQ(own(values, group), sum) << count;
        }
        const auto crossing = group.split(group.rank() % 2, 0);
        EXPECT_EQ(crossing->all_gather_bytes("word").size(), group.rank() % 2 == 0 ? 3U : 2U);
    });
}

TEST(AcrossNodes, TagsFitATransportWith48Bits) {
    all_collectives_are_right_over({.tag_mask = (std::uint64_t{1} << 48) - 1});
}

TEST(AcrossNodes, TheLengthOfASendIsIgnored) {
    all_collectives_are_right_over({.garbles_send_lengths = true});
}

TEST(AcrossNodes, MessagesMayBeginLateAndMoveInParts) {
    all_collectives_are_right_over({.refusals = 7, .most_at_once = 5000});
}

TEST(AcrossNodes, SmallCallsSendMessagesThatGrowWithTheLogarithmOfTheNodes) {
    for (const std::size_t nodes : {std::size_t{2}, std::size_t{5}, std::size_t{8}, std::size_t{9}}) {
        const auto messages_of = [&](int rounds) {
            FakeNetwork network;
            SeveralNodes world(std::vector<int>(nodes, 1));
            world.set_links([&] { return network.open(); });
            world.run([&](ProcessGroup& group) {
                std::vector<float> one(1), all(nodes), others(nodes);
                const Buffer value = buffer_of(one), values = buffer_of(all);
                for (int round = 0; round < rounds; ++round) {
                    group.barrier().wait();
                    group.all_reduce(value).wait();
                    group.reduce(value, 1).wait();
                    group.broadcast(value, 1).wait();
                    group.all_gather(values, value).wait();
                    group.gather(values, value, 1).wait();
                    group.scatter(value, values, 1).wait();
                    group.reduce_scatter(value, values).wait();
                    group.all_to_all(buffer_of(others), values).wait();
                }
            });
            return network.messages();
        };
        EXPECT_EQ(messages_of(2) - messages_of(0), 2 * 9 * nodes * std::bit_width(nodes - 1)) << nodes;
    }
}

thread_local std::string link_address;  ///< of the rank of this thread

/// What the ranks of three nodes throw when rank 3, the leader of a node, calls `lose` with the addresses of
/// rank 0's link and of its own.
std::vector<std::exception_ptr> failures_after(
    const std::function<void(FakeNetwork&, const std::string& first, const std::string& own)>& lose) {
    FakeNetwork network;
    SeveralNodes world({2, 1, 1});
    world.set_links([&] {
        auto link = network.open();
        link_address = link->address();
        return link;
    });
    return world.failures([&](ProcessGroup& group) {
        const std::string first = group.all_gather_bytes(link_address)[0];
        std::vector<float> values(100'000);
        group.all_reduce(buffer_of(std::span<float>(values))).wait();
        if (group.rank() == 3) lose(network, first, link_address);
        for (;;) group.all_reduce(buffer_of(std::span<float>(values))).wait();
    });
}

TEST(AcrossNodesFailure, AllRanksLearnOfALostNode) {
    const auto failures = failures_after(
        [](FakeNetwork& network, const std::string&, const std::string& own) { network.lose(own); });
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<PeerLostError>(failure)) << message_of(failure);
        EXPECT_THAT(message_of(failure), HasSubstr("Connection reset by peer"));
    }
}

TEST(AcrossNodesFailure, ARankThatCannotOpenItsLinkIsLostToTheOthers) {
    FakeNetwork network;
    SeveralNodes world({2, 1, 1});
    std::atomic<int> opened = 0;
    world.set_links([&] {
        if (++opened == 2) throw Error("Too many open files");
        return network.open();
    });
    int lost = 0;
    for (const auto& failure : world.failures([](ProcessGroup&) {})) {
        EXPECT_THAT(message_of(failure), HasSubstr("Too many open files"));
        lost += is<PeerLostError>(failure) ? 1 : 0;
    }
    EXPECT_EQ(lost, 3);
}

TEST(EncodedFailure, AnErrorOfOneRankIsItsLossToOthers) {
    const auto thrown_to_others = [](const std::exception_ptr& failure) {
        try {
            throw_encoded_failure(encode_failure(failure), "all_reduce #2: rank 3 failed: ");
        } catch (...) {
            return std::current_exception();
        }
    };
    for (const auto& own : {std::make_exception_ptr(InvalidInput("no memory")),
                            std::make_exception_ptr(std::runtime_error("no memory"))}) {
        EXPECT_TRUE(is<PeerLostError>(thrown_to_others(own)));
        EXPECT_EQ(message_of(thrown_to_others(own)), "all_reduce #2: rank 3 failed: no memory");
    }
    EXPECT_TRUE(is<TimeoutError>(thrown_to_others(std::make_exception_ptr(TimeoutError("late")))));
    EXPECT_TRUE(is<MismatchError>(thrown_to_others(std::make_exception_ptr(MismatchError("other")))));
}

TEST(AcrossNodesFailure, AllRanksLearnOfOneBrokenLinkBetweenTwoOfThreeNodes) {
    const auto begin = std::chrono::steady_clock::now();
    const auto failures = failures_after([](FakeNetwork& network, const std::string& first,
                                            const std::string& own) { network.cut(first, own); });
    for (const auto& failure : failures) EXPECT_TRUE(is<PeerLostError>(failure)) << message_of(failure);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "half of the time-out";
}

TEST(AcrossNodesFailure, ANodeThatTimedOutMeetsTheOthersWhenItJoinsAgain) {
    FakeNetwork network;
    SeveralNodes world({1, 1}, std::chrono::seconds(60));
    world.set_links([&] { return network.open(); });
    // Node 0 joins alone and times out; then both join.
    EXPECT_THROW(world.join_alone(0, std::chrono::milliseconds(50)), TimeoutError);
    EXPECT_TRUE(world.words().empty()) << "its link is closed";
    world.run([](ProcessGroup& group) { EXPECT_EQ(group.all_gather_bytes("word").size(), 2U); });
}

TEST(FabricLink, LeavesSignalHandlersUnchanged) {
    const auto handlers = [] {
        std::vector<decltype(SIG_DFL)> all;
        for (int signal = 1; signal < NSIG; ++signal) {
            struct sigaction action {};
            ::sigaction(signal, nullptr, &action);
            all.push_back(action.sa_handler);
        }
        return all;
    };
    const auto open = [&] {
        const auto before = handlers();
        net::open_fabric_link("127.0.0.1");
        ::_exit(handlers() == before ? 0 : 1);
    };
    GTEST_FLAG_SET(death_test_style,
                   "threadsafe");  // a new process: in this one libfabric may be loaded already
    EXPECT_EXIT(open(), ::testing::ExitedWithCode(0), "");
}

TEST(AcrossNodesFailure, DifferentCallsOnTwoNodesAreAMismatchOnEveryRank) {
    for (const std::size_t count : {std::size_t{4}, std::size_t{100'000}}) {
        SeveralNodes world({2, 2});
        const auto failures = world.failures([&](ProcessGroup& group) {
            std::vector<float> values(group.rank() < 2 ? count : count + 1);
            if (group.rank() < 2) group.all_reduce(buffer_of(std::span<float>(values))).wait();
            else group.broadcast(buffer_of(std::span<float>(values)), 2).wait();
        });
        for (const auto& failure : failures) {
            EXPECT_TRUE(is<MismatchError>(failure)) << message_of(failure);
            EXPECT_THAT(message_of(failure),
                        AllOf(HasSubstr("called all_reduce"), HasSubstr("called broadcast")));
        }
    }
}

TEST(AcrossNodesFailure, ACallThatOneOfManyNodesMakesIsNamedOnAllOfThem) {
    // Headers of five nodes reach each other in three rounds.
    const auto failures = SeveralNodes({1, 1, 1, 1, 1}).failures([](ProcessGroup& group) {
        std::vector<float> values(group.rank() == 3 ? 20 : 10);
        group.all_reduce(buffer_of(std::span<float>(values))).wait();
    });
    for (const auto& failure : failures) {
        EXPECT_TRUE(is<MismatchError>(failure)) << message_of(failure);
        EXPECT_THAT(message_of(failure), AllOf(HasSubstr("rank 3 on "), HasSubstr("20 float32")));
    }
}

TEST(AcrossNodesFailure, AMissingNodeIsNamedOnAllOthers) {
    std::latch others(4);
    SeveralNodes world({1, 1, 1, 1, 1}, std::chrono::milliseconds(1500));
    const auto failures = world.failures([&](ProcessGroup& group) {
        group.barrier().wait();
        if (group.rank() == 3) return others.wait();
        try {
            group.barrier().wait();
        } catch (const TimeoutError&) {
            others.count_down();
            throw;
        }
    });
    for (const int rank : {0, 1, 2, 4})
        EXPECT_THAT(message_of(failures[static_cast<std::size_t>(rank)]), HasSubstr("rank 3 on ")) << rank;
}

TEST(AcrossNodesFailure, AMissingRankIsNamedOnOtherNodesByTheRanksOfItsNode) {
    SeveralNodes world({2, 2, 1});
    std::promise<void> heard;
    const auto failures = world.failures([&](ProcessGroup& group) {
        group.barrier().wait();
        if (group.rank() == 3) return heard.get_future().wait();
        try {
            // Only these two time out.
            if (group.rank() == 2) group.monitored_barrier(std::chrono::milliseconds(200));
            else group.barrier().wait();
        } catch (const TimeoutError&) {
            if (group.rank() == 4) heard.set_value();
            throw;
        }
    });
    for (const int rank : {0, 1, 2, 4}) {
        EXPECT_TRUE(is<TimeoutError>(failures[static_cast<std::size_t>(rank)]));
        EXPECT_THAT(message_of(failures[static_cast<std::size_t>(rank)]),
                    HasSubstr("did not finish within 200 ms: rank 3 missing"));
    }
    EXPECT_THAT(message_of(failures[0]), HasSubstr("rank 2 on "));
}

TEST(AcrossNodesFailure, AMissingRankIsNamedByTheTimeOut) {
    SeveralNodes world({2, 1}, std::chrono::milliseconds(600));
    const auto failures = world.failures([&](ProcessGroup& group) {
        std::vector<float> values(100'000);
        group.barrier().wait();
        if (group.rank() < 2) group.all_reduce(buffer_of(std::span<float>(values))).wait();
        else std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    });
    EXPECT_TRUE(is<TimeoutError>(failures[0])) << message_of(failures[0]);
    EXPECT_THAT(message_of(failures[0]), HasSubstr("nothing came from rank 2 on "));
}

TEST(AcrossNodesFailure, AnEndedGenerationEndsTheWaitForAnotherNode) {
    SeveralNodes world({1, 1, 1});
    const auto failures = world.failures([&](ProcessGroup& group) {
        std::vector<float> values(100'000);
        group.barrier().wait();
        if (group.rank() == 2) return world.end_generation(2);
        group.all_reduce(buffer_of(std::span<float>(values))).wait();
    });
    for (const int rank : {0, 1})
        EXPECT_THAT(message_of(failures[static_cast<std::size_t>(rank)]), HasSubstr("rank 2 was lost"));
    EXPECT_TRUE(is<PeerLostError>(failures[0]));
}

TEST(AcrossNodes, RefusesAForkedChildThatExitsWithOrWithoutDestroyingTheGroup) {
    SeveralNodes({1, 1}).run([](ProcessGroup& group) {
        for (const auto what : {ddp::testing::InChild::DestroysGroup, ddp::testing::InChild::LeavesGroup}) {
            group.barrier().wait();
            if (group.rank() == 0) {
                EXPECT_EQ(ddp::testing::misdeeds_of_child(group, what), "");
            }
            group.barrier().wait();
        }
    });
}

}  // namespace
