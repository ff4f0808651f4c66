#pragma once

#include <cstdint>
#include <functional>

#include "env/event_loop.h"
#include "env/log.h"
#include "env/system.h"
#include "launcher/agent.h"
#include "launcher/hang_detector.h"
#include "launcher/stacks.h"

namespace ddprun {

/// Looks at the workers of this node for hangs (--hang-timeout), a few times per timeout. On a verdict it says what
/// hangs, prints the stacks of all ranks, then calls `found`: what follows is the job's to decide.
///
/// Lives on the event loop's thread. Borrows its parts for its whole life.
class HangWatch {
  public:
    using Found = std::function<void(const HangVerdict&)>;

    HangWatch(os::EventLoop& loop, os::System& system, os::Log& log, Agent& agent, Duration timeout, Found found);
    ~HangWatch();
    HangWatch(const HangWatch&) = delete;
    HangWatch& operator=(const HangWatch&) = delete;

  private:
    void look();
    void look_again();
    void investigate(const HangVerdict& verdict);
    [[nodiscard]] bool is_running(std::uint64_t generation) const;

    os::EventLoop& loop_;
    os::System& system_;
    os::Log& log_;
    Agent& agent_;
    HangDetector detector_;
    Found found_;
    std::uint64_t generation_ = 0;  ///< that the detector knows
    os::EventLoop::TimerId timer_ = 0;
};

/// All living workers of this node. The agent is borrowed by the targets.
std::vector<StackTarget> stack_targets(Agent& agent);

}  // namespace ddprun
