#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/result.h"
#include "launcher/exit_codes.h"
#include "launcher/head/control/heir.h"
#include "launcher/head/head.h"
#include "launcher/head/node_parts.h"
#include "launcher/head/standby.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/client/store_relay.h"

namespace ddprun {

/// This node's part in the job, under one head after the other: joins, joins again where that head takes it
/// for lost, and goes to the standby, or becomes it, where the head is lost. A head on a host of its own
/// never joins. On the event loop's thread.
class HeadLink {
  public:
    /// What the node does when the head is lost: it becomes the head, or ends, which `why` or the link's end
    /// explains, or neither where the user has asked for the end.
    struct Ways {
        std::function<void(Standby&, const std::string& why, Inheritance)> take_over;
        std::function<void(const std::string& why)> give_up;
        std::function<void(const std::optional<Error>& lost, ExitCode)> leave;
    };
    /// `handler` hears of the link, whichever there is.
    HeadLink(NodeParts& node, rdzv::AgentLinkHandler& handler, Ways ways);
    HeadLink(const HeadLink&) = delete;
    HeadLink& operator=(const HeadLink&) = delete;

    /// Where the controller is, as it was named.
    [[nodiscard]] const Endpoint& head() const { return head_; }
    /// It is on loopback, so that nothing leaves this host.
    [[nodiscard]] bool head_stays_here() const;

    /// Serves this host's workers from the head's store. For every node but the first head, whose server they
    /// reach themselves. Error: System.
    Status relay_store();
    /// Becomes part of the job at its controller, here or by whichever of the others of its addresses that
    /// were told. `is_ours`: it is in this process.
    void join(const Endpoint& controller, bool is_ours);
    /// False: there is no session; nothing is sent.
    bool send(rdzv::FromAgent message) { return link_ && link_->send(std::move(message)); }
    [[nodiscard]] bool is_connected() const { return link_ && link_->is_connected(); }
    /// Asks the controller to end the job. Without one the node leaves.
    void ask_to_end(const char* how, int signal);
    /// A heartbeat by a Keepalive's thread.
    void keep_alive();

    // What the link's handler hears.
    void connected();
    void generation_began(const rdzv::StartGeneration& start);
    void obey(const rdzv::Legacy& legacy);
    void obey(const rdzv::Successor& successor) { heir_.feed(successor); }
    void on_store_reply(std::uint32_t number, const rdzv::StoreReply& reply) {
        relay_->on_store_reply(number, reply);
    }
    void on_acknowledged() {
        if (relay_) relay_->on_acknowledged();
    }
    /// The link is over, whatever follows: the workers' requests are answered.
    void end_requests(const Error& why);
    /// The head is lost, and is another process: this node goes on under it or another one, or ends.
    void lost(const Error& why);
    /// No worker of this node is left.
    void workers_ended() { heir_.feed(heir_event::WorkersEnded{}); }

  private:
    [[nodiscard]] HeirState heir_at_first() const;
    void perform(const HeirActions& actions);
    void join(std::vector<Endpoint> controllers, TimePoint by, bool is_ours);
    [[nodiscard]] bool head_is_dead() const;
    Status listen_as_standby();
    void stop_workers(const std::string& why);
    void renew(const Error& why);

    NodeParts& node_;
    const JobSpec& spec_;
    rdzv::AgentLinkHandler& handler_;
    const Ways ways_;
    Heir heir_;
    std::unique_ptr<Standby> standby_;         ///< null until the head wants this node to be it
    std::unique_ptr<rdzv::StoreRelay> relay_;  ///< null: the workers reach the server in this process
    std::unique_ptr<rdzv::AgentLink> link_;    ///< null until it joins
    Endpoint head_;
    Endpoint head_address_;        ///< the same, numeric: names may be unknown when the head is lost
    std::size_t head_places_ = 1;  ///< by which it was looked for
    bool has_joined_ = false;      ///< by the link there is
    int joins_ = 1;                ///< so many times this node has joined its controller
};

}  // namespace ddprun
