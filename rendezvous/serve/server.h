#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/agent_sessions.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/serve/peers.h"
#include "rendezvous/serve/store.h"
#include "rendezvous/serve/store_service.h"
#include "rendezvous/serve/torch_store.h"
#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

struct TorchDoor;

/// The server's clients that speak PyTorch's TCPStore protocol, and their store. On the loop's thread; never
/// blocks.
class TorchClients {
  public:
    explicit TorchClients(TorchLimits limits) : limits_(limits), store_(limits) {}

    /// Adds a client that was accepted. The connection is borrowed until left().
    void admit(ClientId id, Connection& connection);
    /// Processes bytes from a client and sends the answers to all clients. A client that breaks the protocol
    /// is disconnected.
    void hear(ClientId id, std::string_view bytes);
    /// The client's connection is gone. Does nothing for one that was not admitted.
    void left(ClientId id);
    /// Clears the store and disconnects all clients.
    void end_generation();

    [[nodiscard]] std::size_t size() const { return clients_.size(); }
    /// The number of silent connections that are kept open: the clients of PyTorch before 2.1 have one each,
    /// for keys that they watch. When the server closes it, the client takes all memory in an endless loop.
    /// Survivors of a recovery may have one of the last generation too.
    [[nodiscard]] std::size_t most_silent() const;
    [[nodiscard]] const TorchStore& store() const { return store_; }

  private:
    struct Client {
        Connection& connection;
        TorchParser parser;
    };

    TorchLimits limits_;
    TorchStore store_;
    std::map<ClientId, Client> clients_;
};

/// What the server tells the controller. Called on the loop's thread; the handler may call the server, but
/// not destroy it.
class ServerHandler {
  public:
    virtual ~ServerHandler() = default;
    /// An authenticated agent asks to be part of the job. Answer with send() or refuse_agent().
    virtual void on_agent_joined(AgentId agent, const AgentHello& hello) = 0;
    /// A message from an agent that has joined.
    virtual void on_agent_message(AgentId agent, const FromAgent& message) = 0;
    /// An agent that had joined is gone, whichever side ended the session. Called once per agent, as the last
    /// call about it.
    virtual void on_agent_lost(AgentId agent, const Error& why) = 0;
    /// Another controller of this job, which has proved that it knows the token, says that the job has moved
    /// to it.
    virtual void on_job_moved(const JobMoved&) {}
    /// One line for the operator, about peers that are not (or no longer) part of the job.
    virtual void on_log(const std::string& line) = 0;
    /// One line of detail: an agent's session has moved to another connection.
    virtual void on_detail(const std::string&) {}
};

struct ServerOptions {
    Credentials credentials;  ///< an empty token is refused
    Endpoint where;           ///< where to listen; port 0 asks the kernel for one
    UniqueFd listener;        ///< a listening, non-blocking socket to use instead of `where`, if given
    UniqueFd local_listener;  ///< a Unix socket for the workers of this host, if given
    ServerLimits limits;
    StoreLimits store_limits;
    bool serves_torch = false;  ///< serve PyTorch's TCPStore clients too; PROTOCOL.md says which of them
    TorchLimits torch_limits;
    Heartbeats heartbeats;
    std::shared_ptr<const TlsContext> tls =
        nullptr;  ///< a server's context; if given, only connections within this host may be plain
};

/// The rendezvous server: serves the store to workers and tools, and carries control messages between the
/// agents and the controller. Runs on the loop's thread; never blocks.
///
/// Decides which connections are accepted (admission.h), and passes each message to one of the parts below.
class Server final : private PeersOwner {
  public:
    /// Listens from now on. `loop` and `handler` must outlive the server.
    /// Error: System ("listen 0.0.0.0:29500: Address already in use"), InvalidArgument (no token).
    static Result<std::unique_ptr<Server>> create(os::EventLoop& loop, ServerOptions options,
                                                  ServerHandler& handler);
    /// The destructor closes all connections without calling the handler.
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    /// Replaces the handler.
    void hand_to(ServerHandler& handler) { handler_ = &handler; }
    /// The address where the server listens, with the real port.
    [[nodiscard]] const Endpoint& bound() const { return bound_; }
    /// Listens at `where` too; bound() stays the same. Error: System.
    Status listen_also(const Endpoint& where);

    /// Drops the store's keys and fences off the earlier generations. Call it before workers are started.
    void begin_generation(std::uint64_t generation);
    /// Answers a store request of the controller at once. A Get, Wait or Barrier that would have to wait is
    /// answered Timeout.
    StoreReply ask_store(StoreOp op) { return store_.ask_own(std::move(op)); }

    /// Sends a message to one agent (false: the agent is gone, and on_agent_lost was or will be called) or to
    /// all agents that have joined.
    bool send(AgentId agent, ToAgent message);
    void broadcast(ToAgent message);
    /// See AgentSessions::reached_at().
    [[nodiscard]] const std::string& reached_at() const { return agents_.reached_at(); }
    /// See AgentSessions::keep_alive().
    void keep_alive() { agents_.keep_alive(); }
    /// Tells the agent why and ends its connection; on_agent_lost follows.
    void refuse_agent(AgentId agent, const Error& why);

    /// Calls `handler` once, later, when the agents have acknowledged all messages; after `timeout` at the
    /// latest.
    void when_written(Duration timeout, os::EventLoop::Handler handler) {
        agents_.when_written(timeout, std::move(handler));
    }
    [[nodiscard]] std::size_t connections() const { return peers_.all().size(); }
    [[nodiscard]] std::size_t strangers() const { return peers_.strangers(); }
    [[nodiscard]] const Store& store() const { return store_.store(); }
    [[nodiscard]] const TorchStore& torch_store() const { return torch_.store(); }

  private:
    Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler);
    Status open();

    bool on_first_byte(Peer& peer, char byte) override;
    bool keeps_silent(const Peer& peer, std::size_t kept) override;
    [[nodiscard]] TorchDoor torch_door() const;
    void on_bytes(Peer& peer, std::string_view bytes) override { torch_.hear(peer.id, bytes); }
    Result<bool> on_hello(const Hello& hello) override { return agents_.find(hello) != nullptr; }
    Status on_entered(Peer& peer) override;
    Status on_frame(Peer& peer, Frame frame) override;
    bool waits_for_redial(Peer& peer, const Error& why) override;
    void on_gone(Peer& peer, const Error& why) override;
    void on_log(const std::string& line) override { handler_->on_log(line); }
    void on_written() override { agents_.look_soon_whether_written(); }

    void resume(Peer& newcomer, AgentSession& session);
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
