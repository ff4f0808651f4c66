#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "ddp/shm/joining.h"
#include "ddp/testing.h"
#include "env/worker_env.h"
#include "tests/workers/forked_ranks.h"

namespace {

using namespace ddp;
using ddp::testing::environment_of;
using ddp::testing::ForkedRanks;
using ddp::testing::kRight;
using ddp::testing::Pipe;

constexpr int kNotAllowed = 43;

std::unique_ptr<ProcessGroup> join_on(int segment, int rank, int ranks) {
    ddprun::WorkerEnv env = environment_of(rank, ranks);
    env.segment_fd = segment;
    return ProcessGroup::create(Context(env), {.timeout = std::chrono::seconds(10)});
}

/// kRight when the group reports the end of this rank; a time-out or another error is a failure.
int hear_of_the_end_of(int rank, ProcessGroup& group) {
    std::vector<float> values(10);
    try {
        for (;;) group.all_reduce(buffer_of(std::span(values))).wait();
    } catch (const PeerLostError& error) {
        const std::string wanted = "rank " + std::to_string(rank) + " (pid ";
        return std::string(error.what()).find(wanted) != std::string::npos ? kRight : 4;
    } catch (const TimeoutError& error) {
        ::dprintf(2, "%s\n", error.what());
        return 5;
    }
}

void await_joined(const ddprun::RankLine& line) {
    while (line.joined.load() == 0) ::sched_yield();
}

TEST(PeerLost, IsThrownForAPeerThatEndedBeforeTheOthersJoined) {
    const ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    const SegmentMap launcher(ddprun::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
    const Pipe go;
    ForkedRanks ranks(3, [&](int rank) {
        if (rank == 2 && !go.hears_one()) return 6;
        const auto group = join_on(fd.get(), rank, 3);
        return rank == 2 ? 0 : hear_of_the_end_of(2, *group);
    });
    // Two ranks wait for the third, and see that it has joined only long after its end.
    for (const int rank : {0, 1}) {
        await_joined(launcher.line(static_cast<std::uint32_t>(rank)));
        ranks.stop_one(rank);
    }
    go.say_one();
    EXPECT_EQ(ranks.wait(2), 0);
    for (const int rank : {0, 1}) ranks.continue_one(rank);
    for (const int rank : {0, 1}) EXPECT_EQ(ranks.wait(rank), kRight);
}

/// Runs it in a process that is number 1 of a PID namespace of its own.
int in_a_pid_namespace(const std::function<int()>& body) {
    if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) return kNotAllowed;
    const pid_t pid = ::fork();
    if (pid == 0) {
        try {
            ::_exit(body());
        } catch (const std::exception& error) {
            ::dprintf(2, "%s\n", error.what());
            ::_exit(3);
        }
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool may_make_pid_namespaces() {
    ForkedRanks trial(1, [](int) { return in_a_pid_namespace([] { return kRight; }); });
    return trial.wait(0) == kRight;
}

TEST(PeerLost, IsThrownForAPeerInAnotherPidNamespace) {
    if (!may_make_pid_namespaces()) GTEST_SKIP() << "no PID namespace may be made here";
    const ddprun::UniqueFd fd = make_segment({.local_world_size = 3, .world_size = 3});
    ForkedRanks ranks(3, [&](int rank) {
        if (rank == 0) return hear_of_the_end_of(1, *join_on(fd.get(), rank, 3));
        return in_a_pid_namespace([&] {
            const auto group = join_on(fd.get(), rank, 3);
            if (rank == 2) return hear_of_the_end_of(1, *group);
            std::vector<float> values(10);
            group->all_reduce(buffer_of(std::span(values))).wait();
            ::_exit(7);  // without destroying its group
        });
    });
    EXPECT_EQ(ranks.wait(1), 7);
    EXPECT_EQ(ranks.wait(0), kRight);
    EXPECT_EQ(ranks.wait(2), kRight);
}

/// Two ranks of which only the first is in this process; the test writes the other's identity.
struct StrangePeer {
    static std::shared_ptr<SegmentMap> map_of(int segment) {
        return std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(segment, F_DUPFD_CLOEXEC, 0)));
    }
    StrangePeer() {
        cpu::set_presence_mark(arena);
        identity.joined = 1;
        identity.pid_namespace = arena.identity(0).pid_namespace + 1;
    }

    ddprun::UniqueFd fd = make_segment({.local_world_size = 2, .world_size = 2});
    cpu::Arena arena{map_of(fd.get()), 0, cpu::Arena::Lines::OfTheNode};
    cpu::Identity& identity = arena.identity(1);
};

std::uint32_t pid_of_nobody() {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(0);
    ::waitpid(pid, nullptr, 0);
    return static_cast<std::uint32_t>(pid);
}

TEST(Presence, IsNotDecidedByAnotherProcessWithThePidOfAPeerInAnotherNamespace) {
    StrangePeer peer;
    auto theirs = StrangePeer::map_of(peer.fd.get());
    ASSERT_TRUE(theirs->mark_present(1));
    peer.identity.has_mark = 1;
    peer.identity.pid = pid_of_nobody();
    EXPECT_FALSE(cpu::is_gone(peer.arena, 1)) << "it exists, with another pid";

    theirs.reset();
    peer.identity.pid = static_cast<std::uint32_t>(::getpid());
    EXPECT_TRUE(cpu::is_gone(peer.arena, 1)) << "it is gone, and another process has its pid";
}

TEST(Presence, IsNotGuessedForAPeerWithoutAMark) {
    StrangePeer peer;
    peer.identity.has_mark = 0;
    peer.identity.pid = pid_of_nobody();
    EXPECT_FALSE(cpu::is_gone(peer.arena, 1));
}

TEST(Presence, EndsWithTheProcessBeforeItIsReaped) {
    StrangePeer peer;
    peer.identity.pid_namespace = peer.arena.identity(0).pid_namespace;
    const Pipe end;
    const pid_t pid = ::fork();
    if (pid == 0) {
        (void)end.hears_one();
        ::_exit(0);
    }
    peer.identity.pid = static_cast<std::uint32_t>(pid);
    EXPECT_FALSE(cpu::is_gone(peer.arena, 1));
    end.say_one();
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);  // ended, and not yet reaped
    const bool gone = cpu::is_gone(peer.arena, 1);
    ::waitpid(pid, nullptr, 0);
    EXPECT_TRUE(gone);
}

}  // namespace
