#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "env/clock.h"

namespace ddp::cpu {

/// Sleeps while `word` holds `expected`, at most `slice`; may return early. Works across processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice);
void futex_wake_all(std::atomic<std::uint32_t>& word);

/// Counts a sleeper for as long as it lives, so that arrivals know whether to wake somebody.
class Sleeper {
  public:
    explicit Sleeper(std::atomic<std::uint32_t>& count) : count_(count) { count_.fetch_add(1); }
    ~Sleeper() { count_.fetch_sub(1); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

  private:
    std::atomic<std::uint32_t>& count_;
};

/// How long a sleeper goes without looking at the abort word and its deadline.
inline constexpr std::chrono::milliseconds kSleepSlice{50};

/// One turn of a spin loop.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/// How long a rank looks for what it waits for before it sleeps. Looking saves the sleep and the wake-up
/// call, which cost more than a meeting of ranks that run; but on a core that others want it is paid for with
/// time that the awaited rank, or we ourselves after the wake-up, would have had. Nobody tells a process
/// whether its core is wanted, so this learns from what its own tries brought.
struct Attention {
    /// Far shorter than anything a user could notice, longer than any hand-over between ranks that run.
    static constexpr std::chrono::nanoseconds kMost = std::chrono::microseconds(100);
    /// Tries that bring nothing get this part of the time at most.
    static constexpr int kShareOfTime = 50;

    std::chrono::nanoseconds limit = kMost;  ///< of a try; 0: none, but for a trial after `rests_until`
    ddprun::TimePoint rests_until{};

    bool operator==(const Attention&) const = default;
};

/// What a try brought. `took` is far longer than its limit when the core was taken away in the middle of it.
struct Try {
    bool met = false;
    std::chrono::nanoseconds took{};
};

/// How long the coming try may take; 0: sleep at once.
std::chrono::nanoseconds allowed(const Attention& attention, ddprun::TimePoint now);

/// A try that brought something makes the next ones longer, one in vain shorter; one in which the core was
/// lost ends them. Once there are none, a trial is made now and then, the more seldom the more the last one
/// cost.
Attention after(const Attention& attention, const Try& made, ddprun::TimePoint now);

/// Looks for it as long as that pays, calling `pause` in between. True: it is there.
template <class Ready, class Pause>
bool look_for(Attention& attention, Ready ready, Pause pause) {
    const ddprun::TimePoint begin = ddprun::MonotonicClock::now();
    const std::chrono::nanoseconds limit = allowed(attention, begin);
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
    attention = after(attention, {met, now - begin}, now);
    return met;
}

/// Between two looks. Where the awaited rank has a core of its own.
struct Spins {
    static constexpr int turns = 32;  ///< looks for one at the clock
    void operator()() const { relax(); }
};
/// Where it may be ready to run on ours: it needs the core, not our sleep and its wake-up call.
struct Yields {
    static constexpr int turns = 1;
    void operator()() const;
};

}  // namespace ddp::cpu
