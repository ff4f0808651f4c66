#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <thread>
#include <vector>

#include "ddp/shm/arena.h"
#include "ddp/shm/cpu_backend.h"
#include "ddp/shm/segment.h"
#include "ddp/testing.h"
#include "ddp/worker/operation.h"
#include "tests/workers/failures.h"
#include "tests/workers/forked_ranks.h"

/// Groups of a whole node that are made and destroyed on one segment.
namespace {

using namespace ddp;
using ddp::testing::environment_of;
using ddp::testing::ForkedRanks;
using ddp::testing::kRight;
using ddp::testing::Pipe;
using ddp::testing::thrown_by;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Groups = std::vector<std::unique_ptr<ProcessGroup>>;

std::unique_ptr<ProcessGroup> group_on(int segment, int rank, int ranks,
                                       std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
    ddprun::WorkerEnv env = environment_of(rank, ranks);
    env.segment_fd = segment;
    return ProcessGroup::create(Context(env), {.timeout = timeout});
}

float sum_over(ProcessGroup& group, float value) {
    std::array<float, 1> values{value};
    group.all_reduce(buffer_of(values)).wait();
    return values[0];
}

ddprun::UniqueFd segment_of(std::uint32_t ranks) {
    return make_segment({.local_world_size = ranks, .world_size = ranks});
}

std::uint64_t memory_of(int segment) {
    struct stat status {};
    EXPECT_EQ(::fstat(segment, &status), 0);
    return static_cast<std::uint64_t>(status.st_blocks) * 512;
}

/// Makes and destroys so many groups, beside one that lives on. True: each has its ranks and zeroed memory.
bool makes_groups_in_sequence(int segment, int rank, int ranks, int count) {
    const auto lasting = group_on(segment, rank, ranks);
    for (int i = 0; i < count; ++i) {
        const auto group = group_on(segment, rank, ranks);
        const std::span<std::byte> memory = group->allocate_shared(5000);
        if (memory[17] != std::byte{0}) return false;
        memory[17] = std::byte{1};
        if (sum_over(*group, 1) != static_cast<float>(ranks)) return false;
    }
    return sum_over(*lasting, 1) == static_cast<float>(ranks);
}

TEST(Groups, OfProcessesMayFollowEachOtherInAnyNumber) {
    const ddprun::UniqueFd segment = segment_of(2);
    ForkedRanks ranks(
        2, [&](int rank) { return makes_groups_in_sequence(segment.get(), rank, 2, 100) ? kRight : 4; });
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
    EXPECT_LT(memory_of(segment.get()), 4 << 20) << "the memory of destroyed groups";
}

/// Runs `body` on a thread per rank.
void on_threads(int ranks, const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
}

TEST(Groups, OfThreadsMayFollowEachOtherInAnyNumber) {
    const ddprun::UniqueFd segment = segment_of(3);
    std::array<bool, 3> right{};
    on_threads(3, [&](int rank) {
        right[static_cast<std::size_t>(rank)] = makes_groups_in_sequence(segment.get(), rank, 3, 100);
    });
    EXPECT_EQ(right, (std::array<bool, 3>{true, true, true}));
}

TEST(Groups, AreRefusedOnAllRanksBeyond16AtOneTime) {
    const ddprun::UniqueFd segment = segment_of(2);
    std::barrier both(2);
    on_threads(2, [&](int rank) {
        Groups groups;
        for (int i = 0; i < 16; ++i) groups.push_back(group_on(segment.get(), rank, 2));
        try {
            (void)group_on(segment.get(), rank, 2);
            ADD_FAILURE() << "a 17th group";
        } catch (const InvalidInput& error) {
            EXPECT_THAT(error.what(), HasSubstr("this process has 16 process groups"));
        }
        EXPECT_EQ(sum_over(*groups.back(), 1), 2);
        both.arrive_and_wait();
        groups.erase(groups.begin() + 3);
        groups.push_back(group_on(segment.get(), rank, 2));
        EXPECT_EQ(sum_over(*groups.back(), 1), 2);
    });
}

TEST(Groups, WaitForTheRoomOfAGroupThatOtherRanksHaveNotDestroyedYet) {
    const ddprun::UniqueFd segment = segment_of(2);
    std::promise<void> destroyed;
    on_threads(2, [&](int rank) {
        Groups groups;
        for (int i = 0; i < 16; ++i) groups.push_back(group_on(segment.get(), rank, 2));
        if (rank == 1) destroyed.get_future().wait();
        groups.erase(groups.begin() + 5);
        if (rank == 0) destroyed.set_value();
        groups.push_back(group_on(segment.get(), rank, 2));
        EXPECT_EQ(sum_over(*groups.back(), 1), 2);
    });
}

TEST(Groups, TellOfRanksThatKeepADestroyedGroupForTooLong) {
    const ddprun::UniqueFd segment = segment_of(2);
    std::promise<void> failed;
    on_threads(2, [&](int rank) {
        Groups groups;
        for (int i = 0; i < 16; ++i) groups.push_back(group_on(segment.get(), rank, 2));
        if (rank == 1) return failed.get_future().wait();
        groups.pop_back();
        try {
            (void)group_on(segment.get(), rank, 2, std::chrono::milliseconds(50));
            ADD_FAILURE() << "rank 1 still has that group";
        } catch (const TimeoutError& error) {
            EXPECT_THAT(error.what(), HasSubstr("rank 0: joining: the node has room for 16 process groups"));
        }
        failed.set_value();
    });
}

TEST(Groups, OfMoreRanksThanTheirShareHasChannelsForNameThatCause) {
    constexpr std::uint32_t kRanks = 420;
    const auto segment = std::make_shared<SegmentMap>(segment_of(kRanks));
    if (segment->header().arena_bytes < ddprun::kArenaBytes) GTEST_SKIP() << "file sizes are limited";
    std::vector<std::uint32_t> members(kRanks);
    std::iota(members.begin(), members.end(), 0U);
    EXPECT_THAT(thrown_by([&] { const cpu::Arena part(segment, members, 0, 0); }),
                AllOf(HasSubstr("InvalidInput: a sub-group of 420 ranks on one node needs "),
                      HasSubstr(", because each pair of ranks has channels of its own; there is room for "),
                      HasSubstr(": use fewer ranks per node"), Not(HasSubstr("ulimit"))));
}

TEST(Groups, OfMoreThan32767RanksKeepTheRootOfACall) {
    for (const int root : {0, 32'767, 32'768, 65'531}) {  // in 16 bits the last one is kUnevenMark
        std::vector<float> values(1);
        const Operation one{
            .call = call_of(ddprun::SegmentOp::Broadcast, buffer_of(std::span(values)), ReduceOp::Sum, root)};
        EXPECT_FALSE(one.is_uneven());
        EXPECT_THAT(to_string(one.call), HasSubstr("root " + std::to_string(root)));
    }
}

TEST(Groups, AreDestroyedInAnyOrderOnTheRanks) {
    const ddprun::UniqueFd segment = segment_of(2);
    on_threads(2, [&](int rank) {
        for (int round = 0; round < 10; ++round) {
            Groups groups;
            for (int i = 0; i < 7; ++i) groups.push_back(group_on(segment.get(), rank, 2));
            if (rank == 0) std::ranges::reverse(groups);
            while (!groups.empty()) groups.pop_back();
        }
        EXPECT_EQ(sum_over(*group_on(segment.get(), rank, 2), 1), 2);
    });
}

TEST(Groups, KeepTheirRoomUntilTheLastRankHasDestroyedThem) {
    const ddprun::UniqueFd segment = segment_of(2);
    ForkedRanks ranks(2, [&](int rank) {
        auto first = group_on(segment.get(), rank, 2);
        const std::span<std::byte> kept = first->allocate_shared(4096);
        kept[0] = std::byte{7};
        if (rank == 0) first.reset();
        for (int i = 0; i < 20; ++i) {
            const auto next = group_on(segment.get(), rank, 2);
            next->allocate_shared(4096)[0] = std::byte{1};
            if (sum_over(*next, 1) != 2) return 4;
        }
        return rank == 0 || kept[0] == std::byte{7} ? kRight : 5;
    });
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.wait(rank), kRight);
}

TEST(Groups, NameAKilledRankThatCannotJoinTheNextOne) {
    const ddprun::UniqueFd segment = segment_of(2);
    const Pipe joined;
    ForkedRanks ranks(2, [&](int rank) {
        auto group = group_on(segment.get(), rank, 2);
        joined.say_one();
        if (rank == 1) ::pause();
        try {
            sum_over(*group, 1);
            return 4;
        } catch (const PeerLostError&) {
            group.reset();
        }
        try {
            (void)group_on(segment.get(), rank, 2, std::chrono::milliseconds(50));
            return 5;
        } catch (const TimeoutError& error) {
            return std::string_view(error.what()).ends_with("missing after the time-out: rank 1") ? kRight
                                                                                                  : 6;
        }
    });
    joined.await_one();
    joined.await_one();
    ranks.kill_one(1);
    EXPECT_EQ(ranks.wait(0), kRight);
}

TEST(Groups, ShowTheCallsOfTheLatestOneToTheLauncher) {
    const ddprun::UniqueFd segment = segment_of(1);
    const SegmentMap launcher(ddprun::UniqueFd(::fcntl(segment.get(), F_DUPFD_CLOEXEC, 0)));
    {
        const auto first = group_on(segment.get(), 0, 1);
        for (int i = 0; i < 5; ++i) sum_over(*first, 1);
        EXPECT_EQ(launcher.line(0).finished_seq, 5U);
    }
    const auto second = group_on(segment.get(), 0, 1);
    EXPECT_EQ(launcher.line(0).started_seq, 0U);
    EXPECT_EQ(launcher.line(0).finished_seq, 0U);
    EXPECT_EQ(second->communication_seconds(), 0);
    sum_over(*second, 1);
    EXPECT_EQ(launcher.line(0).finished_seq, 1U);
}

}  // namespace
