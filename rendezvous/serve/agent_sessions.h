#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>

#include "env/os/event_loop.h"
#include "env/result.h"
#include "rendezvous/serve/held_answers.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/session.h"

namespace ddprun::rdzv {

/// An agent's session (rendezvous/wire/session.h) at the server's side.
struct AgentSession {
    ClientId id;             ///< of the connection that it began with
    std::string name;        ///< the nonce that it began with
    Connection* connection;  ///< that carries it, or did last
    HeldAnswers held;
    Inbox inbox = {};
    bool is_joined = false;                   ///< the controller has its AgentHello
    os::EventLoop::TimerId outage_timer = 0;  ///< its connection is lost, and when this ends the session is

    /// What is sent reaches the agent, by this connection or by another one.
    [[nodiscard]] bool takes_messages() const { return connection->takes_messages(); }
};

/// The agents' sessions, whichever connections carry them: which go on, which are lost to silence, what has
/// reached the agents. On the loop's thread; never blocks, and never destroys a connection.
class AgentSessions {
  public:
    struct Limits {
        Heartbeats heartbeats;
        std::size_t held_bytes;  ///< of answers to one worker that its agent does not take
    };
    AgentSessions(os::EventLoop& loop, Limits limits);
    ~AgentSessions();
    AgentSessions(const AgentSessions&) = delete;
    AgentSessions& operator=(const AgentSessions&) = delete;

    /// An agent has proved that it knows the token, and wants a session. Valid until it is ended.
    AgentSession& begin(ClientId id, const std::string& name, Connection& connection);
    /// The session that a Hello wants to go on with; null: it is over, or there never was one.
    AgentSession* find(const Hello& hello);
    /// What the agent of such a Hello is told: what has come of it, and where what it hears goes on.
    [[nodiscard]] static SessionCounts counts(const AgentSession& session, const Hello& hello);
    /// `connection` carries it from here on; the one before may be destroyed now, with what was still unread
    /// of it: the agent says that again. Error: Protocol; then nothing has changed.
    Status go_on(AgentSession& session, const Hello& hello, Connection& connection);
    /// Its connection is lost. True: the session is not, and the connection is told of again when no other
    /// one came in time.
    bool waits_for_redial(AgentSession& session, const Error& why);
    void end(AgentSession& session);

    /// From here on it is an agent of the job.
    void join(AgentSession& session, const AgentHello& hello);
    /// Null: it has not joined, or takes no messages any more.
    AgentSession* joined(AgentId agent);
    /// To all of them. Error: it cannot be encoded.
    Status broadcast(ToAgent message);
    /// A heartbeat to all of them by a Keepalive's thread, while the loop's is in a BlockingCall.
    void keep_alive();
    /// A heartbeat has come. Error: Protocol.
    Status take(AgentSession& session, const Heartbeat& heartbeat);
    /// Counts a message, and says that it came where that has to be soon.
    static void count(AgentSession& session, const Frame& frame);
    /// To one of its workers, or to the agent itself: now, or when there is room.
    static void answer(AgentSession& session, StoreAnswer answer);

    /// Calls `handler` once, later, when all that has been said to agents has reached them; after `patience`
    /// at the latest.
    void when_written(Duration patience, os::EventLoop::Handler handler);
    /// Something may have.
    void look_soon_whether_written();

    /// Addresses of all agents that have ever joined: one that was lost may come back.
    [[nodiscard]] const std::set<std::string>& node_addresses() const { return node_addresses_; }

  private:
    /// Whoever waits for the end of the writing.
    struct WritingEnd {
        os::EventLoop::Handler handler;
        os::EventLoop::TimerId timer;
    };
    void beat();
    void look_for_silence();
    /// Bytes that agents have not said to have.
    [[nodiscard]] std::size_t queued_bytes() const;
    void look_whether_written();
    void release(std::uint64_t key);

    os::EventLoop& loop_;
    Limits limits_;
    std::map<ClientId, AgentSession> sessions_;  ///< in order of arrival
    std::unordered_map<std::string, ClientId> by_name_;
    std::size_t joined_ = 0;
    std::set<std::string> node_addresses_;
    SilenceWatch silence_;
    os::EventLoop::TimerId heartbeat_timer_ = 0, silence_timer_ = 0;
    std::map<std::uint64_t, WritingEnd> writing_ends_;
    std::uint64_t last_writing_end_ = 0;
    bool is_looking_ = false;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< for what was posted when we are gone
};

}  // namespace ddprun::rdzv
