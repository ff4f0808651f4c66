#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/agent_message.h"
#include "rendezvous/connection.h"
#include "rendezvous/handshake.h"
#include "rendezvous/local_clients.h"
#include "rendezvous/membership.h"
#include "rendezvous/session.h"
#include "rendezvous/store.h"
#include "rendezvous/strangers.h"
#include "rendezvous/tls.h"
#include "rendezvous/torch/torch_store.h"

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
    std::shared_ptr<const TlsContext> tls = nullptr;  ///< a server's: then only this host's own connections may be plain
};

/// The job's meeting point: serves the store to workers and tools, and carries control messages between the
/// agents and the controller. One thread, the loop's; never blocks.
class Server final : private ConnectionOwner, private LocalClientsHandler {
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
    StoreReply ask_store(StoreOp op);

    /// Sends to one agent (false: it is gone; on_agent_lost was or will be called) or to all that have
    /// joined.
    bool send(AgentId agent, ToAgent message);
    void broadcast(ToAgent message);
    /// Tells the agent why and ends its connection; on_agent_lost follows.
    void refuse_agent(AgentId agent, const Error& why);

    /// Calls `handler` once, later, when all that has been said to agents has reached them; after `patience` at the latest, for
    /// one may not take it.
    void when_written(Duration patience, os::EventLoop::Handler handler);
    [[nodiscard]] std::size_t connections() const { return peers_.size(); }
    [[nodiscard]] std::size_t strangers() const { return strangers_.in_handshake(); }
    [[nodiscard]] const Store& store() const { return store_; }
    [[nodiscard]] const TorchStore& torch_store() const { return torch_store_; }

  private:
    struct Peer;

    Server(os::EventLoop& loop, ServerOptions options, ServerHandler& handler);
    Status open();
    Status accept_from(UniqueFd listener);
    void on_frame(Connection& connection, Frame frame) override;
    bool on_first_byte(Connection& connection, char byte) override;
    void on_bytes(Connection& connection, std::string_view bytes) override;
    void on_closed(Connection& connection, const Error& why) override;
    void on_written(Connection& connection) override;
    void on_local_request(std::uint64_t client, std::uint32_t number, StoreRequest request) override;
    void on_local_gone(std::uint64_t client) override;
    void on_local_log(const std::string& line) override { handler_.on_log(line); }
    void look_whether_written();
    void release(std::uint64_t key);
    /// Bytes that agents have not said to have.
    [[nodiscard]] std::size_t queued_bytes() const;

    void accept_some(int listener);
    bool accept_one(int listener);
    void pause_accepting(int error);
    void stop_accepting(TimePoint until);
    void accept_again();
    void stranger_left(ClientId id);
    void admit(UniqueFd fd);
    bool make_room();
    bool evict_stranger();
    void turn_away(UniqueFd fd, const Error& why);
    Status shake_hands(Peer& peer, Frame frame);
    void welcome(Peer& peer);
    Status go_on(Peer& newcomer, Peer& session);
    Peer* session_of(const Hello& hello);
    bool waits_for_redial(Peer& peer, const Error& why);
    Status serve(Peer& peer, Frame frame);
    Status serve_store(Peer& peer, Frame frame);
    Status forget_client(Peer& peer, Frame frame);
    Status serve_agent(Peer& peer, Frame frame);
    void send_to_all(const Result<EncodedMessage>& message);
    void refuse(Peer& peer, std::uint32_t request, const Error& why);
    void ask(StoreClientId client, std::uint32_t number, StoreRequest request);
    void deliver(StoreAnswers answers);
    void say_held(Peer& peer);
    [[nodiscard]] Status admits_speech(const Connection& connection, char first_byte) const;
    [[nodiscard]] Status admits_torch(const Connection& connection) const;
    void end_torch_clients();
    void arm_expiry();
    void beat();
    void look_for_silence();
    Peer* joined_agent(AgentId agent);
    std::string describe(const Peer& peer) const;

    os::EventLoop& loop_;
    ServerOptions options_;
    ServerHandler& handler_;
    std::vector<UniqueFd> listeners_;
    Endpoint bound_;
    Store store_;
    std::unique_ptr<LocalClients> local_;  ///< null: this host's workers come by other ways
    TorchStore torch_store_;
    std::size_t torch_clients_ = 0;
    std::set<std::string> node_addresses_;  ///< of all agents that have ever joined: one that was lost may come back
    std::map<ClientId, std::unique_ptr<Peer>> peers_;  ///< in order of arrival
    std::unordered_map<const Connection*, ClientId> ids_;
    std::unordered_map<std::string, ClientId> sessions_;  ///< of agents, by the nonce that they began with
    Strangers strangers_;
    std::size_t joined_agents_ = 0;
    ClientId next_client_ = 1;  ///< 0 is the controller itself, for which this host's workers speak
    TimePoint expiry_at_ = kNever;
    os::EventLoop::TimerId expiry_timer_ = 0;
    os::EventLoop::TimerId heartbeat_timer_ = 0;
    os::EventLoop::TimerId silence_timer_ = 0;
    SilenceWatch silence_;
    os::EventLoop::TimerId accept_timer_ = 0;  ///< while nothing is accepted
    bool waits_for_room_ = false;              ///< for a stranger to go, that is
    /// Whoever waits for the end of the writing.
    struct WritingEnd {
        os::EventLoop::Handler handler;
        os::EventLoop::TimerId timer;
    };
    std::map<std::uint64_t, WritingEnd> writing_ends_;
    std::uint64_t last_writing_end_ = 0;
    bool is_looking_ = false;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< for what was posted when we are gone
};

}  // namespace ddprun::rdzv
