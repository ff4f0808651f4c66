#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/head/head.h"
#include "launcher/head/node_parts.h"
#include "launcher/head/standby.h"
#include "launcher/supervise/heir.h"
#include "rendezvous/agent/agent_link.h"
#include "rendezvous/agent/store_relay.h"

namespace ddprun {

/// This node's part in the job, under one head after the other: joins, joins again where that head takes it
/// for lost, and goes to the standby, or becomes it, where the head is lost. A head on a host of its own
/// never joins. On the event loop's thread.
class HeadLink {
  public:
    using TakeOver = std::function<void(Standby&, const std::string& why, Inheritance)>;
    using GiveUp = std::function<void(const std::string& why)>;
    /// `handler` hears of the link, whichever there is. `take_over`: this node becomes the head; `give_up`:
    /// it ends.
    HeadLink(NodeParts& node, rdzv::AgentLinkHandler& handler, TakeOver take_over, GiveUp give_up);
    HeadLink(const HeadLink&) = delete;
    HeadLink& operator=(const HeadLink&) = delete;

    /// Where the controller is, as it was named.
    [[nodiscard]] const Endpoint& head() const { return head_; }
    /// It is on loopback, so that nothing leaves this host.
    [[nodiscard]] bool head_stays_here() const;

    /// Serves this host's workers from the head's store. For every node but the first head, whose server they
    /// reach themselves. Error: System.
    Status relay_store();
    /// Becomes part of the job at its controller, by whichever of these answers. `is_ours`: it is in this
    /// process.
    void join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours);
    /// False: there is no session; nothing is sent.
    bool send(rdzv::FromAgent message) { return link_ && link_->send(std::move(message)); }
    [[nodiscard]] bool is_connected() const { return link_ && link_->is_connected(); }
    /// Asks the controller to end the job, and obeys. False: there is none, and the node is to leave.
    bool ask_to_end(const char* how, int signal);
    /// The controller was asked, and may not have heard it.
    [[nodiscard]] bool has_asked_to_end() const { return has_asked_to_end_; }
    /// A heartbeat by a Keepalive's thread.
    void keep_alive();

    // What the link's handler hears.
    void connected();
    void generation_began(const rdzv::StartGeneration& start);
    void obey(const rdzv::Legacy& legacy);
    void obey(const rdzv::Successor& successor);
    void on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply);
    void on_acknowledged();
    /// The link is over, whatever follows: the workers' requests are answered.
    void end_requests(const Error& why);
    /// The head is lost, and is another process. True: this node goes on, under it or another one; its
    /// workers are stopped. False: it ends.
    bool survive(const Error& why);
    /// No worker of this node is left.
    void workers_ended();

  private:
    Heir::Parts heir_parts();
    [[nodiscard]] bool outlives_head() const;
    [[nodiscard]] bool can_rejoin(const Error& why) const;
    [[nodiscard]] bool head_is_dead() const;
    Result<std::uint16_t> listen_as_standby();
    void lose_head(const Error& why);
    void rejoin(const Error& why);
    void join_again();

    NodeParts& node_;
    const JobSpec& spec_;
    rdzv::AgentLinkHandler& handler_;
    const TakeOver take_over_;
    const GiveUp give_up_;
    Heir heir_;
    std::unique_ptr<Standby> standby_;         ///< null until the head wants this node to be it
    std::unique_ptr<rdzv::StoreRelay> relay_;  ///< null: the workers reach the server in this process
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null until it joins
    Endpoint head_;
    Endpoint head_address_;        ///< the same, numeric: names may be unknown when the head is lost
    std::size_t head_places_ = 1;  ///< by which it was looked for
    Endpoint lost_head_;           ///< of the generation before, while this node goes to the standby
    bool has_joined_ = false;      ///< by the link there is
    bool rejoins_ = false;         ///< when the workers of this node have ended
    int joins_ = 1;                ///< so many times this node has joined its controller
    bool has_asked_to_end_ = false;
};

}  // namespace ddprun
