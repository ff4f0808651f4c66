#pragma once

#include <time.h>

#include <chrono>

namespace ddprun {

/// CLOCK_MONOTONIC: the same for all processes of a host, never set back. All deadlines are times on it.
struct MonotonicClock {
    using rep = std::chrono::nanoseconds::rep;
    using period = std::chrono::nanoseconds::period;
    using duration = std::chrono::nanoseconds;
    using time_point = std::chrono::time_point<MonotonicClock>;
    static constexpr bool is_steady = true;

    static time_point now() noexcept {
        timespec ts{};
        ::clock_gettime(CLOCK_MONOTONIC, &ts);
        return time_point(std::chrono::seconds(ts.tv_sec) + std::chrono::nanoseconds(ts.tv_nsec));
    }
};

using TimePoint = MonotonicClock::time_point;
using Duration = MonotonicClock::duration;

/// A deadline that never comes.
inline constexpr TimePoint kNever = TimePoint::max();

/// `now + span`, saturating at kNever.
inline TimePoint deadline_after(TimePoint now, Duration span) {
    return span > kNever - now ? kNever : now + span;
}

inline double in_seconds(Duration span) { return std::chrono::duration<double>(span).count(); }

/// Seconds since 1970. An administrator may set this clock back: for times that are shown, not for deadlines.
inline double wall_clock() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

/// Milliseconds from `now` to `deadline`, rounded up, for poll(2) and epoll_wait(2): -1 never, 0 passed.
inline int poll_milliseconds(TimePoint now, TimePoint deadline) {
    if (deadline == kNever) return -1;
    if (deadline <= now) return 0;
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
    return ms > 2'000'000'000 ? 2'000'000'000 : static_cast<int>(ms);
}

}  // namespace ddprun
