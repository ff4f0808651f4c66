#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "env/os/acceptor.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/connection.h"
#include "rendezvous/handshake.h"
#include "rendezvous/store_message.h"

namespace ddprun::rdzv {

/// Whoever serves a host's local clients. Called on the loop's thread.
class LocalClientsHandler {
  public:
    virtual ~LocalClientsHandler() = default;
    /// Answer it once with LocalClients::answer(), at any time.
    virtual void on_local_request(std::uint64_t client, std::uint32_t number, StoreRequest request) = 0;
    /// Of one that had proved that it knows the token. Nothing follows.
    virtual void on_local_gone(std::uint64_t client) = 0;
    /// One line for the operator, about peers that broke the rules.
    virtual void on_local_log(const std::string& line) = 0;
};

/// The store's clients on this host, who come by a Unix socket: this user's processes only, with the
/// handshake of all others. On the event loop; never blocks.
class LocalClients final : private ConnectionOwner, private os::AcceptorOwner {
  public:
    /// `listener` listens and does not block; `loop` and `handler` are borrowed. Error: System.
    static Result<std::unique_ptr<LocalClients>> serve(os::EventLoop& loop, UniqueFd listener,
                                                       Credentials credentials, ServerLimits limits,
                                                       LocalClientsHandler& handler);
    /// Closes all connections; tells the handler nothing any more.
    ~LocalClients() override;
    LocalClients(const LocalClients&) = delete;
    LocalClients& operator=(const LocalClients&) = delete;

    /// To one that is gone: nothing.
    void answer(std::uint64_t client, std::uint32_t number, StoreReply reply);
    /// Nothing more is read from anybody, until it is.
    void pause();
    void resume();
    [[nodiscard]] std::size_t size() const { return peers_.size(); }

  private:
    struct Peer;

    LocalClients(os::EventLoop& loop, Credentials credentials, ServerLimits limits,
                 LocalClientsHandler& handler);
    void on_frame(Connection& connection, Frame frame) override;
    void on_closed(Connection& connection, const Error& why) override;
    void on_accepted(UniqueFd fd) override;
    void on_accept_failed(int error) override;
    Status shake_hands(Peer& peer, Frame frame);
    Status serve(Peer& peer, Frame frame);
    void refuse(Peer& peer, std::uint32_t request, const Error& why);

    os::EventLoop& loop_;
    os::Acceptor acceptor_;
    Credentials credentials_;
    ServerLimits limits_;
    LocalClientsHandler& handler_;
    std::unordered_map<std::uint64_t, std::unique_ptr<Peer>> peers_;
    std::unordered_map<const Connection*, std::uint64_t> ids_;
    std::uint64_t last_client_ = 0;
    bool is_paused_ = false;
};

}  // namespace ddprun::rdzv
