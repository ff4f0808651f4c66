#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "env/result.h"
#include "rendezvous/wire/message.h"
#include "rendezvous/wire/role.h"

/// Both sides prove that they know the job's token without sending it. Pure: the caller draws the nonces
/// (random_hex(kNonceBytes)) and moves the messages.
///
///   client                      server
///     Hello{role, name, job, nonce} ->
///                             <- Challenge{nonce}
///     Proof{mac} ->
///                             <- Welcome{mac}     or Failure, and the connection ends
///
/// mac = HMAC-SHA256(token, label ‖ role ‖ both nonces ‖ job ‖ name), every part preceded by its length. The
/// label differs by direction, so that a proof cannot be sent back; fresh nonces make it useless later. Where
/// a session goes on, its name and what each side has received stand behind these: nobody else can take it
/// over, or lose a message of it. With TLS the digest of the server's certificate stands behind all: whoever
/// stands between the two has shown another one.
namespace ddprun::rdzv {

inline constexpr std::size_t kNonceBytes = 16;

struct Hello {
    static constexpr MessageType kType = MessageType::Hello;
    Role role = Role::Worker;
    std::string name;  ///< for people: "rank 3 on node02"
    std::string job_id;
    std::string nonce;
    std::string session =
        {};  ///< an agent's that is to go on: the nonce of the Hello that began it; "" a new one
    std::uint64_t received = 0;  ///< so many of that session's messages
    bool operator==(const Hello&) const = default;
};
struct Challenge {
    static constexpr MessageType kType = MessageType::Challenge;
    std::string nonce;
    bool operator==(const Challenge&) const = default;
};
struct Proof {
    static constexpr MessageType kType = MessageType::Proof;
    std::string mac;
    bool operator==(const Proof&) const = default;
};
/// Where a session goes on, by the server.
struct SessionCounts {
    std::uint64_t received = 0;  ///< so many messages have come from the agent
    std::uint64_t begins =
        0;  ///< it goes on behind so many of its own: the agent has these, and may have more by now
    bool operator==(const SessionCounts&) const = default;
};
struct Welcome {
    static constexpr MessageType kType = MessageType::Welcome;
    std::string mac;
    SessionCounts session = {};
    bool operator==(const Welcome&) const = default;
};
using HandshakeMessage = std::variant<Hello, Challenge, Proof, Welcome, Failure>;

/// Takes a frame of any kind. Error: Protocol, besides, when it has no place in a handshake.
Result<HandshakeMessage> decode_handshake(Frame frame);
Result<EncodedMessage> encode_message(HandshakeMessage message, std::uint32_t request);

/// What both sides must share.
struct Credentials {
    std::string job_id;
    std::string token;
};

class ClientHandshake {
  public:
    /// `hello.nonce` and `.job_id` are filled in here.
    ClientHandshake(Credentials credentials, Hello hello, std::string nonce);

    [[nodiscard]] const Hello& hello() const { return hello_; }
    /// With TLS: its binding (tls.h), before anything is received.
    void bind_to(std::string binding) { binding_ = std::move(binding); }
    /// The answer to the server's message; nullopt: authenticated, both ways.
    /// Error: Limit, Timeout (its Failure: it was too busy for us, another try may do), StaleGeneration (its
    /// Failure: the session of our Hello is over), Refused (any other Failure of it, or its proof is wrong),
    /// Protocol (another message than expected).
    Result<std::optional<HandshakeMessage>> receive(const HandshakeMessage& message);
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }
    /// Our proof is on its way: what is refused from now on is the token.
    [[nodiscard]] bool has_proved() const { return state_ == State::AwaitingWelcome; }
    /// Where the session goes on, once authenticated.
    [[nodiscard]] const SessionCounts& session() const { return session_; }

  private:
    enum class State { AwaitingChallenge, AwaitingWelcome, Authenticated, Failed };
    Result<std::optional<HandshakeMessage>> decide(const HandshakeMessage& message);

    Credentials credentials_;
    Hello hello_;
    std::string server_nonce_, binding_;
    SessionCounts session_;
    State state_ = State::AwaitingChallenge;
};

class ServerHandshake {
  public:
    ServerHandshake(Credentials credentials, std::string nonce);

    /// With TLS: its binding (tls.h), before anything is received.
    void bind_to(std::string binding) { binding_ = std::move(binding); }
    /// The answer to the client's message. After an error the connection must be refused: `what` is for our
    /// log; refusal() is what the peer, who has proved nothing, may know.
    /// Error: Refused (token or job), Protocol.
    Result<HandshakeMessage> receive(const HandshakeMessage& message);
    [[nodiscard]] Failure refusal() const { return refusal_; }
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }
    /// The client's Hello: claims until authenticated().
    [[nodiscard]] const Hello& peer() const { return peer_; }
    /// The session that the Hello names is here. Not said before the Proof comes: it is over, and who proves
    /// himself is refused (Closed).
    void session_is_here(const SessionCounts& counts) { session_ = counts; }

  private:
    enum class State { AwaitingHello, AwaitingProof, Authenticated, Failed };
    Result<HandshakeMessage> on_hello(const Hello& hello);
    Result<HandshakeMessage> on_proof(const Proof& proof);
    Error refuse(Errc code, std::string log, std::string told);

    Credentials credentials_;
    std::string nonce_, binding_;
    Hello peer_;
    Failure refusal_;
    std::optional<SessionCounts> session_;
    State state_ = State::AwaitingHello;
};

}  // namespace ddprun::rdzv
