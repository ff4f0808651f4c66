#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "env/result.h"
#include "launcher/supervise/succession.h"
#include "rendezvous/agent_message.h"
#include "rendezvous/membership.h"

namespace ddprun {

/// What a node that is not the head does about the head's end: performs what succession.h decides. On the
/// event loop's thread.
class Heir {
  public:
    struct Parts {
        os::EventLoop& loop;
        os::Log& log;
        Duration patience;      ///< from the head's loss on, for all others to stop their workers and come
        Duration head_notices;  ///< from there on, for a head that lives to notice it (head_notices_within);
                                ///< shorter
        /// Makes this node listen, the first time; the port.
        std::function<Result<std::uint16_t>()> listen;
        std::function<void(rdzv::FromAgent)> say;
        /// Joins the job at its new controller, by whichever of its addresses; never called from within this
        /// object's callers.
        std::function<void(const std::vector<Endpoint>& controller, TimePoint by)> go_to;
        std::function<Endpoint(std::uint16_t port)>
            own_endpoint;  ///< where this process reaches what listens here
        std::function<void(const JobState& state, const std::string& why)> take_over;
        std::function<void(const std::string& why)> give_up;
        std::function<void(rdzv::AgentId, const Error& why)> refuse;  ///< an agent that has come
    };

    explicit Heir(Parts parts) : parts_(std::move(parts)) {}
    ~Heir() { forget_arrivals(); }
    Heir(const Heir&) = delete;
    Heir& operator=(const Heir&) = delete;

    void obey(const rdzv::Legacy& legacy);
    void obey(const rdzv::Successor& successor);

    /// Where the job goes on without its head; "" nowhere: this node ends.
    [[nodiscard]] std::string successor() const { return is_standby() ? "this node" : successor_.host; }
    /// By which addresses others reach this node, where it is the standby.
    [[nodiscard]] std::vector<std::string> own_addresses() const {
        return is_standby() ? successor_.addresses : std::vector<std::string>{};
    }
    /// The head is lost: from now on whoever comes here is counted. After it workers_ended() has to be
    /// called, when no worker of this node is left. `is_dead`: its process is known to have ended; only the
    /// standby looks at it.
    void head_lost(const std::string& why, bool is_dead);
    void workers_ended();
    /// A world has been formed, under whatever controller: its loss is another one. A spare hears of that
    /// controller's standby only.
    void generation_began();
    [[nodiscard]] bool is_orphan() const { return is_orphan_; }
    /// The other nodes come here when the head is lost.
    [[nodiscard]] bool is_standby() const { return legacy_ && port_ != 0 && successor_.port == port_; }
    /// This node was taken for lost by a head that lives: it joins as a new one, and is no standby until it
    /// is told again.
    void rejoin();

    // On the standby, of an agent that has come because of it. Where this node still has the head, the agent
    // alone has lost it: it is no part of the job any more, and not counted, also if the head is lost next:
    // it may go on without both.
    void arrived(rdzv::AgentId agent, const rdzv::AgentHello& hello);
    void gone(rdzv::AgentId agent);

  private:
    [[nodiscard]] std::vector<Endpoint> endpoints_of_successor() const;
    void consider(bool time_is_up);
    void forget_arrivals();
    /// Of those who count, with workers of this generation or a later one.
    [[nodiscard]] int present(std::uint64_t generation = 0) const;

    Parts parts_;
    std::optional<rdzv::Legacy> legacy_;
    TimePoint legacy_came_{};
    std::uint16_t port_ = 0;  ///< where this node listens
    rdzv::Successor successor_;
    bool is_orphan_ = false, has_left_ = false, is_over_ = false;
    bool head_is_dead_ = false;
    std::string why_;
    TimePoint until_ = kNever;
    TimePoint head_runs_until_{};  ///< at the latest, where it is not dead
    struct Arrival {
        std::string instance;
        std::uint64_t generation;        ///< whose workers it had
        os::EventLoop::TimerId refusal;  ///< unless the head is lost by then
    };
    std::map<rdzv::AgentId, Arrival> arrivals_;
    std::set<std::string> lost_before_;  ///< instances that the head has lost
    os::EventLoop::TimerId timer_ = 0, head_timer_ = 0;
};

}  // namespace ddprun
