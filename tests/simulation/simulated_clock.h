#pragma once

#include "env/clock.h"

namespace ddprun::test {

/// While one is there, MonotonicClock tells its time, and event loops neither wait nor ask the kernel for
/// timers: the whole process lives in simulated time. One at a time.
class SimulatedClock {
  public:
    SimulatedClock();
    ~SimulatedClock();
    SimulatedClock(const SimulatedClock&) = delete;
    SimulatedClock& operator=(const SimulatedClock&) = delete;

    [[nodiscard]] TimePoint now() const;
    void set(TimePoint now);
    /// What the event loop would be woken for; kNever: nothing. Of the loop that has turned last.
    [[nodiscard]] TimePoint next_timer() const;
};

}  // namespace ddprun::test
