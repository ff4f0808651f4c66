#pragma once

#include <utility>

#include "env/os/event_loop.h"

namespace ddprun::os {

/// A timer for the earliest of many deadlines, which its owner keeps. A timer that is too early costs one
/// wake-up; moving it whenever a deadline is removed would cost more.
class DeadlineTimer {
  public:
    /// `loop` is borrowed for the timer's life. `expire` is called at the earliest deadline, and arms the
    /// timer again.
    DeadlineTimer(EventLoop& loop, EventLoop::Handler expire) : loop_(loop), expire_(std::move(expire)) {}
    ~DeadlineTimer() { loop_.cancel(timer_); }
    DeadlineTimer(const DeadlineTimer&) = delete;
    DeadlineTimer& operator=(const DeadlineTimer&) = delete;

    /// `earliest` is the earliest of the current deadlines.
    void arm(TimePoint earliest) {
        if (earliest >= at_) return;
        loop_.cancel(timer_);
        at_ = earliest;
        timer_ = loop_.call_at(earliest, [this] {
            at_ = kNever;
            expire_();
        });
    }

  private:
    EventLoop& loop_;
    EventLoop::Handler expire_;
    TimePoint at_ = kNever;
    EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun::os
