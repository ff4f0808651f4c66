#include "launcher/pipe_size.h"

#include <algorithm>
#include <bit>

namespace ddprun {

std::size_t pipe_bytes(int workers) {
    constexpr std::size_t kBudget = 32 * 1024 * 1024, kLeast = 16 * 1024, kMost = 1024 * 1024;
    const auto pipes = 2 * static_cast<std::size_t>(std::max(workers, 1));
    return std::clamp(std::bit_floor(kBudget / pipes), kLeast, kMost);
}

}  // namespace ddprun
