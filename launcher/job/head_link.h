#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/job/head.h"
#include "launcher/job/heir.h"
#include "launcher/job/node_parts.h"
#include "launcher/job/standby.h"
#include "launcher/spec/exit_codes.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/client/store_relay.h"

namespace ddprun {

/// This node's membership in the job under one head after another. Joins; joins again when the head takes
/// this node for lost; when the head is lost, goes to the standby or becomes the head. A head on its own host
/// never joins. Runs on the event loop's thread.
class HeadLink final : private HeirHands {
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
    bool send(rdzv::FromAgent message) override { return link_ && link_->send(std::move(message)); }
    [[nodiscard]] bool is_connected() const { return link_ && link_->is_connected(); }
    /// Asks the controller to end the job. Without a controller the node leaves.
    void ask_to_end(const char* how, int signal);
    /// Sends a heartbeat, on a Keepalive's thread.
    void keep_alive();
    /// Call it only while connected.
    [[nodiscard]] std::string own_address() const { return link_->own_address(); }

    // Events that the link's handler passes on.
    void connected();
    void generation_began(const rdzv::StartGeneration& start) { heir_.generation_began(start); }
    void obey(const rdzv::Legacy& legacy);
    void obey(const rdzv::Successor& successor) { heir_.feed(successor); }
    void obey(const rdzv::Shutdown& shutdown) { heir_.feed(shutdown); }
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
    void workers_ended() { heir_.feed(heir_event::WorkersEnded{}); }
    /// All workers of this node have left a generation that was suspended, or have ended.
    void workers_left();
    /// Stops the workers as after any failure.
    void end_workers(const std::string& why);

  private:
    bool has_workers() override { return !node_.agent->idle() && !keeps_workers(); }
    bool keeps_workers() override {
        const AgentState& workers = node_.agent->state();
        return workers.is_left() && workers.alive() > 0;
    }
    void stop_workers(const std::string& why) override;
    void kill_workers(const Error& why) override;
    void refuse(rdzv::AgentId agent, const Error& why) override {
        standby_->server->refuse_agent(agent, why);
    }
    void join(std::vector<Endpoint> where, TimePoint by) override;
    void take_over(const JobState& job,
                   const std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>& joined) override;
    void give_up(const std::string& why) override;
    void end(const rdzv::Shutdown& shutdown) override { ways_.end(shutdown); }
    void leave(const std::optional<Error>& lost) override;

    [[nodiscard]] HeirState heir_at_first(bool is_head) const;
    void join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours);
    [[nodiscard]] bool head_is_dead() const;
    Status listen_as_standby();

    NodeParts& node_;
    const JobSpec& spec_;
    rdzv::AgentLinkHandler& handler_;
    const Ways ways_;
    Heir heir_;
    std::unique_ptr<Standby> standby_;         ///< null until the head appoints this node its standby
    std::unique_ptr<rdzv::StoreRelay> relay_;  ///< null: the workers reach the server in this process
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null until this node joins
    Endpoint head_;
    Endpoint head_address_;        ///< the same, numeric: names may not resolve once the head is lost
    std::size_t head_places_ = 1;  ///< number of addresses at which the head was tried
    bool has_joined_ = false;      ///< over the current link
};

}  // namespace ddprun
