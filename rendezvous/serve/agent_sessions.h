#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/serve/store.h"
#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/session.h"

namespace ddprun::rdzv {

/// An agent's session (rendezvous/wire/session.h) at the server's side.
struct AgentSession {
    ClientId id;             ///< of the session's first connection
    std::string name;        ///< the nonce of the session's first Hello
    Connection* connection;  ///< the present connection, or the last one
    HeldAnswers held;
    Inbox inbox = {};
    bool is_joined = false;                   ///< the controller has its AgentHello
    os::EventLoop::TimerId outage_timer = 0;  ///< runs while the connection is lost; then the session ends

    /// True while sent messages are delivered, by this connection or by the next one.
    [[nodiscard]] bool takes_messages() const { return connection->takes_messages(); }
};

/// The agents' sessions: moves a session to a new connection, fails connections that are silent for too long,
/// and tells when all messages have been acknowledged. Runs on the loop's thread; never blocks, and never
/// destroys a connection.
class AgentSessions {
  public:
    struct Limits {
        Heartbeats heartbeats;
        std::size_t held_bytes;  ///< of held answers to one worker, at most
    };
    AgentSessions(os::EventLoop& loop, Limits limits);
    ~AgentSessions();
    AgentSessions(const AgentSessions&) = delete;
    AgentSessions& operator=(const AgentSessions&) = delete;

    /// Begins the session of an agent that has proved that it knows the token. The reference is valid until
    /// end().
    AgentSession& begin(ClientId id, const std::string& name, Connection& connection);
    /// The session that this Hello asks to resume; null when the session is over or never existed.
    AgentSession* find(const Hello& hello);
    /// Moves the session to `connection`. The previous connection may be destroyed now: the agent sends again
    /// what we had not read from it.
    void resume(AgentSession& session, Connection& connection);
    /// Call it when the session's connection is lost. True: the session waits for another connection; when
    /// none comes in time, the connection reports its loss again.
    bool waits_for_redial(AgentSession& session, const Error& why);
    void end(AgentSession& session);

    /// Marks the session as that of an agent of the job.
    void join(AgentSession& session, const AgentHello& hello);
    /// The session of an agent; null when it has not joined or takes no messages any more.
    AgentSession* joined(AgentId agent);
    /// Sends a message to all agents that have joined. Error: the message cannot be encoded.
    Status broadcast(ToAgent message);
    /// Sends a heartbeat to all agents. Call it on a Keepalive's thread, while the loop's thread is in a
    /// BlockingCall.
    void keep_alive();
    /// Processes an agent's heartbeat. Error: Protocol.
    Status take(AgentSession& session, const Heartbeat& heartbeat);
    /// Counts a received message, and acknowledges it at once when that is due.
    static void count(AgentSession& session, const Frame& frame);
    /// Sends an answer to the agent or to one of its workers, now or when there is room.
    static void answer(AgentSession& session, StoreAnswer answer);

    /// Calls `handler` once, later, when the agents have acknowledged all messages; after `timeout` at the
    /// latest.
    void when_written(Duration timeout, os::EventLoop::Handler handler);
    /// Call it when an agent may have acknowledged something.
    void look_soon_whether_written();

    /// Addresses of all agents that have ever joined, because a lost agent may come back.
    [[nodiscard]] const std::set<std::string>& node_addresses() const { return node_addresses_; }
    /// This host's address that the last agent of another host used; "" none has joined.
    [[nodiscard]] const std::string& reached_at() const { return reached_at_; }

  private:
    /// One call of when_written() that has not ended.
    struct WritingEnd {
        os::EventLoop::Handler handler;
        os::EventLoop::TimerId timer;
    };
    void beat();
    void look_for_silence();
    /// Bytes that agents have not acknowledged.
    [[nodiscard]] std::size_t queued_bytes() const;
    void look_whether_written();
    void release(std::uint64_t key);

    os::EventLoop& loop_;
    Limits limits_;
    std::map<ClientId, AgentSession> sessions_;  ///< in order of arrival
    std::unordered_map<std::string, ClientId> by_name_;
    std::size_t joined_ = 0;
    std::set<std::string> node_addresses_;
    std::string reached_at_;
    SilenceWatch silence_;
    os::EventLoop::TimerId heartbeat_timer_ = 0, silence_timer_ = 0;
    std::map<std::uint64_t, WritingEnd> writing_ends_;
    std::uint64_t last_writing_end_ = 0;
    bool is_looking_ = false;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< expires with us, for posted handlers
};

}  // namespace ddprun::rdzv
