#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp {

/// This rank's part in the agreed stop (launcher/head/stop_agreement.h), in the launcher's segment.
class StopLine {
  public:
    /// Null without a launcher, where its segment cannot be reached, and for a rank of another launcher that
    /// runs inside one of its workers.
    static std::unique_ptr<StopLine> open(const ddprun::WorkerEnv& env);

    /// See Lifeline::should_stop.
    bool should_stop(std::uint64_t step);
    /// Why the launcher asks for the stop.
    [[nodiscard]] std::string reason() const;

  private:
    StopLine(std::unique_ptr<SegmentMap> segment, std::uint32_t index)
        : segment_(std::move(segment)), line_(segment_->line(index)) {}

    std::unique_ptr<SegmentMap> segment_;
    ddprun::RankLine& line_;
};

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
