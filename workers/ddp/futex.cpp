#include "ddp/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ddp::cpu {

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes through different mappings.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(slice);
    const timespec limit{.tv_sec = seconds.count(), .tv_nsec = (slice - seconds).count()};
    ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
    ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ddp::cpu
