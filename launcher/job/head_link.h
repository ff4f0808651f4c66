#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "launcher/head/succession.h"
#include "launcher/job/head.h"
#include "launcher/job/node_parts.h"
#include "launcher/spec/exit_codes.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/client/store_relay.h"
#include "rendezvous/serve/server.h"

namespace ddprun {

/// The server of a process that is not the head yet: of the first head until it is built, of the standby
/// while another process is the head. A head takes the server over. Use it on the event loop's thread.
class Standby final : public JobServer, public rdzv::ServerHandler {
  public:
    using Tell = std::function<void(const FollowerEvent&)>;
    /// Listens where `options` say; fills in the other options from the node. `tell` hears which agents join
    /// and are lost; null for the first head, which is built before the loop runs. Error: as
    /// choose_torch_store and rdzv::Server::create, or from --tls.
    static Result<std::unique_ptr<Standby>> listen(NodeParts& node, Tell tell, rdzv::ServerOptions options);
    /// Listens for the first head, also for this host's workers. Tries for a while if several processes of
    /// this host may be the head. Error: as listen(), or from --master-port; System with EADDRINUSE when
    /// another process is the head.
    static Result<std::unique_ptr<Standby>> listen_first(NodeParts& node, const HeadChoice& choice);

  private:
    Standby(NodeParts& node, Tell tell) : node_(node), tell_(std::move(tell)) {}
    void on_agent_joined(rdzv::AgentId agent, const rdzv::AgentHello& hello) override {
        tell_(follower_event::AgentCame{agent, hello});
    }
    void on_agent_message(rdzv::AgentId, const rdzv::FromAgent&) override {}
    void on_agent_lost(rdzv::AgentId agent, const Error&) override {
        tell_(follower_event::AgentGone{agent});
    }
    void on_log(const std::string& line) override { node_.connections->warn(line); }
    void on_detail(const std::string& line) override { node_.log.debug("{}", line); }

    NodeParts& node_;
    Tell tell_;
};

/// This node's membership in the job under one head after another. Joins; joins again when the head takes
/// this node for lost; when the head is lost, goes to the standby or becomes the head. A head on its own host
/// never joins. Steps a FollowerState (head/succession.h) and carries out its actions, on the event loop's
/// thread.
class HeadLink {
  public:
    /// What the node does when the head is lost: it becomes the head, or it ends. `why` or the link's end
    /// explains the end; neither does when the user has asked for it.
    struct Ways {
        std::function<void(Standby&, const std::string& why, Inheritance)> take_over;
        std::function<void(const std::string& why)> give_up;
        std::function<void(const std::optional<Error>& lost, ExitCode)> leave;
        std::function<void(const rdzv::Shutdown&)> end;
    };
    /// `is_head`: the head is in this process. `handler` gets the events of every link, one after another.
    HeadLink(NodeParts& node, bool is_head, rdzv::AgentLinkHandler& handler, Ways ways);
    ~HeadLink() { node_.loop->cancel(timer_); }
    HeadLink(const HeadLink&) = delete;
    HeadLink& operator=(const HeadLink&) = delete;

    /// The controller's address, as the user or the old head named it.
    [[nodiscard]] const Endpoint& head() const { return head_; }
    /// True when the head is on loopback, so that nothing leaves this host.
    [[nodiscard]] bool head_stays_here() const;

    /// Serves this host's workers from the head's store, on every node but the first head's, whose workers
    /// reach the server directly. Error: System.
    Status relay_store();
    /// Joins the controller at this address, or at one of `head_elsewhere`. `is_ours`: the controller is in
    /// this process.
    void join(const Endpoint& controller, bool is_ours);
    /// Returns false, and sends nothing, when there is no session.
    bool send(rdzv::FromAgent message) { return link_ && link_->send(std::move(message)); }
    [[nodiscard]] bool is_connected() const { return link_ && link_->is_connected(); }
    /// Asks the controller to end the job. Without a controller the node leaves.
    void ask_to_end(const rdzv::StopRequest& how);
    /// Sends a heartbeat, on a Keepalive's thread.
    void keep_alive();
    /// Call it only while connected.
    [[nodiscard]] std::string own_address() const { return link_->own_address(); }

    // Events that the link's handler passes on.
    void connected();
    void generation_began(const rdzv::StartGeneration& start);
    void obey(const rdzv::JobSnapshot& snapshot);
    void obey(const rdzv::Successor& successor) { feed(successor); }
    void obey(const rdzv::Shutdown& shutdown) { feed(shutdown); }
    void on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply) {
        relay_->on_store_reply(number, reply);
    }
    void on_acknowledged() {
        if (relay_) relay_->on_acknowledged();
    }
    /// Answers the workers' requests with `why`: the link has ended.
    void end_requests(const Error& why);
    /// The head is lost: this node goes on under the same or another head, or ends.
    void lost(const Error& why);
    /// No worker of this node is left.
    void workers_ended() { feed(follower_event::WorkersEnded{}); }
    /// All workers of this node have left a generation that was suspended, or have ended.
    void workers_left();
    /// Stops the workers as after any failure.
    void end_workers(const std::string& why);

  private:
    void feed(const FollowerEvent& event);
    void perform(const FollowerActions& actions);
    /// False: no worker of this node is left, or all have left the lost head's generation.
    [[nodiscard]] bool has_workers() const { return !node_.agent->idle() && !keeps_workers(); }
    /// True when workers of this node have left the lost head's generation and wait for the next.
    [[nodiscard]] bool keeps_workers() const {
        const AgentState& workers = node_.agent->state();
        return workers.is_left() && workers.alive() > 0;
    }
    void stop_workers(const std::string& why);
    void renew(const Error& why);
    void join_soon(std::vector<Endpoint> where, TimePoint by);
    void leave(const std::optional<Error>& lost);

    [[nodiscard]] FollowerState begin_following(bool is_head) const;
    void join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours);
    [[nodiscard]] bool head_is_dead() const;
    Status listen_as_standby();

    NodeParts& node_;
    const JobSpec& spec_;
    rdzv::AgentLinkHandler& handler_;
    const Ways ways_;
    FollowerState follower_;
    os::EventLoop::TimerId timer_ = 0;         ///< of follower_
    std::unique_ptr<Standby> standby_;         ///< null until the head appoints this node its standby
    std::unique_ptr<rdzv::StoreRelay> relay_;  ///< null: the workers reach the server in this process
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null until this node joins
    Endpoint head_;
    Endpoint head_address_;        ///< the same, numeric: names may not resolve once the head is lost
    std::size_t head_places_ = 1;  ///< number of addresses at which the head was tried
    bool has_joined_ = false;      ///< over the current link
};

}  // namespace ddprun
