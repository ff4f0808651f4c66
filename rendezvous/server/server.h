#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "env/io/socket.h"
#include "env/os/acceptor.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/agent_message.h"
#include "rendezvous/connection.h"
#include "rendezvous/handshake.h"
#include "rendezvous/membership.h"
#include "rendezvous/server/agent_sessions.h"
#include "rendezvous/server/store_service.h"
#include "rendezvous/server/torch_clients.h"
#include "rendezvous/strangers.h"
#include "rendezvous/tls.h"

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
/// Holds the connections, from the first byte to the last: who they are (the handshake, strangers.h,
/// admission.h), and to which of the parts below what they say goes.
class Server final : private ConnectionOwner, private os::AcceptorOwner {
  public:
    /// Listens from now on. `loop` and `handler` are borrowed for the server's life.
    /// Error: System ("listen 0.0.0.0:29500: Address already in use"), InvalidArgument (no token).
    static Result<std::unique_ptr<Server>> create(os::EventLoop& loop, ServerOptions options,
                                                  ServerHandler& handler);
    /// Closes all connections; tells the handler nothing any more.
    ~Server() override;
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

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
    [[nodiscard]] std::size_t connections() const { return peers_.size(); }
    [[nodiscard]] std::size_t strangers() const { return strangers_.in_handshake(); }
    [[nodiscard]] const Store& store() const { return store_.store(); }
    [[nodiscard]] const TorchStore& torch_store() const { return torch_.store(); }

  private:
    struct Peer;

    Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler);
    Status open();

    void on_accepted(UniqueFd fd) override;
    [[nodiscard]] TimePoint room_at() override { return strangers_.room_at(); }
    bool close_another() override { return evict_stranger(); }
    void on_accept_failed(int error) override;
    bool make_room();
    bool evict_stranger();
    void turn_away(UniqueFd fd, const Error& why);
    void stranger_left(ClientId id);

    bool on_first_byte(Connection& connection, char byte) override;
    void on_frame(Connection& connection, Frame frame) override;
    void on_bytes(Connection& connection, std::string_view bytes) override;
    void on_closed(Connection& connection, const Error& why) override;
    void on_written(Connection&) override { agents_.look_soon_whether_written(); }

    Status shake_hands(Peer& peer, Frame frame);
    void welcome(Peer& peer);
    Status go_on(Peer& newcomer, AgentSession& session);
    Status serve(Peer& peer, Frame frame);
    Status serve_heartbeat(Peer& peer, Frame frame);
    Status serve_store(Peer& peer, Frame frame);
    Status forget_client(Peer& peer, Frame frame);
    Status hear_of_move(Frame frame);
    Status serve_agent(Peer& peer, Frame frame);
    void answer(StoreAnswer answer);
    void refuse(Peer& peer, std::uint32_t request, const Error& why);
    Peer& peer_of(const Connection& connection);
    static std::string describe(const Peer& peer);

    os::EventLoop& loop_;
    ServerOptions options_;
    ServerHandler& handler_;
    os::Acceptor acceptor_;
    Endpoint bound_;
    StoreService store_;
    TorchClients torch_;
    AgentSessions agents_;
    Strangers strangers_;
    std::map<ClientId, std::unique_ptr<Peer>> peers_;  ///< in order of arrival
    std::unordered_map<const Connection*, ClientId> ids_;
    ClientId next_client_ = 1;
    int last_accept_error_ = 0;  ///< which was told; 0: none since the last connection
};

}  // namespace ddprun::rdzv
