#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env/os/event_loop.h"
#include "launcher/job/heir_state.h"

namespace ddprun {

/// The means by which an Heir carries out its decisions on its node.
class HeirHands {
  public:
    virtual ~HeirHands() = default;
    /// Sends to the head. False: there is no session.
    virtual bool send(rdzv::FromAgent message) = 0;
    /// False: no worker of this node is left, or all have left the lost head's generation.
    virtual bool has_workers() = 0;
    /// True when workers of this node have left the lost head's generation and wait for the next.
    virtual bool keeps_workers() = 0;
    /// Stops the workers, or lets them leave the generation and wait, where they can.
    virtual void stop_workers(const std::string& why) = 0;
    virtual void kill_workers(const Error& why) = 0;
    virtual void refuse(rdzv::AgentId agent, const Error& why) = 0;
    /// Joins the head at one of these addresses. The caller may be a handler of the earlier link.
    virtual void join(std::vector<Endpoint> where, TimePoint by) = 0;
    virtual void take_over(const JobState& job,
                           const std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>& joined) = 0;
    virtual void give_up(const std::string& why) = 0;
    /// Ends this node's part as the head says.
    virtual void end(const rdzv::Shutdown& shutdown) = 0;
    /// Ends this node's part without a head; `lost`: why the link to it ended.
    virtual void leave(const std::optional<Error>& lost) = 0;
};

/// Steps an HeirState by events and by its timer, and carries out the actions through HeirHands, on the event
/// loop's thread. Keeps in `hello` this node's instance and last generation, which a head gets when it joins.
class Heir {
  public:
    /// `loop`, `hello` and `hands` must outlive the heir.
    Heir(os::EventLoop& loop, HeirState state, rdzv::AgentHello& hello, HeirHands& hands)
        : loop_(loop),
          state_(std::move(state)),
          hello_(hello),
          first_instance_(hello.instance),
          hands_(hands) {}
    ~Heir() { loop_.cancel(timer_); }
    Heir(const Heir&) = delete;
    Heir& operator=(const Heir&) = delete;

    void feed(const HeirEvent& event);
    void generation_began(const rdzv::StartGeneration& start);
    [[nodiscard]] const HeirState& state() const { return state_; }

  private:
    void perform(const HeirActions& actions);

    os::EventLoop& loop_;
    HeirState state_;
    rdzv::AgentHello& hello_;
    std::string first_instance_;
    int instances_ = 1;
    HeirHands& hands_;
    os::EventLoop::TimerId timer_ = 0;
};

}  // namespace ddprun
