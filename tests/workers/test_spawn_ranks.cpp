#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "ddp/spawn.h"
#include "tests/support/environment_variable.h"
#include "tests/workers/forked_ranks.h"

namespace {

using ddp::Context;
using ddp::ProcessGroup;
using ddp::SpawnError;
using ddp::testing::Pipe;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::StartsWith;

/// One number per rank that ranks write and the test reads.
class Numbers {
  public:
    explicit Numbers(std::size_t count) : count_(count) {
        void* const memory =
            ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        numbers_ = static_cast<double*>(memory);
    }
    ~Numbers() { ::munmap(numbers_, bytes()); }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;
    double& operator[](int rank) const { return numbers_[rank]; }
    [[nodiscard]] std::vector<double> all() const { return {numbers_, numbers_ + count_}; }

  private:
    [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(double); }
    std::size_t count_;
    double* numbers_;
};

double sum_over(ProcessGroup& group, double value) {
    std::array<double, 1> values{value};
    group.all_reduce(ddp::buffer_of(values)).wait();
    return values[0];
}

/// The failure of a spawn: "<rank>|<text>".
std::string failure_of_spawn(int ranks, const std::function<void(const Context&)>& fn,
                             const ddp::SpawnOptions& options = {}) {
    try {
        ddp::spawn(fn, ranks, options);
    } catch (const SpawnError& error) {
        return std::to_string(error.rank()) + "|" + error.what();
    }
    return "none";
}

TEST(Spawn, RunsTheFunctionOnRanksOfOneWorld) {
    const Numbers sums(4);
    ddp::spawn(
        [&](const Context& context) {
            const auto group = ProcessGroup::create(context);
            sums[context.rank()] = sum_over(*group, context.local_rank() + 1) * context.local_world_size();
        },
        4);
    EXPECT_THAT(sums.all(), AllOf(SizeIs(4), Each(40.0)));
}

TEST(Spawn, ShowsTheWorldInTheEnvironmentOfTheRanksOnly) {
    const Numbers right(3);
    ddp::spawn(
        [&](const Context& context) {
            const Context from_env = Context::from_env();
            right[context.rank()] = from_env.env() == context.env() && from_env.world_size() == 3 ? 1 : 0;
            const auto group = ProcessGroup::create(from_env);
            right[context.rank()] += sum_over(*group, 1);
        },
        3);
    EXPECT_THAT(right.all(), Each(4.0));
    EXPECT_EQ(std::getenv("RANK"), nullptr);
    EXPECT_EQ(std::getenv("DDPRUN_SEGMENT_FD"), nullptr);
}

TEST(Spawn, ThrowsTheFirstErrorWithItsRankAndEndsTheOthers) {
    EXPECT_EQ(failure_of_spawn(3,
                               [](const Context& context) {
                                   const auto group = ProcessGroup::create(context);
                                   if (context.rank() == 2) throw std::runtime_error("there is no data");
                                   group->barrier().wait();
                               }),
              "2|rank 2: there is no data");
}

TEST(Spawn, NamesTheRankOnce) {
    EXPECT_EQ(failure_of_spawn(2,
                               [](const Context& context) {
                                   if (context.rank() == 1) throw ddp::InvalidInput("rank 1: no such file");
                                   ::pause();
                               }),
              "1|rank 1: no such file");
}

TEST(Spawn, TakesAnyException) {
    EXPECT_EQ(failure_of_spawn(1, [](const Context&) { throw 7; }),
              "0|rank 0: an exception that is not a std::exception");
    EXPECT_THAT(failure_of_spawn(1, [](const Context&) { throw ddp::Error(std::string(1'000'000, 'x')); }),
                AllOf(StartsWith("0|rank 0: xxx"), SizeIs(::testing::Lt(70'000U))));
}

TEST(Spawn, NamesTheKilledRankAndNotThoseThatLostIt) {
    EXPECT_EQ(failure_of_spawn(3,
                               [](const Context& context) {
                                   const auto group = ProcessGroup::create(context);
                                   if (context.rank() == 1) ::raise(SIGKILL);
                                   group->barrier().wait();
                               }),
              "1|rank 1 was killed by signal 9 (Killed)");
}

TEST(Spawn, TakesAnExitCodeForAFailureExceptZero) {
    EXPECT_EQ(failure_of_spawn(2,
                               [](const Context& context) {
                                   if (context.rank() == 1) ::_exit(3);
                                   ::pause();
                               }),
              "1|rank 1 exited with code 3");
    EXPECT_EQ(failure_of_spawn(2, [](const Context&) { ::_exit(0); }), "none");
}

TEST(Spawn, KillsARankThatIgnoresSigterm) {
    const Pipe ignored;
    EXPECT_EQ(failure_of_spawn(2,
                               [&](const Context& context) {
                                   if (context.rank() == 1) {
                                       ignored.await_one();
                                       throw std::runtime_error("failed");
                                   }
                                   ::signal(SIGTERM, SIG_IGN);
                                   ignored.say_one();
                                   for (;;) ::pause();
                               },
                               {.grace = std::chrono::milliseconds(1)}),
              "1|rank 1: failed");
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a rank is left";
    EXPECT_EQ(errno, ECHILD);
}

TEST(Spawn, LetsRanksCleanUpWithinTheGraceAfterACallThatLostAPeer) {
    const Numbers cleaned(2);
    const Pipe ready;
    EXPECT_EQ(failure_of_spawn(2,
                               [&](const Context& context) {
                                   const auto group = ProcessGroup::create(context);
                                   if (context.rank() == 1) {
                                       ready.await_one();
                                       throw std::runtime_error("failed");
                                   }
                                   ::signal(SIGTERM, SIG_IGN);
                                   ready.say_one();
                                   try {
                                       group->barrier().wait();
                                   } catch (const ddp::PeerLostError&) {
                                       cleaned[0] = 1;
                                   }
                               },
                               {.grace = std::chrono::minutes(5)}),
              "1|rank 1: failed");
    EXPECT_EQ(cleaned[0], 1);
}

TEST(Spawn, RefusesImpossibleNumbersOfRanks) {
    const auto nothing = [](const Context&) {};
    for (const int ranks : {0, -1, 513, 1'000'000})
        EXPECT_THROW(ddp::spawn(nothing, ranks), ddp::InvalidInput);
    EXPECT_THROW(ddp::spawn(nullptr, 1), ddp::InvalidInput);
    EXPECT_THROW(ddp::spawn(nothing, 1, {.grace = std::chrono::nanoseconds(-1)}), ddp::InvalidInput);
}

TEST(Spawn, RefusesAProcessThatIsARankItself) {
    EXPECT_THAT(failure_of_spawn(2, [](const Context&) { ddp::spawn([](const Context&) {}, 2); }),
                AllOf(HasSubstr("spawn: this process is a rank itself (rank "),
                      HasSubstr(" of 2 under another spawn): ")));
    {
        const ddp::testing::Variable generation("DDPRUN_GENERATION", "1"), rank("RANK", "1"),
            size("WORLD_SIZE", "2"), local_rank("LOCAL_RANK", "1");
        EXPECT_THAT([] { ddp::spawn([](const Context&) {}, 2); },
                    ::testing::ThrowsMessage<ddp::InvalidInput>(
                        HasSubstr("spawn: this process is a rank itself (rank 1 of 2 under ddprun): ")));
    }
    const ddp::testing::Variable rank("OMPI_COMM_WORLD_RANK", "1"), size("OMPI_COMM_WORLD_SIZE", "2");
    EXPECT_THROW(ddp::spawn([](const Context&) {}, 2), ddp::InvalidInput);
}

TEST(Spawn, MakesAWorldOfItsOwnInTheOnlyRankOfAnother) {
    const Numbers sums(2);
    EXPECT_EQ(failure_of_spawn(1,
                               [&](const Context&) {
                                   ddp::spawn(
                                       [&](const Context& context) {
                                           const auto group = ProcessGroup::create(Context::from_env());
                                           sums[context.rank()] = sum_over(*group, 1);
                                       },
                                       2);
                               }),
              "none");
    EXPECT_THAT(sums.all(), Each(2.0));
}

TEST(Spawn, KnowsItsFailuresWhereTheProgramIgnoresTheEndsOfChildren) {
    ::signal(SIGCHLD, SIG_IGN);
    EXPECT_EQ(failure_of_spawn(2, [](const Context&) {}), "none");
    EXPECT_EQ(failure_of_spawn(1, [](const Context&) { throw std::runtime_error("failed"); }),
              "0|rank 0: failed");
    EXPECT_EQ(failure_of_spawn(1, [](const Context&) { ::_exit(3); }),
              "0|rank 0 ended before its function returned (this process ignores SIGCHLD)");
    ::signal(SIGCHLD, SIG_DFL);
}

TEST(Spawn, WritesBufferedOutputOnce) {
    std::FILE* const file = std::tmpfile();
    ASSERT_NE(file, nullptr);
    std::fputs("before ", file);
    ddp::spawn([&](const Context&) { std::fputs("rank ", file); }, 2);
    std::rewind(file);
    std::array<char, 100> text{};
    EXPECT_NE(std::fgets(text.data(), text.size(), file), nullptr);
    std::fclose(file);
    EXPECT_STREQ(text.data(), "before rank rank ");
}

std::size_t entries_of(const char* directory) {
    const std::filesystem::directory_iterator entries(directory);
    return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

TEST(Spawn, LeavesNothingBehindHoweverOftenItIsCalled) {
    const auto left = [] {
        return std::array{entries_of("/proc/self/fd"), entries_of("/proc/self/task"), entries_of("/dev/shm")};
    };
    const auto before = left();
    for (int round = 0; round < 100; ++round) {
        const std::string failure = failure_of_spawn(2, [&](const Context& context) {
            const auto group = ProcessGroup::create(context);
            sum_over(*group, 1);
            if (round % 10 == 9) throw std::runtime_error("failed");
        });
        EXPECT_EQ(failure == "none", round % 10 != 9) << failure;
    }
    EXPECT_EQ(left(), before);
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a rank is left";
}

TEST(Spawn, LetsNoRankOutliveAKilledParent) {
    ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // orphans become this process's children
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe(ends.data()), 0);
    const pid_t parent = ::fork();
    if (parent == 0) {
        ddp::spawn(
            [&](const Context&) {
                const pid_t self = ::getpid();
                if (::write(ends[1], &self, sizeof self) != sizeof self) ::_exit(9);
                for (;;) ::pause();
            },
            2);
        ::_exit(0);
    }
    std::array<pid_t, 2> ranks{};
    for (pid_t& rank : ranks)
        ASSERT_EQ(::read(ends[0], &rank, sizeof rank), static_cast<ssize_t>(sizeof rank));
    ::kill(parent, SIGKILL);
    ::waitpid(parent, nullptr, 0);
    for (const pid_t rank : ranks) {
        int status = 0;
        EXPECT_EQ(::waitpid(rank, &status, 0), rank);
        EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    }
    ::close(ends[0]), ::close(ends[1]);
    ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

}  // namespace
