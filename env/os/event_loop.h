#pragma once

#include <signal.h>
#include <sys/signalfd.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "env/unique_fd.h"

namespace ddprun::os {

class Keepalive;

/// One thread: epoll + signalfd + one timerfd. Handlers must not block and are never called recursively. A
/// handler passes work for after the current batch of events to post().
///
/// Handlers may add and remove watches and timers freely, even their own: a removed watch or timer is never
/// called again, even if its event was already fetched. All members are for the loop's thread.
class EventLoop {
  public:
    using TimerId = std::uint64_t;
    using FdHandler = std::function<void(std::uint32_t epoll_events)>;
    using Handler = std::function<void()>;
    using SignalHandler = std::function<void(const signalfd_siginfo&)>;

    /// Blocks `signals` in the calling thread, for good, and receives them through the loop. A signal that
    /// this process inherited as ignored (nohup) stays ignored, except SIGCHLD. Error: System.
    static Result<std::unique_ptr<EventLoop>> create(const std::vector<int>& signals);
    ~EventLoop();
    EventLoop(const EventLoop&) = delete;
    EventLoop& operator=(const EventLoop&) = delete;

    /// Calls `handler` whenever `fd` has one of `events` (EPOLLIN, EPOLLOUT; errors and hang-ups always).
    /// Borrows fd: unwatch it before closing it. A regular file cannot be watched. Error: System.
    Status watch(int fd, std::uint32_t events, FdHandler handler);
    /// Changes the events of a watched fd (0: only errors and hang-ups).
    void change(int fd, std::uint32_t events);
    void unwatch(int fd);

    /// Calls `handler` once, at or soon after `when`, in order of time and then of the calls. A timer that is
    /// already due fires in this batch when an fd's handler asks for it, in the next when a timer's does.
    TimerId call_at(TimePoint when, Handler handler);
    TimerId call_after(Duration delay, Handler handler) {
        return call_at(deadline_after(now(), delay), std::move(handler));
    }
    /// Does nothing for a timer that has fired or was cancelled.
    void cancel(TimerId timer);

    /// Calls `handler` after the current batch, in order of posting; posts of a posted handler wait for the
    /// next batch.
    void post(Handler handler);
    void on_signal(SignalHandler handler) { signal_handler_ = std::move(handler); }

    /// The argument of a BlockingCall (keepalive.h) for a handler that must wait for a file system; null: no
    /// heartbeats are needed.
    [[nodiscard]] Keepalive* keepalive() const { return keepalive_; }
    /// Borrows `keepalive` until the next call.
    void set_keepalive(Keepalive* keepalive) { keepalive_ = keepalive; }

    /// Time of the current batch.
    [[nodiscard]] TimePoint now() const { return now_; }

    /// Runs until stop(). Error: System, when epoll or the timerfd fails.
    Status run();
    void stop() { stopping_ = true; }
    /// Runs one batch: waits at most until `deadline` and handles the events. For tests.
    Status run_once(TimePoint deadline);
    /// The number of batches so far: an idle loop does not count up.
    [[nodiscard]] std::uint64_t wakeups() const { return wakeups_; }

  private:
    struct Watch {
        FdHandler handler;
        std::uint32_t generation;
    };
    EventLoop() = default;
    Status open(const std::vector<int>& signals);
    Status open_signals(const std::vector<int>& signals);
    void dispatch(std::uint64_t key, std::uint32_t events);
    void read_signals();
    void fire_timers();
    void run_posted();
    Status arm_timer();

    UniqueFd epoll_, signal_fd_, timer_fd_;
    std::unordered_map<int, std::shared_ptr<Watch>> watches_;
    std::uint32_t next_generation_ = 1;
    /// The timers in the order of firing. A cancelled timer leaves at once.
    std::map<std::pair<TimePoint, TimerId>, Handler> timers_;
    std::unordered_map<TimerId, TimePoint> timer_times_;
    TimerId next_timer_ = 1;
    TimePoint armed_ = kNever;
    std::vector<Handler> posted_;
    SignalHandler signal_handler_;
    TimePoint now_ = MonotonicClock::now();
    bool stopping_ = false;
    Keepalive* keepalive_ = nullptr;
    std::uint64_t wakeups_ = 0;
};

/// A timer for the earliest of many deadlines, which its owner keeps. A timer that is too early costs one
/// wake-up; moving it whenever a deadline is removed would cost more.
class DeadlineTimer {
  public:
    /// `loop` is borrowed for the timer's life. `expire` is called at the earliest deadline, and arms the
    /// timer again.
    DeadlineTimer(EventLoop& loop, EventLoop::Handler expire) : loop_(loop), expire_(std::move(expire)) {}
    ~DeadlineTimer() { loop_.cancel(timer_); }
    DeadlineTimer(const DeadlineTimer&) = delete;
    DeadlineTimer& operator=(const DeadlineTimer&) = delete;

    /// `earliest` is the earliest of the current deadlines.
    void arm(TimePoint earliest) {
        if (earliest >= at_) return;
        loop_.cancel(timer_);
        at_ = earliest;
        timer_ = loop_.call_at(earliest, [this] {
            at_ = kNever;
            expire_();
        });
    }

  private:
    EventLoop& loop_;
    EventLoop::Handler expire_;
    TimePoint at_ = kNever;
    EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun::os
