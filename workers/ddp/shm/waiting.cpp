#include "ddp/shm/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ddp::cpu {

using std::chrono::nanoseconds;

namespace {

constexpr nanoseconds kLeast =
    std::chrono::microseconds(2);  ///< a shorter spin is not worth its two readings of the clock

}  // namespace

// Without FUTEX_PRIVATE_FLAG: processes share the word through different mappings.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(slice);
    const timespec limit{.tv_sec = seconds.count(), .tv_nsec = (slice - seconds).count()};
    ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
    ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

nanoseconds allowed(const Attention& attention, ddprun::TimePoint now) {
    if (attention.limit.count() > 0) return attention.limit;
    return now >= attention.rests_until ? Attention::kMost : nanoseconds{0};
}

Attention after(const Attention& attention, const Try& made, ddprun::TimePoint now) {
    const bool lost_the_core = made.took > 2 * Attention::kMost;
    if (made.met && !lost_the_core)
        return {std::min(Attention::kMost, std::max({2 * attention.limit, 4 * made.took, kLeast})), {}};
    const nanoseconds shorter = lost_the_core ? nanoseconds{0} : attention.limit / 2;
    if (shorter >= kLeast) return {shorter, {}};
    return {nanoseconds{0}, now + Attention::kShareOfTime * made.took};
}

void Yields::operator()() const { ::sched_yield(); }

}  // namespace ddp::cpu
