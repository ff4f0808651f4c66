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

/// One thread: epoll + signalfd + one timerfd. Handlers must not block and are never called recursively.
/// What a handler wants done after the current batch of events it passes to post().
///
/// Handlers may add and remove watches and timers freely, their own too: a removed watch or timer is never
/// called again, also when its event was already fetched. All members are for the loop's thread.
class EventLoop {
  public:
    using TimerId = std::uint64_t;
    using FdHandler = std::function<void(std::uint32_t epoll_events)>;
    using Handler = std::function<void()>;
    using SignalHandler = std::function<void(const signalfd_siginfo&)>;

    /// Blocks `signals` in the calling thread, for good, and receives them through the loop. A signal that
    /// this process was told to ignore (nohup) stays ignored, except SIGCHLD. Error: System.
    static Result<std::unique_ptr<EventLoop>> create(const std::vector<int>& signals);
    ~EventLoop();
    EventLoop(const EventLoop&) = delete;
    EventLoop& operator=(const EventLoop&) = delete;

    /// Calls `handler` whenever `fd` has one of `events` (EPOLLIN, EPOLLOUT; errors and hang-ups always).
    /// Borrows fd: unwatch it before closing it. A regular file cannot be watched. Error: System.
    Status watch(int fd, std::uint32_t events, FdHandler handler);
    /// Changes what a watched fd waits for (0: only errors and hang-ups).
    void change(int fd, std::uint32_t events);
    void unwatch(int fd);

    /// Calls `handler` once, at or soon after `when`, in order of time and then of asking. One whose time has
    /// already come is called in this batch if asked for by an fd's handler, in the next if by a timer's.
    TimerId call_at(TimePoint when, Handler handler);
    TimerId call_after(Duration delay, Handler handler) {
        return call_at(deadline_after(now(), delay), std::move(handler));
    }
    /// Does nothing for a timer that has fired or was cancelled.
    void cancel(TimerId timer);

    /// Calls `handler` after the current batch, in order of posting; what a posted handler posts waits for
    /// the next batch.
    void post(Handler handler);
    void on_signal(SignalHandler handler) { signal_handler_ = std::move(handler); }

    /// What a handler that has to wait for a file system gives to its BlockingCall (keepalive.h); null:
    /// nobody has to be told.
    [[nodiscard]] Keepalive* keepalive() const { return keepalive_; }
    /// Borrowed until it is set again.
    void set_keepalive(Keepalive* keepalive) { keepalive_ = keepalive; }

    /// Time of the current batch.
    [[nodiscard]] TimePoint now() const { return now_; }

    /// Runs until stop(). Error: System, when epoll or the timer itself fails: nothing can be waited for
    /// then.
    Status run();
    void stop() { stopping_ = true; }
    /// One batch: waits at most until `deadline`, handles what came. For tests.
    Status run_once(TimePoint deadline);
    /// Batches waited for so far: an idle loop does not count up.
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
    /// In the order of firing. A cancelled timer leaves at once: it neither takes room nor wakes anybody.
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

}  // namespace ddprun::os
