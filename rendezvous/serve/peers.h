#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "env/os/acceptor.h"
#include "env/os/event_loop.h"
#include "env/result.h"
#include "env/unique_fd.h"
#include "rendezvous/serve/strangers.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

struct AgentSession;

/// One accepted connection, from the first byte to the last.
struct Peer {
    enum class Stage {
        Handshake,
        Serving,  ///< it has proved that it knows the token
        Foreign,  ///< it speaks another protocol, and was let in
        Leaving,  ///< it has been told why it must go
    };

    ClientId id;
    std::unique_ptr<Connection> connection;
    ServerHandshake handshake;
    Stage stage = Stage::Handshake;
    os::EventLoop::TimerId handshake_timer = 0;

    // What its owner knows of it.
    AgentSession* session = nullptr;  ///< null: it is no agent
    std::size_t unanswered = 0;       ///< requests to a store
    bool is_reported = false;         ///< the owner tells of its end itself: nothing is logged

    [[nodiscard]] Role role() const { return handshake.peer().role; }
    /// For logs: "worker 'rank 3' (10.0.0.5:41234)".
    [[nodiscard]] std::string name() const;
    /// Answers a message of a type that is not known here.
    void send_unknown(const Frame& frame) const;
    /// The message is not one that this peer may send.
    [[nodiscard]] Error misplaced(std::uint8_t type) const;
};

/// Whoever serves the peers. Called on the loop's thread; may call the Peers, but not destroy them.
class PeersOwner {
  public:
    virtual ~PeersOwner() = default;
    /// How logs name whoever is at the other end. Error: it is not let in; the error is logged.
    virtual Result<std::string> identify(int fd) { return peer_name(fd); }
    /// The first byte of a peer, by TLS or not. True: it does not speak frames, and what it sends, this byte
    /// too, comes by on_bytes.
    virtual bool on_first_byte(Peer&, char) { return false; }
    virtual void on_bytes(Peer&, std::string_view) {}
    /// Somebody says this Hello, and the proof of it comes next or is here. The counts of the session with
    /// which it wants to go on; nullopt: there is none. Error: it is refused.
    virtual Result<std::optional<SessionCounts>> on_hello(const Hello&) {
        return std::optional<SessionCounts>();
    }
    /// The peer has proved that it knows the token, and is told so. Error: it is refused after all.
    virtual Status on_entered(Peer&) { return {}; }
    /// Error: the peer broke the rules, and is refused.
    virtual Status on_frame(Peer&, Frame frame) = 0;
    /// The connection is lost. True: the peer stays, and is told of again when no other connection came.
    virtual bool waits_for_redial(Peer&, const Error&) { return false; }
    /// The peer is not listed any more. Once per peer, also of one that was never let in.
    virtual void on_gone(Peer& peer, const Error& why) = 0;
    /// One line for the operator.
    virtual void on_log(const std::string& line) = 0;
    virtual void on_written() {}
};

/// The connections of a server, on the event loop: who they are (handshake.h), which of them make room for
/// others (strangers.h), and how those are refused that break the rules. One thread, the loop's; never
/// blocks.
class Peers final : private ConnectionOwner, private os::AcceptorOwner {
  public:
    struct Options {
        Credentials credentials;
        ServerLimits limits;
        std::string noun = "connections";  ///< what they are called in logs
        std::shared_ptr<const TlsContext> tls = nullptr;
    };
    /// `loop` and `owner` are borrowed for its life.
    Peers(os::EventLoop& loop, Options options, PeersOwner& owner);
    /// Closes all connections; tells the owner nothing any more.
    ~Peers() override;
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    /// Serves who connects there, too; `listener` listens and does not block. Error: System.
    Status listen(UniqueFd listener) { return acceptor_.listen(std::move(listener)); }

    /// Null: it is gone.
    [[nodiscard]] Peer* find(ClientId id) const;
    [[nodiscard]] const std::unordered_map<ClientId, std::unique_ptr<Peer>>& all() const { return peers_; }
    [[nodiscard]] std::size_t strangers() const { return strangers_.in_handshake(); }

    /// From here on the peer is no stranger.
    void admit(Peer& peer, Peer::Stage stage);
    /// The newcomer's connection becomes that of the peer, whose own is closed. Then there is no newcomer.
    void take_over(Peer& newcomer, Peer& peer);
    /// Tells the peer why, in answer to `request` unless that is 0, and ends its connection.
    void refuse(Peer& peer, std::uint32_t request, const Error& why);

  private:
    void on_accepted(UniqueFd fd) override;
    [[nodiscard]] TimePoint room_at() override { return strangers_.room_at(); }
    bool close_another() override { return evict_stranger(); }
    void on_accept_failed(int error) override;
    bool make_room();
    bool evict_stranger();
    void turn_away(UniqueFd fd, const std::string& name);
    void stranger_left(ClientId id);

    bool on_first_byte(Connection& connection, char byte) override;
    void on_frame(Connection& connection, Frame frame) override;
    void on_bytes(Connection& connection, std::string_view bytes) override;
    void on_closed(Connection& connection, const Error& why) override;
    void on_written(Connection&) override { owner_.on_written(); }

    Status shake_hands(Peer& peer, Frame frame);
    void say_goodbye(Peer& peer, const Failure& last_words, const Error& why);
    Peer& peer_of(const Connection& connection) { return *peers_.at(connection.id()); }

    os::EventLoop& loop_;
    Options options_;
    PeersOwner& owner_;
    os::Acceptor acceptor_;
    Strangers strangers_;
    std::unordered_map<ClientId, std::unique_ptr<Peer>> peers_;
    ClientId last_id_ = 0;
    int last_accept_error_ = 0;  ///< which was told; 0: none since the last connection
};

}  // namespace ddprun::rdzv
