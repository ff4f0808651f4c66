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

constexpr nanoseconds kShortest =
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

nanoseconds allowed_spin(const SpinBudget& budget, ddprun::TimePoint now) {
    if (budget.limit.count() > 0) return budget.limit;
    return now >= budget.retry_at ? SpinBudget::kLongest : nanoseconds{0};
}

SpinBudget update_budget(const SpinBudget& budget, const SpinResult& made, ddprun::TimePoint now) {
    const bool lost_the_core = made.took > 2 * SpinBudget::kLongest;
    if (made.met && !lost_the_core)
        return {std::min(SpinBudget::kLongest, std::max({2 * budget.limit, 4 * made.took, kShortest})), {}};
    const nanoseconds shorter = lost_the_core ? nanoseconds{0} : budget.limit / 2;
    if (shorter >= kShortest) return {shorter, {}};
    return {nanoseconds{0}, now + SpinBudget::kShareOfTime * made.took};
}

void Yields::operator()() const { ::sched_yield(); }

}  // namespace ddp::cpu
