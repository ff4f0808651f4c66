#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/head/stop_agreement.h"
#include "launcher/head/world.h"

namespace ddprun {

/// Stops the workers of a generation: lets those that listen agree on a common last step (stop_agreement.h),
/// sends the stop when the agreement is over, and logs how much of the grace is left.
class GenerationStop {
  public:
    /// Borrows all for its whole life. `running` counts the workers that have not ended.
    GenerationStop(os::EventLoop& loop, os::Log& log, const World& world, const JobState& state,
                   std::function<int()> running)
        : loop_(loop), log_(log), world_(world), state_(state), running_(std::move(running)) {}
    ~GenerationStop();
    GenerationStop(const GenerationStop&) = delete;
    GenerationStop& operator=(const GenerationStop&) = delete;

    /// All workers are started: those of an earlier stop have ended.
    void begin_generation();
    /// Tells the workers to save, and begins the agreement.
    void perform(const job_action::NotifyPreempt& action);
    /// Sends the stop, or holds it until the end of the agreement.
    void perform(const job_action::StopGeneration& action);
    void feed(const StopEvent& event);

  private:
    void decide(const StopActions::Decision& decision);
    void send(const job_action::StopGeneration& action, std::uint64_t stop_at);
    void count_down(TimePoint end);

    os::EventLoop& loop_;
    os::Log& log_;
    const World& world_;
    const JobState& state_;
    std::function<int()> running_;
    StopAgreement agreement_;
    std::string why_;
    std::uint64_t agreed_step_ = 0;  ///< after which the workers of this stop end; 0: none
    /// The stop that waits for the end of the agreement, and since when.
    std::optional<std::pair<job_action::StopGeneration, TimePoint>> held_;
    os::EventLoop::TimerId agreement_timer_ = 0;
    os::EventLoop::TimerId countdown_ = 0;
};

}  // namespace ddprun
