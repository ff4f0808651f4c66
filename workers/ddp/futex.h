#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ddp::cpu {

/// Sleeps while `word` holds `expected`, at most `slice`; may return early. Works across processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice);
void futex_wake_all(std::atomic<std::uint32_t>& word);

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

}  // namespace ddp::cpu
