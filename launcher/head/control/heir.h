#pragma once

#include <functional>
#include <utility>

#include "env/os/event_loop.h"
#include "launcher/head/control/heir_state.h"

namespace ddprun {

/// Steps a HeirState by events and by its timer, on the event loop's thread.
class Heir {
  public:
    Heir(os::EventLoop& loop, HeirState state, std::function<void(const HeirActions&)> perform)
        : loop_(loop), state_(std::move(state)), perform_(std::move(perform)) {}
    ~Heir() { loop_.cancel(timer_); }
    Heir(const Heir&) = delete;
    Heir& operator=(const Heir&) = delete;

    void feed(const HeirEvent& event) {
        const HeirActions actions = step(state_, event, MonotonicClock::now());
        loop_.cancel(timer_);
        if (state_.timer != kNever)
            timer_ = loop_.call_at(state_.timer, [this] { feed(heir_event::TimerFired{}); });
        perform_(actions);
    }
    [[nodiscard]] const HeirState& state() const { return state_; }

  private:
    os::EventLoop& loop_;
    HeirState state_;
    std::function<void(const HeirActions&)> perform_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun
