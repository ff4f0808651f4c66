#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/peers.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {

/// The owner of StorePeers, which answers their requests. Called on the loop's thread.
class StorePeersHandler {
  public:
    virtual ~StorePeersHandler() = default;
    /// A request, to be answered once with StorePeers::answer(), at any time.
    virtual void on_store_request(ClientId client, std::uint32_t number, StoreRequest request) = 0;
    /// A peer that had proved that it knows the token is gone. This is the last call about it.
    virtual void on_store_peer_gone(ClientId client) = 0;
    /// One line for the operator, about peers that broke the rules.
    virtual void on_store_log(const std::string& line) = 0;
};

/// Peers that use the store only. On a Unix socket they are workers of this host: processes of this user, no
/// agents. Runs on the event loop; never blocks.
class StorePeers final : private PeersOwner {
  public:
    /// `listener` is a listening, non-blocking socket; `loop` and `handler` are borrowed. Error: System.
    static Result<std::unique_ptr<StorePeers>> serve(os::EventLoop& loop, UniqueFd listener,
                                                     Credentials credentials, ServerLimits limits,
                                                     StorePeersHandler& handler);

    /// Sends an answer; does nothing when the client is gone.
    void answer(ClientId client, std::uint32_t number, StoreReply reply);
    /// Stops reading from all peers until resume().
    void pause();
    void resume();
    /// True while a peer with another name is served, or a peer has not taken all its answers.
    [[nodiscard]] bool is_busy_but_for(const std::string& name) const;

  private:
    StorePeers(os::EventLoop& loop, bool is_local, Credentials credentials, ServerLimits limits,
               StorePeersHandler& handler);
    Result<std::string> identify(int fd) override;
    Result<std::optional<SessionCounts>> on_hello(const Hello& hello) override;
    Status on_entered(Peer& peer) override;
    Status on_frame(Peer& peer, Frame frame) override;
    void on_gone(Peer& peer, const Error& why) override;
    void on_log(const std::string& line) override { handler_.on_store_log(line); }

    bool is_local_;  ///< the listener is a Unix socket
    std::size_t most_unanswered_;
    StorePeersHandler& handler_;
    bool is_paused_ = false;
    Peers peers_;
};

}  // namespace ddprun::rdzv
