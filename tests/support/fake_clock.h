#pragma once

#include "env/clock.h"

namespace ddprun::test {

/// A time that only the test moves. It starts an hour after boot, so that earlier times exist.
class FakeClock {
  public:
    [[nodiscard]] TimePoint now() const { return now_; }
    void advance(Duration span) { now_ += span; }

  private:
    TimePoint now_ = TimePoint(std::chrono::hours(1));
};

/// A deadline for waits in tests, which a working program never reaches, even on a loaded machine.
inline TimePoint soon() { return MonotonicClock::now() + std::chrono::seconds(30); }

}  // namespace ddprun::test
