#include "ddp/worker/fork.h"

#include <fmt/core.h>
#include <pthread.h>

#include <atomic>

#include "ddp/types.h"

namespace ddp {

namespace {

std::atomic<std::uint32_t> forks = 0;

// getpid() in each collective would be a system call, half the time of a small one.
const int registered =
    ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint32_t fork_count() { return forks.load(std::memory_order_relaxed); }

void require_same_process(std::uint32_t made_in, std::string_view what) {
    if (made_in == fork_count() || registered != 0) return;
    throw Error(fmt::format(
        "{} was called in a forked child of the process that it belongs to: the child has neither its threads nor "
        "its place among the ranks; let the child call exec or _exit, or fork before the first use of libddp",
        what));
}

}  // namespace ddp
