#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "env/clock.h"

namespace ddp::cpu {

/// Sleeps while `word` holds `expected`, at most `slice`; may return early. Works across processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice);
void futex_wake_all(std::atomic<std::uint32_t>& word);

/// Counts a sleeper while it lives, so that arriving ranks know whether to wake it.
class Sleeper {
  public:
    explicit Sleeper(std::atomic<std::uint32_t>& count) : count_(count) { count_.fetch_add(1); }
    ~Sleeper() { count_.fetch_sub(1); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

  private:
    std::atomic<std::uint32_t>& count_;
};

/// Longest sleep between two checks of the abort word and the deadline. Most of the time of a recovery in
/// place is this one; a check takes some microseconds.
inline constexpr std::chrono::milliseconds kSleepSlice{10};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// The time that a rank spins before it sleeps. Spinning saves the sleep and the wake-up call, which cost
/// more than a hand-over between running ranks; but on a core that other threads need, it takes time from the
/// awaited rank, or from this one after its wake-up. The kernel does not tell a process whether its core is
/// needed, so the budget adapts to the results of earlier spins.
struct SpinBudget {
    /// Longest spin: too short for a user to notice, longer than any hand-over between running ranks.
    static constexpr std::chrono::nanoseconds kLongest = std::chrono::microseconds(100);
    /// Spins that fail use at most 1 / kShareOfTime of the time.
    static constexpr int kShareOfTime = 50;

    std::chrono::nanoseconds limit = kLongest;  ///< of a spin; 0: none, except one trial after `retry_at`
    ddprun::TimePoint retry_at{};

    bool operator==(const SpinBudget&) const = default;
};

/// The result of one spin. `took` is far above its limit when the core was lost during the spin.
struct SpinResult {
    bool met = false;
    std::chrono::nanoseconds took{};
};

/// The limit of the next spin; 0: sleep at once.
std::chrono::nanoseconds allowed_spin(const SpinBudget& budget, ddprun::TimePoint now);

/// Returns the budget after a spin: a success raises the limit, a failure lowers it, the loss of the core
/// ends spinning. After that a trial follows now and then, the later the more the last one cost.
SpinBudget update_budget(const SpinBudget& budget, const SpinResult& made, ddprun::TimePoint now);

/// Spins until `ready` or the limit, calling `pause` between the checks. True: `ready` holds.
template <class Ready, class Pause>
bool spin_until(SpinBudget& budget, Ready ready, Pause pause) {
    const ddprun::TimePoint begin = ddprun::MonotonicClock::now();
    const std::chrono::nanoseconds limit = allowed_spin(budget, begin);
    if (limit.count() == 0) return ready();
    bool met = false;
    ddprun::TimePoint now = begin;
    do {
        for (int turn = 0; turn < pause.turns && !met; ++turn) {
            met = ready();
            if (!met) pause();
        }
        now = ddprun::MonotonicClock::now();
    } while (!met && now - begin < limit);
    budget = update_budget(budget, {met, now - begin}, now);
    return met;
}

/// The pause between two checks when the awaited rank has its own core.
struct Spins {
    static constexpr int turns = 32;  ///< checks for each reading of the clock
    void operator()() const { relax(); }
};
/// The pause when the awaited rank may need this rank's core: it needs the core, not a sleep and a wake-up
/// call.
struct Yields {
    static constexpr int turns = 1;
    void operator()() const;
};

}  // namespace ddp::cpu
