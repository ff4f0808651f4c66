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
#include "rendezvous/serve/admission.h"
#include "rendezvous/wire/connection.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/tls.h"

namespace ddprun::rdzv {

struct AgentSession;

/// One accepted connection, from the first byte to the last.
struct Peer {
    enum class Stage {
        Handshake,
        Serving,  ///< the peer has proved that it knows the token
        Foreign,  ///< the peer speaks another protocol, and was accepted
        Leaving,  ///< the peer has been told why it is refused
    };

    ClientId id;
    std::unique_ptr<Connection> connection;
    ServerHandshake handshake;
    Stage stage = Stage::Handshake;
    os::EventLoop::TimerId handshake_timer = 0;

    // Set by the owner.
    AgentSession* session = nullptr;  ///< null unless the peer is an agent
    std::size_t unanswered = 0;       ///< requests to a store
    bool has_spoken = false;
    bool is_kept_silent = false;  ///< it has sent nothing, and is no stranger any more
    bool is_reported = false;     ///< the owner reports the peer's end itself, so it is not logged

    [[nodiscard]] Role role() const { return handshake.peer().role; }
    /// For logs: "worker 'rank 3' (10.0.0.5:41234)".
    [[nodiscard]] std::string name() const;
    /// Answers a message of an unknown type.
    void send_unknown(const Frame& frame) const;
    /// The error for a message that this peer may not send.
    [[nodiscard]] Error misplaced(std::uint8_t type) const;
};

/// The owner of Peers, which serves them. Called on the loop's thread; may call the Peers, but not destroy
/// them.
class PeersOwner {
  public:
    virtual ~PeersOwner() = default;
    /// The name of the other end for logs. Error: the connection is closed and the error is logged.
    virtual Result<std::string> identify(int fd) { return peer_name(fd); }
    /// The first byte of a peer, with TLS or without. True: the peer does not send frames; all its bytes,
    /// this one too, are passed to on_bytes().
    virtual bool on_first_byte(Peer&, char) { return false; }
    virtual void on_bytes(Peer&, std::string_view) {}
    /// The peer has sent nothing in the time of a handshake. True: it is kept open, as `kept` others are.
    /// When it speaks after all, it is served as one that has just come.
    virtual bool keeps_silent(const Peer&, std::size_t /*kept*/) { return false; }
    /// True: the session that this Hello asks to resume exists. The Hello's proof may not have come yet.
    /// Error: the peer is refused.
    virtual Result<bool> on_hello(const Hello&) { return false; }
    /// The peer has proved that it knows the token, and was told so. Error: the peer is refused after all.
    virtual Status on_entered(Peer&) { return {}; }
    /// Error: the peer broke the protocol, and is refused.
    virtual Status on_frame(Peer&, Frame frame) = 0;
    /// The connection is lost. True: the peer stays, and is reported again if no other connection comes.
    virtual bool waits_for_redial(Peer&, const Error&) { return false; }
    /// The peer has been removed. Called once per peer, also for peers that were never admitted.
    virtual void on_gone(Peer& peer, const Error& why) = 0;
    /// One line for the operator.
    virtual void on_log(const std::string& line) = 0;
    virtual void on_written() {}
};

/// The connections of a server, on the event loop: authenticates them (handshake.h), closes some to make room
/// for others (admission.h), and refuses those that break the protocol. Runs on the loop's thread; never
/// blocks.
class Peers final : private ConnectionOwner, private os::AcceptorOwner {
  public:
    struct Options {
        Credentials credentials;
        ServerLimits limits;
        std::string noun = "connections";  ///< their name in logs
        std::shared_ptr<const TlsContext> tls = nullptr;
    };
    /// `loop` and `owner` must outlive the Peers.
    Peers(os::EventLoop& loop, Options options, PeersOwner& owner);
    /// Closes all connections without calling the owner.
    ~Peers() override;
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    /// Also serves the connections to `listener`, a listening, non-blocking socket. Error: System.
    Status listen(UniqueFd listener) { return acceptor_.listen(std::move(listener)); }

    /// The peer with this id; null when it is gone.
    [[nodiscard]] Peer* find(ClientId id) const;
    [[nodiscard]] const std::unordered_map<ClientId, std::unique_ptr<Peer>>& all() const { return peers_; }
    [[nodiscard]] std::size_t strangers() const { return strangers_.in_handshake(); }

    /// Ends the peer's handshake: it is no stranger any more.
    void admit(Peer& peer, Peer::Stage stage);
    /// Gives the newcomer's connection to the peer, closes the peer's previous one and destroys the newcomer.
    void take_over(Peer& newcomer, Peer& peer);
    /// Tells the peer why, also in answer to `request` unless that is 0, and ends its connection.
    void refuse(Peer& peer, std::uint32_t request, const Error& why);

  private:
    void on_accepted(UniqueFd fd) override;
    [[nodiscard]] TimePoint room_at() override { return strangers_.room_at(); }
    bool close_another() override { return evict_stranger(); }
    void on_accept_failed(int error) override;
    bool make_room();
    bool evict_stranger();
    void turn_away(UniqueFd fd, const std::string& name);
    void end_handshake(Peer& peer);
    void stranger_left(ClientId id);

    bool on_first_byte(Connection& connection, char byte) override;
    void on_frame(Connection& connection, Frame frame) override;
    void on_bytes(Connection& connection, std::string_view bytes) override;
    void on_closed(Connection& connection, const Error& why) override;
    void on_written(Connection&) override { owner_.on_written(); }

    Status shake_hands(Peer& peer, Frame frame);
    void close_with(Peer& peer, const Failure& failure, const Error& why);
    Peer& peer_of(const Connection& connection) { return *peers_.at(connection.id()); }

    os::EventLoop& loop_;
    Options options_;
    PeersOwner& owner_;
    os::Acceptor acceptor_;
    Strangers strangers_;
    std::unordered_map<ClientId, std::unique_ptr<Peer>> peers_;
    ClientId last_id_ = 0;
    std::size_t kept_silent_ = 0;
    int last_accept_error_ = 0;  ///< the last one logged; 0: none since the last connection
};

}  // namespace ddprun::rdzv
