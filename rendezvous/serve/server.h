#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/agent_sessions.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/serve/peers.h"
#include "rendezvous/serve/store_service.h"
#include "rendezvous/serve/torch_clients.h"
#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

/// What the server tells the controller. Called on the loop's thread; the handler may call the server, but
/// not destroy it.
class ServerHandler {
  public:
    virtual ~ServerHandler() = default;
    /// An authenticated agent asks to be part of the job. Answer with send() or refuse_agent().
    virtual void on_agent_joined(AgentId agent, const AgentHello& hello) = 0;
    /// Of an agent that has joined.
    virtual void on_agent_message(AgentId agent, const FromAgent& message) = 0;
    /// The connection of an agent that had joined is over, whoever ended it. Once per agent; nothing follows.
    virtual void on_agent_lost(AgentId agent, const Error& why) = 0;
    /// Another controller of this job says that the job goes on there. It has proved that it knows the token.
    virtual void on_job_moved(const JobMoved&) {}
    /// One line for the operator, about peers that are not, or no longer, part of the job.
    virtual void on_log(const std::string& line) = 0;
    /// One line for who looks closely: an agent's session goes on, on another connection.
    virtual void on_detail(const std::string&) {}
};

struct ServerOptions {
    Credentials credentials;  ///< an empty token is refused
    Endpoint where;           ///< where to listen; port 0 asks the kernel for one
    UniqueFd listener;        ///< or an already listening, non-blocking socket, which then is used instead
    UniqueFd local_listener;  ///< a Unix socket's, for the workers of this host; none
    ServerLimits limits;
    StoreLimits store_limits;
    bool serves_torch = false;  ///< PyTorch's TCPStore clients too; PROTOCOL.md says which of them
    TorchLimits torch_limits;
    Heartbeats heartbeats;
    std::shared_ptr<const TlsContext> tls =
        nullptr;  ///< a server's: then only this host's own connections may be plain
};

/// The job's meeting point: serves the store to workers and tools, and carries control messages between the
/// agents and the controller. One thread, the loop's; never blocks.
///
/// Knows of each peer how it may speak (admission.h), and to which of the parts below what it says goes.
class Server final : private PeersOwner {
  public:
    /// Listens from now on. `loop` and `handler` are borrowed for the server's life.
    /// Error: System ("listen 0.0.0.0:29500: Address already in use"), InvalidArgument (no token).
    static Result<std::unique_ptr<Server>> create(os::EventLoop& loop, ServerOptions options,
                                                  ServerHandler& handler);
    /// Its end closes all connections; the handler is told nothing any more.
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    /// Another handler hears of what happens from now on.
    void hand_to(ServerHandler& handler) { handler_ = &handler; }
    /// Where it listens, with the real port.
    [[nodiscard]] const Endpoint& bound() const { return bound_; }
    /// Listens there too; bound() stays. Error: System.
    Status listen_also(const Endpoint& where);

    /// Drops the store's keys and fences off the earlier generations. Call it before workers are started.
    void begin_generation(std::uint64_t generation);
    /// The controller's own store requests: answered at once; Get, Wait and Barrier that would have to wait
    /// are answered Timeout.
    StoreReply ask_store(StoreOp op) { return store_.ask_own(std::move(op)); }

    /// Sends to one agent (false: it is gone; on_agent_lost was or will be called) or to all that have
    /// joined.
    bool send(AgentId agent, ToAgent message);
    void broadcast(ToAgent message);
    /// A heartbeat to all agents by a Keepalive's thread, while the loop's is in a BlockingCall.
    void keep_alive() { agents_.keep_alive(); }
    /// Tells the agent why and ends its connection; on_agent_lost follows.
    void refuse_agent(AgentId agent, const Error& why);

    /// Calls `handler` once, later, when all that has been said to agents has reached them; after `patience`
    /// at the latest, for one may not take it.
    void when_written(Duration patience, os::EventLoop::Handler handler) {
        agents_.when_written(patience, std::move(handler));
    }
    [[nodiscard]] std::size_t connections() const { return peers_.all().size(); }
    [[nodiscard]] std::size_t strangers() const { return peers_.strangers(); }
    [[nodiscard]] const Store& store() const { return store_.store(); }
    [[nodiscard]] const TorchStore& torch_store() const { return torch_.store(); }

  private:
    Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler);
    Status open();

    bool on_first_byte(Peer& peer, char byte) override;
    void on_bytes(Peer& peer, std::string_view bytes) override { torch_.hear(peer.id, bytes); }
    Result<std::optional<SessionCounts>> on_hello(const Hello& hello) override;
    Status on_entered(Peer& peer) override;
    Status on_frame(Peer& peer, Frame frame) override;
    bool waits_for_redial(Peer& peer, const Error& why) override;
    void on_gone(Peer& peer, const Error& why) override;
    void on_log(const std::string& line) override { handler_->on_log(line); }
    void on_written() override { agents_.look_soon_whether_written(); }

    Status go_on(Peer& newcomer, AgentSession& session);
    Status serve_heartbeat(Peer& peer, Frame frame);
    Status serve_store(Peer& peer, Frame frame);
    Status forget_client(Peer& peer, Frame frame);
    Status hear_of_move(Frame frame);
    Status serve_agent(Peer& peer, Frame frame);
    void answer(StoreAnswer answer);

    os::EventLoop& loop_;
    ServerOptions options_;
    ServerHandler* handler_;
    Endpoint bound_;
    StoreService store_;
    TorchClients torch_;
    AgentSessions agents_;
    Peers peers_;
};

}  // namespace ddprun::rdzv
