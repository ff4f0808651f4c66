#pragma once

#include <utility>

#include "env/os/event_loop.h"

namespace ddprun::os {

/// A timer for the earliest of many deadlines, which somebody else keeps. One that is too early costs one
/// wake-up; moving it whenever a deadline is gone would cost more.
class DeadlineTimer {
  public:
    /// `loop` is borrowed for its life. `expire` is called when the earliest deadline has come, and arms it
    /// again.
    DeadlineTimer(EventLoop& loop, EventLoop::Handler expire) : loop_(loop), expire_(std::move(expire)) {}
    ~DeadlineTimer() { loop_.cancel(timer_); }
    DeadlineTimer(const DeadlineTimer&) = delete;
    DeadlineTimer& operator=(const DeadlineTimer&) = delete;

    /// `earliest`: of the deadlines that there are now.
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
