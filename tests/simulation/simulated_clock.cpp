#include "tests/simulation/simulated_clock.h"

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

namespace {

bool is_simulated = false;
timespec simulated_now{};
itimerspec armed{};

bool is_monotonic(clockid_t clock) { return clock == CLOCK_MONOTONIC; }

}  // namespace

// Replaces libc's function in this program.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
    if (!is_simulated || !is_monotonic(clock))
        return static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
    *time = simulated_now;
    return 0;
}

extern "C" int timerfd_settime(int fd, int flags, const itimerspec* value, itimerspec* old) noexcept {
    if (!is_simulated) return static_cast<int>(::syscall(SYS_timerfd_settime, fd, flags, value, old));
    armed = *value;
    return 0;
}

extern "C" int epoll_wait(int fd, epoll_event* events, int most, int timeout) {
    if (!is_simulated)
        return static_cast<int>(::syscall(SYS_epoll_pwait, fd, events, most, timeout, nullptr, 8));
    return 0;
}

namespace ddprun::test {

SimulatedClock::SimulatedClock() {
    simulated_now = {1000, 0};
    armed = {};
    is_simulated = true;
}

SimulatedClock::~SimulatedClock() { is_simulated = false; }

TimePoint SimulatedClock::now() const { return MonotonicClock::now(); }

void SimulatedClock::set(TimePoint now) {
    const auto since_start = now.time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since_start);
    simulated_now = {seconds.count(), static_cast<long>((since_start - seconds).count())};
}

TimePoint SimulatedClock::next_timer() const {
    if (armed.it_value.tv_sec == 0 && armed.it_value.tv_nsec == 0) return kNever;
    return TimePoint(std::chrono::seconds(armed.it_value.tv_sec) +
                     std::chrono::nanoseconds(armed.it_value.tv_nsec));
}

}  // namespace ddprun::test
