#pragma once

#include "env/clock.h"

namespace ddprun::test {

/// While an object of this class exists, MonotonicClock tells its time, and event loops neither wait nor ask
/// the kernel for timers: the whole process runs in simulated time. Only one may exist at a time.
class SimulatedClock {
  public:
    SimulatedClock();
    ~SimulatedClock();
    SimulatedClock(const SimulatedClock&) = delete;
    SimulatedClock& operator=(const SimulatedClock&) = delete;

    [[nodiscard]] TimePoint now() const;
    void set(TimePoint now);
    /// When the event loop that ran last wants to be woken; kNever: it has no timer.
    [[nodiscard]] TimePoint next_timer() const;
};

}  // namespace ddprun::test
