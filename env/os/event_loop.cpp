#include "env/os/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>

namespace ddprun::os {
namespace {

// Keys of the loop's own descriptors; a watch's key is its generation above its fd, and no generation is 0.
constexpr std::uint64_t kSignalKey = 1;
constexpr std::uint64_t kTimerKey = 2;

std::uint64_t key_of(int fd, std::uint32_t generation) {
    return (std::uint64_t{generation} << 32) | static_cast<std::uint32_t>(fd);
}

Status add(int epoll, int fd, std::uint32_t events, std::uint64_t key) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = key;
    if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) return Error::system("epoll_ctl add");
    return {};
}

/// The time in timerfd's form. An all-zero value would disarm the timer.
itimerspec at(TimePoint when) {
    itimerspec spec{};
    if (when == kNever) return spec;
    const auto ns = std::max<std::int64_t>(when.time_since_epoch().count(), 1);
    spec.it_value.tv_sec = ns / 1'000'000'000;
    spec.it_value.tv_nsec = ns % 1'000'000'000;
    return spec;
}

}  // namespace

Result<std::unique_ptr<EventLoop>> EventLoop::create(const std::vector<int>& signals) {
    std::unique_ptr<EventLoop> loop(new EventLoop);
    if (const Status opened = loop->open(signals); !opened) return opened.error();
    return loop;
}

EventLoop::~EventLoop() = default;

Status EventLoop::open(const std::vector<int>& signals) {
    epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    if (!epoll_) return Error::system("epoll_create1");
    timer_fd_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!timer_fd_) return Error::system("timerfd_create");
    if (Status added = add(epoll_.get(), timer_fd_.get(), EPOLLIN, kTimerKey); !added) return added;
    return signals.empty() ? Status() : open_signals(signals);
}

Status EventLoop::open_signals(const std::vector<int>& signals) {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : signals) ::sigaddset(&set, signal);
    if (const int failure = ::pthread_sigmask(SIG_BLOCK, &set, nullptr)) {
        return Error::system("pthread_sigmask", failure);
    }
    // A parent can pass on an ignored SIGCHLD, with which the kernel reaps children and their exits are lost.
    if (::sigismember(&set, SIGCHLD) == 1) ::signal(SIGCHLD, SIG_DFL);
    signal_fd_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!signal_fd_) return Error::system("signalfd");
    return add(epoll_.get(), signal_fd_.get(), EPOLLIN, kSignalKey);
}

Status EventLoop::watch(int fd, std::uint32_t events, FdHandler handler) {
    // The generation distinguishes this watch from an earlier one of the same fd whose event is already
    // fetched.
    const std::uint32_t generation = next_generation_;
    next_generation_ = std::max(next_generation_ + 1, 1U);
    if (Status added = add(epoll_.get(), fd, events, key_of(fd, generation)); !added) return added;
    watches_[fd] = std::make_shared<Watch>(Watch{std::move(handler), generation});
    return {};
}

void EventLoop::change(int fd, std::uint32_t events) {
    const auto found = watches_.find(fd);
    if (found == watches_.end()) return;
    epoll_event event{};
    event.events = events;
    event.data.u64 = key_of(fd, found->second->generation);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::unwatch(int fd) {
    if (watches_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

EventLoop::TimerId EventLoop::call_at(TimePoint when, Handler handler) {
    const TimerId id = next_timer_++;
    timers_.emplace(std::pair(when, id), std::move(handler));
    timer_times_.emplace(id, when);
    return id;
}

void EventLoop::cancel(TimerId timer) {
    const auto found = timer_times_.find(timer);
    if (found == timer_times_.end()) return;
    timers_.erase(std::pair(found->second, timer));
    timer_times_.erase(found);
}

void EventLoop::post(Handler handler) { posted_.push_back(std::move(handler)); }

Status EventLoop::run() {
    while (!stopping_) {
        if (Status done = run_once(kNever); !done) return done;
    }
    stopping_ = false;
    return {};
}

Status EventLoop::run_once(TimePoint deadline) {
    std::array<epoll_event, 128> events;
    const auto look = [&](int timeout) {
        return ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
    };
    // Handlers posted outside a batch, or by a posted handler, must not wait for the next event.
    const TimePoint earliest = timers_.empty() ? kNever : timers_.begin()->first.first;
    const bool is_busy = !posted_.empty() || earliest <= MonotonicClock::now();
    // The timer is set before a sleep only: that takes long in a virtual machine, and while a job starts, the
    // next event is there already.
    int count = is_busy || earliest != armed_ ? look(0) : 0;
    if (count == 0 && !is_busy) {
        if (Status armed = arm_timer(); !armed) return armed;
        count = look(poll_milliseconds(MonotonicClock::now(), deadline));
    }
    if (count < 0 && errno != EINTR) return Error::system("epoll_wait");
    ++wakeups_;
    now_ = MonotonicClock::now();
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<std::size_t>(i)];
        dispatch(event.data.u64, event.events);
    }
    fire_timers();
    run_posted();
    return {};
}

void EventLoop::dispatch(std::uint64_t key, std::uint32_t events) {
    if (key == kSignalKey) return read_signals();
    if (key == kTimerKey) {
        std::uint64_t expirations = 0;
        static_cast<void>(::read(timer_fd_.get(), &expirations, sizeof expirations));
        armed_ = kNever;
        return;
    }
    const int fd = static_cast<int>(key & 0xffffffffU);
    const auto found = watches_.find(fd);
    if (found == watches_.end() || key_of(fd, found->second->generation) != key) return;
    // Keep the handler alive while it runs: it may unwatch itself.
    const std::shared_ptr<Watch> watch = found->second;
    watch->handler(events);
}

void EventLoop::read_signals() {
    std::array<signalfd_siginfo, 16> received;
    const ssize_t bytes = ::read(signal_fd_.get(), received.data(), sizeof received);
    if (bytes <= 0) return;
    // Copy the handler, which may replace itself. Further signals are read in the next batch.
    const SignalHandler handler = signal_handler_;
    const std::size_t count = static_cast<std::size_t>(bytes) / sizeof received[0];
    for (std::size_t i = 0; handler && i < count; ++i) handler(received[i]);
}

void EventLoop::fire_timers() {
    // Choose all before the first call, so that a timer that asks for "now" again cannot hold up the loop.
    std::vector<std::pair<TimePoint, TimerId>> due;
    for (const auto& [key, handler] : timers_) {
        if (key.first > now_) break;
        due.push_back(key);
    }
    for (const auto& key : due) {
        auto timer = timers_.extract(key);
        if (timer.empty()) continue;  // cancelled by an earlier one
        timer_times_.erase(key.second);
        timer.mapped()();
    }
}

void EventLoop::run_posted() {
    std::vector<Handler> batch;
    batch.swap(posted_);
    for (const Handler& handler : batch) handler();
}

Status EventLoop::arm_timer() {
    const TimePoint earliest = timers_.empty() ? kNever : timers_.begin()->first.first;
    if (earliest == armed_) return {};
    const itimerspec spec = at(earliest);
    if (::timerfd_settime(timer_fd_.get(), TFD_TIMER_ABSTIME, &spec, nullptr) != 0)
        return Error::system("timerfd_settime");
    armed_ = earliest;
    return {};
}

}  // namespace ddprun::os
