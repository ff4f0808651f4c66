#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "env/result.h"
#include "rendezvous/message.h"

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
/// label differs by direction, so that a proof cannot be sent back; fresh nonces make it useless later.
namespace ddprun::rdzv {

inline constexpr std::size_t kNonceBytes = 16;

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
    /// The answer to the server's message; nullopt: authenticated, both ways.
    /// Error: Refused (its Failure, or its proof is wrong), Protocol (another message than expected).
    Result<std::optional<Message>> receive(const Message& message);
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }

  private:
    enum class State { AwaitingChallenge, AwaitingWelcome, Authenticated, Failed };
    Result<std::optional<Message>> decide(const Message& message);

    Credentials credentials_;
    Hello hello_;
    std::string server_nonce_;
    State state_ = State::AwaitingChallenge;
};

class ServerHandshake {
  public:
    ServerHandshake(Credentials credentials, std::string nonce);

    /// The answer to the client's message. After an error the connection must be refused: `what` is for our
    /// log; refusal() is what the peer, who has proved nothing, may know.
    /// Error: Refused (token or job), Protocol.
    Result<Message> receive(const Message& message);
    [[nodiscard]] Failure refusal() const { return refusal_; }
    [[nodiscard]] bool authenticated() const { return state_ == State::Authenticated; }
    /// The client's Hello: claims until authenticated().
    [[nodiscard]] const Hello& peer() const { return peer_; }

  private:
    enum class State { AwaitingHello, AwaitingProof, Authenticated, Failed };
    Result<Message> on_hello(const Hello& hello);
    Result<Message> on_proof(const Proof& proof);
    Error refuse(Errc code, std::string log, std::string told);

    Credentials credentials_;
    std::string nonce_;
    Hello peer_;
    Failure refusal_;
    State state_ = State::AwaitingHello;
};

}  // namespace ddprun::rdzv
