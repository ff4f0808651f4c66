#pragma once

#include <cstdint>
#include <random>

#include "env/clock.h"

namespace ddprun::test {

/// The random choices of one schedule.
class Dice {
  public:
    explicit Dice(std::uint64_t seed) : engine_(seed) {}
    /// Both bounds are included.
    int between(int least, int most) {
        return least + static_cast<int>(engine_() % static_cast<std::uint64_t>(most - least + 1));
    }
    bool chance(int percent) { return between(1, 100) <= percent; }
    Duration span(Duration least, Duration most) {
        return least + Duration(static_cast<Duration::rep>(
                           engine_() % static_cast<std::uint64_t>((most - least).count() + 1)));
    }

  private:
    std::mt19937_64 engine_;
};

}  // namespace ddprun::test
