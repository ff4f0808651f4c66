// Tests of shared memory beyond the reach of race checkers: streaming stores, and offsets above 4 GiB.
//
// ThreadSanitizer does not know streaming stores, so plain copies replace them there. These tests show that
// each is fenced before a peer sees the new state: on a simulated processor where no streamed byte arrives
// before the fence.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>

#include "ddp/shm/cpu_backend.h"
#include "ddp/testing.h"
#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"

namespace {

using ddp::buffer_of;
using ddp::ReduceOp;
using ddp::SegmentMap;
using ddp::cpu::Arena;
using ddp::cpu::CpuBackend;
using ddp::cpu::Kernels;
using ddp::cpu::Pieces;
using ddp::cpu::SharedPlace;
using Numbers = std::vector<std::int32_t>;

struct Late {
    void* to;
    std::vector<std::byte> bytes;
};
thread_local std::vector<Late> late_stores;

void stream_late(void* to, const void* from, std::size_t bytes) {
    const auto* const first = static_cast<const std::byte*>(from);
    if (bytes > 0) late_stores.push_back({to, {first, first + bytes}});
}
void fence_late() {
    for (const Late& store : late_stores) std::memcpy(store.to, store.bytes.data(), store.bytes.size());
    late_stores.clear();
}
const Kernels& late_kernels() {
    static const Kernels late = [] {
        Kernels made = ddp::cpu::kernels();
        made.stream = stream_late;
        made.fence = fence_late;
        return made;
    }();
    return late;
}

std::shared_ptr<SegmentMap> map_of(const ddprun::UniqueFd& segment) {
    return std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(segment.get(), F_DUPFD_CLOEXEC, 0)));
}

constexpr int kRanks = 3;
/// One that fits a slot, one that fits an area, and one of several ranges.
constexpr std::size_t kThreeCounts[] = {5, 20'001, 450'007};

void run_with_late_stores(const std::function<void(ddp::ProcessGroup&, std::size_t rank)>& body) {
    const ddprun::UniqueFd segment = ddp::make_segment({.local_world_size = kRanks, .world_size = kRanks});
    const std::shared_ptr<SegmentMap> map = map_of(segment);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            try {
                const ddprun::WorkerEnv env = ddp::testing::environment_of(rank, kRanks);
                const auto group = ddp::cpu::make_group(
                    std::make_unique<CpuBackend>(map, env, std::chrono::minutes(1), Arena::Lines::OfTheNode,
                                                 late_kernels()),
                    env, {.progress = ddp::ProcessGroupOptions::Progress::Inline});
                body(*group, static_cast<std::size_t>(rank));
                EXPECT_TRUE(late_stores.empty()) << "rank " << rank << " announced bytes without a fence";
            } catch (const std::exception& error) {
                ADD_FAILURE() << "rank " << rank << ": " << error.what();
            }
        });
    }
    for (std::thread& rank : ranks) rank.join();
}

/// The values of rank r: other numbers for every rank.
Numbers of_rank(std::size_t rank, std::size_t count) {
    Numbers numbers(count);
    std::iota(numbers.begin(), numbers.end(), static_cast<std::int32_t>(rank * 10'000'000));
    return numbers;
}
Numbers sum_of_all(std::size_t count) {
    Numbers sum(count);
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
        const Numbers one = of_rank(rank, count);
        for (std::size_t i = 0; i < count; ++i) sum[i] += one[i];
    }
    return sum;
}
Numbers all_in_a_row(std::size_t count) {
    Numbers row;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
        const Numbers one = of_rank(rank, count);
        row.insert(row.end(), one.begin(), one.end());
    }
    return row;
}
Numbers slice(const Numbers& all, std::size_t which, std::size_t count) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(which * count);
    return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}
ddp::Buffer buffer(Numbers& numbers) { return buffer_of(std::span(numbers)); }

TEST(StreamingStores, AreFencedBeforeAPeerIsToldInEveryReduction) {
    run_with_late_stores([](ddp::ProcessGroup& group, std::size_t rank) {
        for (const std::size_t count : kThreeCounts) {
            Numbers own = of_rank(rank, count);
            group.all_reduce(buffer(own), ReduceOp::Sum).wait();
            EXPECT_EQ(own, sum_of_all(count)) << "all_reduce of " << count;

            const std::span<std::byte> region = group.allocate_shared(count * sizeof(std::int32_t));
            const std::span shared(reinterpret_cast<std::int32_t*>(region.data()), count);
            own = of_rank(rank, count);
            std::copy(own.begin(), own.end(), shared.begin());
            group.all_reduce(buffer_of(shared), ReduceOp::Sum).wait();
            EXPECT_EQ(Numbers(shared.begin(), shared.end()), sum_of_all(count)) << "in place, of " << count;

            group.reduce(buffer(own), 1, ReduceOp::Sum).wait();
            EXPECT_EQ(own, rank == 1 ? sum_of_all(count) : of_rank(rank, count)) << "reduce of " << count;

            Numbers whole = of_rank(rank, kRanks * count), part(count);
            group.reduce_scatter(buffer(part), buffer(whole), ReduceOp::Sum).wait();
            EXPECT_EQ(part, slice(sum_of_all(kRanks * count), rank, count)) << "reduce_scatter of " << count;
        }
    });
}

TEST(StreamingStores, AreFencedBeforeAPeerIsToldInEveryCopy) {
    run_with_late_stores([](ddp::ProcessGroup& group, std::size_t rank) {
        for (const std::size_t count : kThreeCounts) {
            Numbers own = of_rank(rank, count), got(count), row(kRanks * count);
            group.all_gather(buffer(row), buffer(own)).wait();
            EXPECT_EQ(row, all_in_a_row(count)) << "all_gather of " << count;

            row.assign(row.size(), 0);
            group.gather(buffer(row), buffer(own), 2).wait();
            if (rank == 2) {
                EXPECT_EQ(row, all_in_a_row(count)) << "gather of " << count;
            }

            row = of_rank(7, kRanks * count);
            group.scatter(buffer(got), buffer(row), 0).wait();
            EXPECT_EQ(got, slice(of_rank(7, kRanks * count), rank, count)) << "scatter of " << count;

            Numbers turned(kRanks * count), expected;
            row = of_rank(rank, kRanks * count);
            group.all_to_all(buffer(turned), buffer(row)).wait();
            for (std::size_t from = 0; from < kRanks; ++from) {
                const Numbers theirs = slice(of_rank(from, kRanks * count), rank, count);
                expected.insert(expected.end(), theirs.begin(), theirs.end());
            }
            EXPECT_EQ(turned, expected) << "all_to_all of " << count;

            if (rank == 0) group.send(buffer(own), 1).wait();
            if (rank == 1) {
                group.recv(buffer(got), 0).wait();
                EXPECT_EQ(got, of_rank(0, count)) << "a message of " << count;
            }
            const std::string text(count, static_cast<char>('a' + rank));
            EXPECT_EQ(group.all_gather_bytes(text).at((rank + 1) % kRanks),
                      std::string(count, static_cast<char>('a' + (rank + 1) % kRanks)));

            group.broadcast(buffer(own), 1).wait();
            EXPECT_EQ(own, of_rank(1, count)) << "broadcast of " << count;
        }
    });
}

constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

TEST(Pieces, CoverARangeOnceInWholeLinesAlsoAbove4GiB) {
    for (const std::size_t begin : {std::uint64_t{0}, 6 * kGiB}) {
        for (const std::size_t length :
             {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{4096}, 4 * kGiB - 4, 4 * kGiB + 4,
              17 * kGiB + 12, SharedPlace::kMostBytes - 4096}) {
            for (const std::size_t ranks : {1, 2, 3, 7, 64}) {
                const Pieces pieces = Pieces::cut(begin, begin + length, ranks);
                std::size_t at = begin;
                for (std::size_t rank = 0; rank < ranks; ++rank) {
                    ASSERT_EQ(pieces.offset(rank), at);
                    at += pieces.length(rank);
                    if (at < begin + length) {
                        ASSERT_EQ((at - begin) % 64, 0U) << "two ranks share a line";
                    }
                }
                ASSERT_EQ(at, begin + length) << ranks << " ranks";
            }
        }
    }
}

TEST(SharedPlace, IsRestoredFromItsWordAlsoAbove4GiB) {
    for (const std::uint64_t region : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{70'000}}) {
        for (const std::uint64_t offset :
             {std::uint64_t{0}, 4 * kGiB - 4, 4 * kGiB + 4, SharedPlace::kMostBytes - 4096}) {
            const SharedPlace back = SharedPlace::of(SharedPlace{region, offset}.word());
            EXPECT_EQ(back.region, region);
            EXPECT_EQ(back.offset, offset);
            EXPECT_NE((SharedPlace{region, offset}.word()), ddp::cpu::kNotShared);
        }
    }
}

TEST(Arena, GivesPiecesAbove4GiBThatDoNotOverlapAndAreEqualOnAllRanks) {
    // Address space, of which only a few pages are touched.
    constexpr std::uint64_t kBytes = 5 * kGiB;
    const ddprun::UniqueFd segment = ddp::make_segment({.local_world_size = 2, .world_size = 2});
    Arena one(map_of(segment), 0, Arena::Lines::OfTheNode),
        other(map_of(segment), 1, Arena::Lines::OfTheNode);
    const Arena::Piece first = one.take(kBytes), second = one.take(kBytes);
    EXPECT_GE(second.offset, first.offset + kBytes);
    first.address[kBytes - 1] = std::byte{1};
    second.address[0] = std::byte{2};
    second.address[kBytes - 1] = std::byte{3};
    const Arena::Piece theirs = other.take(kBytes), theirs_too = other.take(kBytes);
    EXPECT_EQ(theirs_too.offset, second.offset);
    EXPECT_EQ(theirs.address[kBytes - 1], std::byte{1});
    EXPECT_EQ(theirs_too.address[0], std::byte{2});
    EXPECT_EQ(theirs_too.address[kBytes - 1], std::byte{3});
}

}  // namespace
