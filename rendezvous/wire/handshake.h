#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "env/result.h"
#include "rendezvous/wire/message.h"

/// The handshake, in which both sides prove that they know the job's token without sending it. Pure: the
/// caller draws the nonces (random_hex(kNonceBytes)) and moves the messages.
///
///   client                      server
///     Hello{role, name, job, nonce} ->
///                             <- Challenge{nonce}
///     Proof{mac} ->
///                             <- Welcome{mac}     or Failure, and the connection ends
///
/// mac = HMAC-SHA256(token, label ‖ role ‖ both nonces ‖ job ‖ name), every part preceded by its length. The
/// label differs by direction, so that a proof cannot be sent back; fresh nonces make it useless later. When
/// a session is resumed, the MAC also covers its name, so that nobody else can take it over. With TLS the MAC
/// also covers the digest of the server's certificate, so that a man in the middle, who has another
/// certificate, fails.
namespace ddprun::rdzv {

inline constexpr std::size_t kNonceBytes = 16;

struct Hello {
    static constexpr MessageType kType{1, "Hello"};
    Role role = Role::Worker;
    std::string name;  ///< for people: "rank 3 on node02"
    std::string job_id;
    std::string nonce;
    std::string session =
        {};  ///< the agent's session to resume: the nonce of its first Hello; "" a new session
    bool operator==(const Hello&) const = default;
};
struct Challenge {
    static constexpr MessageType kType{2, "Challenge"};
    std::string nonce;
    bool operator==(const Challenge&) const = default;
};
struct Proof {
    static constexpr MessageType kType{3, "Proof"};
    std::string mac;
    bool operator==(const Proof&) const = default;
};
struct Welcome {
    static constexpr MessageType kType{4, "Welcome"};
    std::string mac;
    bool operator==(const Welcome&) const = default;
};
using HandshakeMessage = std::variant<Hello, Challenge, Proof, Welcome, Failure>;

/// Takes a frame of any kind. Error: also Protocol, when the frame does not belong to a handshake.
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
    /// Sets the TLS binding (tls.h). Call it before receive().
    void bind_to(std::string binding) { binding_ = std::move(binding); }
    /// The answer to the server's message; nullopt: authenticated, both ways.
    /// Error: Limit, Timeout (the server was too busy, and another try may succeed), StaleGeneration (the
    /// session of our Hello is over), Refused (any other Failure of the server, or its proof is wrong),
    /// Protocol (an unexpected message).
    Result<std::optional<HandshakeMessage>> receive(const HandshakeMessage& message);
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }
    /// True when our proof has been sent: a refusal from now on concerns the token.
    [[nodiscard]] bool has_proved() const { return state_ == State::AwaitingWelcome; }

  private:
    enum class State { AwaitingChallenge, AwaitingWelcome, Authenticated, Failed };
    Result<std::optional<HandshakeMessage>> decide(const HandshakeMessage& message);

    Credentials credentials_;
    Hello hello_;
    std::string server_nonce_, binding_;
    State state_ = State::AwaitingChallenge;
};

class ServerHandshake {
  public:
    ServerHandshake(Credentials credentials, std::string nonce);

    /// Sets the TLS binding (tls.h). Call it before receive().
    void bind_to(std::string binding) { binding_ = std::move(binding); }
    /// The answer to the client's message. After an error refuse the connection: the error's `what` is for
    /// our log; refusal() is for the peer, which has proved nothing.
    /// Error: Refused (token or job), Protocol.
    Result<HandshakeMessage> receive(const HandshakeMessage& message);
    [[nodiscard]] Failure refusal() const { return refusal_; }
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }
    /// The client's Hello; not proved until authenticated().
    [[nodiscard]] const Hello& peer() const { return peer_; }
    /// Says that the session named in the Hello exists. If it is not called before the Proof comes, the
    /// session is over, and a client with a valid proof is refused (Closed).
    void session_is_here() { has_session_ = true; }

  private:
    enum class State { AwaitingHello, AwaitingProof, Authenticated, Failed };
    Result<HandshakeMessage> on_hello(const Hello& hello);
    Result<HandshakeMessage> on_proof(const Proof& proof);
    Error refuse(Errc code, std::string log, std::string told);

    Credentials credentials_;
    std::string nonce_, binding_;
    Hello peer_;
    Failure refusal_;
    bool has_session_ = false;
    State state_ = State::AwaitingHello;
};

}  // namespace ddprun::rdzv
