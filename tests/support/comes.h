#pragma once

#include <chrono>
#include <thread>

namespace ddprun::test {

/// True if the condition becomes true within `patience`, for events in other processes. Blocks.
template <class Condition>
[[nodiscard]] bool comes(const Condition& is_so,
                         std::chrono::milliseconds patience = std::chrono::minutes(1)) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < until) {
        if (is_so()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
}

}  // namespace ddprun::test
