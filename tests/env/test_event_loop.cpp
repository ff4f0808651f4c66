#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <array>

#include "env/os/event_loop.h"
#include "tests/support/fake_clock.h"

namespace ddprun::os {
namespace {

using namespace std::chrono_literals;
using test::soon;
using testing::ElementsAre;

struct Pipe {
    UniqueFd read;
    UniqueFd write;
    Pipe() {
        std::array<int, 2> ends{};
        EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK), 0);
        read = UniqueFd(ends[0]);
        write = UniqueFd(ends[1]);
    }
    void put(char c = 'x') const { EXPECT_EQ(::write(write.get(), &c, 1), 1); }
};

std::unique_ptr<EventLoop> make_loop(const std::vector<int>& signals = {}) {
    Result<std::unique_ptr<EventLoop>> loop = EventLoop::create(signals);
    EXPECT_TRUE(loop) << loop.error().what;
    return *std::move(loop);
}

TEST(EventLoop, CallsForAReadableFdUntilItIsRead) {
    const auto loop = make_loop();
    const Pipe pipe;
    int calls = 0;
    ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t events) {
        EXPECT_EQ(events, std::uint32_t{EPOLLIN});
        ++calls;
    }));
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    EXPECT_EQ(calls, 0);
    pipe.put();
    ASSERT_TRUE(loop->run_once(soon()));
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(calls, 2);
    char c = 0;
    ASSERT_EQ(::read(pipe.read.get(), &c, 1), 1);
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    EXPECT_EQ(calls, 2);
}

TEST(EventLoop, ReportsAHangUpEvenToAWatchWithoutEvents) {
    const auto loop = make_loop();
    Pipe pipe;
    std::uint32_t seen = 0;
    ASSERT_TRUE(loop->watch(pipe.read.get(), 0, [&](std::uint32_t events) { seen = events; }));
    pipe.write.reset();
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(seen, std::uint32_t{EPOLLHUP});
}

TEST(EventLoop, ChangeTurnsAWatchOffAndOn) {
    const auto loop = make_loop();
    const Pipe pipe;
    pipe.put();
    int calls = 0;
    ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t) { ++calls; }));
    loop->change(pipe.read.get(), 0);
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    EXPECT_EQ(calls, 0);
    loop->change(pipe.read.get(), EPOLLIN);
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(calls, 1);
}

TEST(EventLoop, NeverCallsAWatchThatWasRemovedInTheSameBatch) {
    const auto loop = make_loop();
    const std::array<Pipe, 2> pipes;
    int calls = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        const int other = pipes[1 - i].read.get();
        ASSERT_TRUE(loop->watch(pipes[i].read.get(), EPOLLIN, [&, other](std::uint32_t) {
            ++calls;
            loop->unwatch(other);
        }));
        pipes[i].put();
    }
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(calls, 1);
}

TEST(EventLoop, GivesNoStaleEventToAReusedNumber) {
    const auto loop = make_loop();
    std::array<Pipe, 2> pipes;
    const Pipe quiet;
    int calls = 0;
    int stale_calls = 0;
    for (std::size_t i = 0; i < 2; ++i) {
        const int other = pipes[1 - i].read.get();
        ASSERT_TRUE(loop->watch(pipes[i].read.get(), EPOLLIN, [&, i, other](std::uint32_t) {
            ++calls;
            loop->unwatch(pipes[i].read.get());
            loop->unwatch(other);
            // Replace the descriptor by an empty pipe with the same number.
            ASSERT_EQ(::dup3(quiet.read.get(), other, O_CLOEXEC), other);
            ASSERT_TRUE(loop->watch(other, EPOLLIN, [&](std::uint32_t) { ++stale_calls; }));
        }));
        pipes[i].put();
    }
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(stale_calls, 0);
    quiet.put();
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(stale_calls, 1);
}

TEST(EventLoop, LetsAHandlerEndItsOwnWatchAndFd) {
    const auto loop = make_loop();
    Pipe pipe;
    pipe.put();
    int calls = 0;
    const std::string captured(1000, 'x');  // on the heap, so that a sanitizer sees an early free
    ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [&, captured](std::uint32_t) {
        loop->unwatch(pipe.read.get());
        pipe.read.reset();
        calls += captured.empty() ? 0 : 1;
    }));
    ASSERT_TRUE(loop->run_once(soon()));
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    EXPECT_EQ(calls, 1);
}

TEST(EventLoop, RefusesAFileAndASecondWatch) {
    const auto loop = make_loop();
    const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    const Status watched = loop->watch(file.get(), EPOLLIN, [](std::uint32_t) {});
    ASSERT_FALSE(watched);
    EXPECT_EQ(watched.error().sys, EPERM);
    const Pipe pipe;
    ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [](std::uint32_t) {}));
    EXPECT_EQ(loop->watch(pipe.read.get(), EPOLLIN, [](std::uint32_t) {}).error().sys, EEXIST);
}

TEST(EventLoop, FiresTimersInOrderOfTimeThenOfTheCalls) {
    const auto loop = make_loop();
    std::vector<int> order;
    const TimePoint now = loop->now();
    loop->call_at(now + 3ms, [&] { order.push_back(4); });
    loop->call_at(now + 1ms, [&] { order.push_back(1); });
    loop->call_at(now + 2ms, [&] { order.push_back(2); });
    loop->call_at(now + 2ms, [&] { order.push_back(3); });
    loop->call_at(now + 4ms, [&] { loop->stop(); });
    ASSERT_TRUE(loop->run());
    EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
    EXPECT_GE(loop->now(), now + 4ms);
}

TEST(EventLoop, FiresATimerInThePastAndOneAtBoot) {
    const auto loop = make_loop();
    int fired = 0;
    loop->call_at(loop->now() - 1s, [&] { ++fired; });
    loop->call_at(TimePoint(), [&] { ++fired; });
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_EQ(fired, 2);
}

TEST(EventLoop, NeverFiresACancelledTimerNorOneAtTheEndOfTime) {
    const auto loop = make_loop();
    int fired = 0;
    const TimePoint now = loop->now();
    EventLoop::TimerId second = 0;
    loop->call_at(now + 1ms, [&] { loop->cancel(second); });
    second = loop->call_at(now + 1ms, [&] { ++fired; });
    loop->call_at(kNever, [&] { ++fired; });
    loop->call_after(kNever - TimePoint(), [&] { ++fired; });
    loop->call_at(now + 2ms, [&] { loop->stop(); });
    ASSERT_TRUE(loop->run());
    EXPECT_EQ(fired, 0);
    loop->cancel(second);
    loop->cancel(999'999);
}

TEST(EventLoop, IsNotWokenByCancelledTimers) {
    const auto loop = make_loop();
    loop->call_after(30ms, [&] { loop->stop(); });
    for (int i = 0; i < 1000; ++i) loop->cancel(loop->call_after(1ms, [] {}));
    ASSERT_TRUE(loop->run());
    EXPECT_EQ(loop->wakeups(), 1U);
}

TEST(EventLoop, IsNotWokenByATimerThatWasArmedAndThenCancelled) {
    const auto loop = make_loop();
    const EventLoop::TimerId early = loop->call_after(20ms, [] {});
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    loop->cancel(early);
    const TimePoint deadline = MonotonicClock::now() + 40ms;
    ASSERT_TRUE(loop->run_once(deadline));
    EXPECT_GE(MonotonicClock::now(), deadline);
}

TEST(EventLoop, IsNotStarvedByATimerThatAsksForNowAgain) {
    const auto loop = make_loop();
    const Pipe pipe;
    pipe.put();
    std::function<void()> again = [&] { loop->call_after(0ms, again); };
    again();
    bool served = false;
    ASSERT_TRUE(loop->run_once(soon()));
    ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t) { served = true; }));
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_TRUE(served);
}

TEST(EventLoop, CallsPostedHandlersInOrderAfterTheBatch) {
    const auto loop = make_loop();
    const std::array<Pipe, 2> pipes;
    std::vector<std::string> order;
    for (const Pipe& pipe : pipes) {
        ASSERT_TRUE(loop->watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t) {
            loop->post([&] { order.push_back("posted"); });
            order.push_back("event");
        }));
        pipe.put();
    }
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_THAT(order, ElementsAre("event", "event", "posted", "posted"));
}

TEST(EventLoop, CallsPostsOfAPostedHandlerInTheNextBatchWithoutWaiting) {
    const auto loop = make_loop();
    std::vector<int> order;
    loop->post([&] {
        order.push_back(1);
        loop->post([&] { order.push_back(2); });
    });
    ASSERT_TRUE(loop->run_once(kNever));
    EXPECT_THAT(order, ElementsAre(1));
    ASSERT_TRUE(loop->run_once(kNever));
    EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(EventLoop, ReturnsWhenStoppedBeforeItRunsAndCanRunAgain) {
    const auto loop = make_loop();
    loop->stop();
    ASSERT_TRUE(loop->run());
    EXPECT_EQ(loop->wakeups(), 0U);
    bool ran = false;
    loop->post([&] {
        ran = true;
        loop->stop();
    });
    ASSERT_TRUE(loop->run());
    EXPECT_TRUE(ran);
}

TEST(EventLoop, DeliversEachSignalWithItsSender) {
    const auto loop = make_loop({SIGUSR1, SIGUSR2});
    std::vector<std::uint32_t> signals;
    loop->on_signal([&](const signalfd_siginfo& info) {
        EXPECT_EQ(info.ssi_pid, static_cast<std::uint32_t>(::getpid()));
        signals.push_back(info.ssi_signo);
    });
    ::kill(::getpid(), SIGUSR1);
    ::kill(::getpid(), SIGUSR2);
    ASSERT_TRUE(loop->run_once(soon()));
    EXPECT_THAT(signals, testing::UnorderedElementsAre(SIGUSR1, SIGUSR2));
}

TEST(EventLoop, DropsSignalsWithoutAHandler) {
    const auto loop = make_loop({SIGUSR1});
    ::kill(::getpid(), SIGUSR1);
    ASSERT_TRUE(loop->run_once(soon()));
    bool idle = true;
    loop->on_signal([&](const signalfd_siginfo&) { idle = false; });
    ASSERT_TRUE(loop->run_once(MonotonicClock::now()));
    EXPECT_TRUE(idle);
}

TEST(EventLoop, KeepsNohupsIgnoredSignalIgnoredButNotSigchld) {
    ::signal(SIGHUP, SIG_IGN);
    ::signal(SIGCHLD, SIG_IGN);
    const auto loop = make_loop({SIGHUP, SIGCHLD});
    std::vector<std::uint32_t> signals;
    loop->on_signal([&](const signalfd_siginfo& info) { signals.push_back(info.ssi_signo); });
    ::kill(::getpid(), SIGHUP);
    ::kill(::getpid(), SIGCHLD);
    ASSERT_TRUE(loop->run_once(soon()));
    // A blocked signal stays pending even if ignored; the test checks that the disposition is unchanged.
    EXPECT_THAT(signals, testing::Contains(SIGCHLD));
    struct sigaction action {};
    ::sigaction(SIGHUP, nullptr, &action);
    EXPECT_EQ(action.sa_handler, SIG_IGN);
    ::sigaction(SIGCHLD, nullptr, &action);
    EXPECT_EQ(action.sa_handler, SIG_DFL);
    ::signal(SIGHUP, SIG_DFL);
}

}  // namespace
}  // namespace ddprun::os
