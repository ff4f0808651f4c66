#pragma once

#include "env/clock.h"

namespace ddprun::test {

/// A time that moves when the test says so. Starts an hour after boot, so that "before" exists too.
class FakeClock {
  public:
    [[nodiscard]] TimePoint now() const { return now_; }
    void advance(Duration span) { now_ += span; }

  private:
    TimePoint now_ = TimePoint(std::chrono::hours(1));
};

/// A deadline that a working program never meets, for waits in tests: long enough for a loaded machine.
inline TimePoint soon() { return MonotonicClock::now() + std::chrono::seconds(30); }

}  // namespace ddprun::test
