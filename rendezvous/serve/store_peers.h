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

/// Whoever answers what StorePeers ask. Called on the loop's thread.
class StorePeersHandler {
  public:
    virtual ~StorePeersHandler() = default;
    /// Answer it once with StorePeers::answer(), at any time.
    virtual void on_store_request(ClientId client, std::uint32_t number, StoreRequest request) = 0;
    /// Of one that had proved that it knows the token. Nothing follows.
    virtual void on_store_peer_gone(ClientId client) = 0;
    /// One line for the operator, about peers that broke the rules.
    virtual void on_store_log(const std::string& line) = 0;
};

/// Peers that speak to a store and to nobody else. By a Unix socket these are workers of this host: processes
/// of this user, and no agents. On the event loop; never blocks.
class StorePeers final : private PeersOwner {
  public:
    /// `listener` listens and does not block; `loop` and `handler` are borrowed. Error: System.
    static Result<std::unique_ptr<StorePeers>> serve(os::EventLoop& loop, UniqueFd listener,
                                                     Credentials credentials, ServerLimits limits,
                                                     StorePeersHandler& handler);

    /// To one that is gone: nothing.
    void answer(ClientId client, std::uint32_t number, StoreReply reply);
    /// Nothing more is read from anybody, until it is.
    void pause();
    void resume();
    /// Somebody is served whose name is another one, or has not taken all that it was answered.
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

    bool is_local_;  ///< by a Unix socket
    std::size_t most_unanswered_;
    StorePeersHandler& handler_;
    bool is_paused_ = false;
    Peers peers_;
};

}  // namespace ddprun::rdzv
