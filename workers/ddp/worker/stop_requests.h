#pragma once

#include <atomic>
#include <cstdint>

#include "env/clock.h"

namespace ddp {

/// Decides what a signal that asks a process to stop means. A scheduler sends its signal to every process of
/// a job, and ddprun passes it on: those that come within kOneRequest, as ddprun counts them too, are one
/// request. Safe in a signal handler.
class StopRequests {
  public:
    static constexpr ddprun::Duration kOneRequest = std::chrono::seconds(5);

    enum class Meaning : std::uint8_t { Request, Repetition, EndNow };
    /// `is_typed`: the signal came from a terminal (Ctrl-C), where a second one is impatience.
    Meaning note(ddprun::TimePoint now, bool is_typed) {
        ddprun::TimePoint none{};
        if (first_.compare_exchange_strong(none, now)) return Meaning::Request;
        return is_typed || now - none >= kOneRequest ? Meaning::EndNow : Meaning::Repetition;
    }
    void forget() { first_ = ddprun::TimePoint{}; }

  private:
    std::atomic<ddprun::TimePoint> first_ = ddprun::TimePoint{};
    static_assert(std::atomic<ddprun::TimePoint>::is_always_lock_free, "a handler must not wait");
};

}  // namespace ddp
