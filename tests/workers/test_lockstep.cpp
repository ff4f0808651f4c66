#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "ddp/shm/lockstep.h"
#include "ddp/shm/point_to_point.h"
#include "ddp/testing.h"
#include "env/clock.h"
#include "env/worker_env.h"
#include "tests/workers/forked_ranks.h"

namespace {

using namespace ddp;
using namespace ddp::cpu;
using ddp::testing::environment_of;
using ddp::testing::ForkedRanks;
using ddp::testing::kRight;
using ddp::testing::Pipe;

constexpr int kRanks = 3;

std::shared_ptr<SegmentMap> map_of(int segment) {
    return std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(segment, F_DUPFD_CLOEXEC, 0)));
}

/// One rank's lockstep, without the backend on top of it.
struct Member {
    Member(int segment, int rank, bool shares_cores, std::uint32_t steps_so_far = 0)
        : arena(map_of(segment), static_cast<std::uint32_t>(rank), Arena::Lines::OfTheNode),
          steps(arena, joined(rank, shares_cores), std::chrono::seconds(10), steps_so_far) {}
    NodeCpus joined(int rank, bool shares_cores) {
        join(arena, environment_of(rank, kRanks), ddprun::MonotonicClock::now() + std::chrono::seconds(30));
        return {.ranks = kRanks, .ranks_share_cores = shares_cores};
    }
    void meet() {
        steps.begin({.operation = ddprun::SegmentOp::Barrier});
        steps.meet();
        steps.end();
    }
    /// Waits until that many others have shown the next step.
    void await_arrivals(int others) {
        const std::uint32_t step = steps.next_step();
        for (;;) {
            int arrived = 0;
            for (std::uint32_t peer = 0; peer < kRanks; ++peer)
                arrived += peer != arena.rank() && arena.slot(peer, step).step.load() == step ? 1 : 0;
            if (arrived >= others) return;
            ::sched_yield();
        }
    }

    Arena arena;
    Lockstep steps;
};

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

constexpr int kWentToSleep =
    50;                      ///< exit code of a rank that goes to sleep: it changes no shared memory any more
constexpr int kSpared = 51;  ///< exit code of a rank whose meeting ended before its time to die

// Tests that kill a rank in the middle of a meeting, at every point with a different effect.

/// Runs a part of this process instruction by instruction, and kills the process after the nth change of some
/// words of shared memory, or lets it exit when it goes to sleep. It uses the processor's trap flag, so the
/// code under test does not know of it.
class DiesAfterChange {
  public:
    DiesAfterChange(int nth, std::vector<const std::atomic<std::uint32_t>*> words) {
        left_ = nth;
        count_ = words.size();
        for (std::size_t i = 0; i < count_; ++i) words_[i] = words[i], seen_[i] = words[i]->load();
        struct sigaction on_trap = {};
        on_trap.sa_sigaction = after_an_instruction;
        on_trap.sa_flags = SA_SIGINFO;
        ::sigaction(SIGTRAP, &on_trap, nullptr);
        ::raise(SIGTRAP);  // the first trap sets the flag
    }
    ~DiesAfterChange() { over_ = true; }

  private:
    static void after_an_instruction(int, siginfo_t*, void* context) {
        constexpr greg_t kTrapFlag = 0x100;
        greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
        over_ ? registers[REG_EFL] &= ~kTrapFlag : registers[REG_EFL] |= kTrapFlag;
        for (std::size_t i = 0; i < count_; ++i) {
            const std::uint32_t now = words_[i]->load();
            if (now != std::exchange(seen_[i], now) && --left_ == 0) ::kill(::getpid(), SIGKILL);
        }
        const auto* const next = reinterpret_cast<const unsigned char*>(registers[REG_RIP]);
        const bool calls_system = next[0] == 0x0f && next[1] == 0x05;
        if (calls_system && registers[REG_RAX] == SYS_futex && (registers[REG_RSI] & 0x7f) == FUTEX_WAIT)
            ::_exit(kWentToSleep);
    }

    static inline int left_;
    static inline std::size_t count_;
    static inline const std::atomic<std::uint32_t>* words_[4];
    static inline std::uint32_t seen_[4];
    static inline volatile bool over_ = false;
};

constexpr std::uint32_t kDying = 1;

int die_in_a_meeting(Member& member, int others_first, int nth) {
    member.await_arrivals(others_first);
    const Control& control = member.arena.control();
    const Slot& slot = member.steps.own_slot();
    {
        const DiesAfterChange dies(nth, {&slot.step, &slot.sleepers, &control.arrived, &control.released});
        member.meet();
    }
    return kSpared;
}

int hear_of_it(Member& member) {
    try {
        member.meet();  // completes where the other rank had shown its step
        member.meet();
    } catch (const PeerLostError& error) {
        return std::string(error.what()).find("rank 1 (pid ") != std::string::npos ? kRight : 4;
    }
    return 5;
}

/// One rank of three arrives after `others_first` others and dies after the nth change that they can see;
/// both others must detect it by themselves. Returns its exit status.
int kill_in_a_meeting(bool shares_cores, int others_first, int nth) {
    const ddprun::UniqueFd fd = make_segment({.local_world_size = kRanks, .world_size = kRanks});
    const Pipe over;
    ForkedRanks ranks(kRanks, [&](int rank) {
        Member member(fd.get(), rank, shares_cores);
        member.meet();
        if (rank == kDying) return die_in_a_meeting(member, others_first, nth);
        const int place = rank == 0 ? 0 : 1;
        if (place >= others_first && !over.hears_one()) return 6;
        return hear_of_it(member);
    });
    const int end = ranks.wait(kDying);
    over.say_one();
    over.say_one();
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(2), kRight);
    return end;
}

class Meeting : public ::testing::TestWithParam<bool> {};

TEST_P(Meeting, ThrowsPeerLostAndNotTimeoutWhenARankIsKilledAtAnyPoint) {
    for (int others_first = 0; others_first < kRanks; ++others_first) {
        for (int nth = 1;; ++nth) {
            SCOPED_TRACE(::testing::Message() << others_first << " others arrived first, change " << nth);
            const int end = kill_in_a_meeting(GetParam(), others_first, nth);
            if (HasFailure()) return;
            if (end == kSpared || end == kWentToSleep) break;
            ASSERT_EQ(end, 128 + SIGKILL);
            ASSERT_LT(nth, 10);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(OnSharedCoresAndOnOwn, Meeting, ::testing::Bool());

#else

TEST(Meeting, ThrowsPeerLostAndNotTimeoutWhenARankIsKilledAtAnyPoint) {
    GTEST_SKIP() << "stepping through a meeting needs an x86-64 processor, and no thread sanitizer";
}

#endif

class StepWrap : public ::testing::TestWithParam<bool> {};

TEST_P(StepWrap, StepNumbersOverflow32BitsWithoutEffect) {
    constexpr std::uint32_t kSoFar = 0U - 3;
    const ddprun::UniqueFd fd = make_segment({.local_world_size = kRanks, .world_size = kRanks});
    Arena::first_control(*map_of(fd.get())).arrived = kSoFar * kRanks;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&fd, rank] {
            Member member(fd.get(), rank, GetParam(), kSoFar);
            for (int round = 0; round < 8; ++round) {
                const int shown = 10 * round + rank;
                std::memcpy(member.steps.own_slot().message(sizeof shown), &shown, sizeof shown);
                member.meet();
                for (std::uint32_t peer = 0; peer < kRanks; ++peer) {
                    int seen = -1;
                    std::memcpy(&seen, member.steps.slot_of(peer).message(sizeof seen), sizeof seen);
                    EXPECT_EQ(seen, 10 * round + static_cast<int>(peer));
                }
            }
            EXPECT_EQ(member.steps.current_step(), 5U);
        });
    }
    for (std::thread& rank : ranks) rank.join();
}

INSTANTIATE_TEST_SUITE_P(OnSharedCoresAndOnOwn, StepWrap, ::testing::Bool());

class Waiting : public ::testing::TestWithParam<bool> {};

TEST_P(Waiting, IsTheTimeOfARankUntilTheLastOneMakesTheCall) {
    const ddprun::UniqueFd fd = make_segment({.local_world_size = kRanks, .world_size = kRanks});
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&fd, rank] {
            Member member(fd.get(), rank, GetParam());
            const bool is_last = rank == kRanks - 1;
            // The start time of a barrier is written once its rank waits.
            for (std::uint32_t peer = 0; is_last && peer + 1 < kRanks; ++peer) {
                while (member.arena.line(peer).started_ns.load() == 0) ::sched_yield();
            }
            member.steps.begin({.operation = ddprun::SegmentOp::Barrier});
            member.steps.meet();
            const double waited = member.steps.waiting_seconds();
            EXPECT_EQ(waited > 0, !is_last);
            member.steps.meet();
            member.steps.end();
            EXPECT_EQ(member.steps.waiting_seconds(), waited) << "later steps are communication";
            EXPECT_GE(member.steps.communication_seconds(), waited);
        });
    }
    for (std::thread& rank : ranks) rank.join();
}

INSTANTIATE_TEST_SUITE_P(OnSharedCoresAndOnOwn, Waiting, ::testing::Bool());

TEST(Wrap, PieceNumbersOfAChannelOverflowWithoutEffect) {
    constexpr std::uint32_t kSoFar = 0U - 20;
    const std::size_t bytes = 64 * Channel::kPieceBytes + 5;
    const ddprun::UniqueFd fd = make_segment({.local_world_size = kRanks, .world_size = kRanks});
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            Member member(fd.get(), rank, true);
            Channel& channel = member.arena.channel(0, 1);
            if (rank == 0) channel.written = channel.read = kSoFar;
            member.meet();
            PointToPoint messages(member.arena, {}, std::chrono::seconds(30), kernels());
            std::vector<std::uint8_t> sent(bytes);
            for (std::size_t i = 0; i < bytes; ++i) sent[i] = static_cast<std::uint8_t>(i * 7 / 3);
            std::vector<std::uint8_t> received(bytes);
            using Direction = ddp::Message::Direction;
            if (rank == 0) messages.move({{{Direction::Send, buffer_of(sent), 1}}});
            if (rank == 1) messages.move({{{Direction::Recv, buffer_of(received), 0}}});
            EXPECT_TRUE(rank != 1 || received == sent);
            EXPECT_TRUE(rank == 2 || channel.written - kSoFar > 20);
        });
    }
    for (std::thread& rank : ranks) rank.join();
}

}  // namespace
