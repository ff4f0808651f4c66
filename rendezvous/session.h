#pragma once

#include "env/clock.h"
#include "rendezvous/protocol_limits.h"

/// What an agent and the controller decide about the connection between them. Pure.
namespace ddprun::rdzv {

/// When to look who has been silent for too long, and whether those who have are lost.
///
/// Nobody is lost at a first look. What others said while we could not read (a long batch of events, a stopped process) is
/// read before the second one; and when we were away ourselves for long, others may have been away with us (a machine that
/// slept, a debugger that stops all): they get a third of the time-out to speak.
class SilenceWatch {
  public:
    SilenceWatch(Heartbeats limits, TimePoint now) : limits_(limits), due_(now + limits.interval) {}

    struct Verdict {
        bool are_lost = false;  ///< those who were heard `timeout` ago or earlier
        TimePoint next;         ///< the time of the next look
    };
    /// `heard`: when whoever has been silent for longest was heard last; kNever: there is nobody.
    Verdict look(TimePoint now, TimePoint heard);

  private:
    Verdict wait_until(TimePoint next, bool is_second);

    Heartbeats limits_;
    TimePoint due_;
    bool is_second_ = false;
};

}  // namespace ddprun::rdzv
