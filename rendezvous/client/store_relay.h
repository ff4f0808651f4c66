#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/client/agent_link.h"
#include "rendezvous/client/relay_state.h"
#include "rendezvous/serve/store_service.h"

namespace ddprun::rdzv {

/// Relays the store requests of a node's workers, which connect by a Unix socket, through the agent's
/// session.
///
/// Lives as long as the node takes part in the job, also when the controller changes. Runs on the event loop;
/// never blocks. While too much is unacknowledged by the controller, the workers wait. Without a session, and
/// when it ends, requests are answered `closed`.
class StoreRelay final : private StorePeersHandler {
  public:
    struct Parts {
        os::EventLoop& loop;
        std::function<AgentLink*()> link;  ///< the present link; null: none
        std::function<void(const std::string&)> log;
    };
    /// `listener` listens on a Unix socket. Error: System.
    static Result<std::unique_ptr<StoreRelay>> serve(Parts parts, UniqueFd listener, Credentials credentials,
                                                     ServerLimits limits = {});
    StoreRelay(const StoreRelay&) = delete;
    StoreRelay& operator=(const StoreRelay&) = delete;

    // Calls from the link's handler.
    void on_store_reply(std::uint32_t number, const StoreReply& reply);
    void on_acknowledged();
    void on_lost(const std::string& why);

    [[nodiscard]] const RelayState& state() const { return state_; }

  private:
    explicit StoreRelay(Parts parts) : parts_(std::move(parts)) {}
    void on_store_request(ClientId client, std::uint32_t number, StoreRequest request) override;
    void on_store_peer_gone(ClientId client) override;
    void on_store_log(const std::string& line) override { parts_.log(line); }
    [[nodiscard]] AgentLink* session() const;
    void perform(RelayState::Actions actions);

    Parts parts_;
    RelayState state_;
    std::unique_ptr<StorePeers> clients_;
    os::DeadlineTimer expiry_{parts_.loop, [this] { perform(state_.expire(parts_.loop.now())); }};
};

}  // namespace ddprun::rdzv
