#include "rendezvous/handshake.h"

#include <fmt/core.h>

#include <span>
#include <utility>
#include <vector>

#include "env/hmac.h"

namespace ddprun::rdzv {
namespace {

constexpr std::string_view kClientLabel = "ddprun rendezvous 1 client";
constexpr std::string_view kServerLabel = "ddprun rendezvous 1 server";
constexpr std::size_t kNameBytes = 256;

void append_part(std::string& transcript, std::string_view part) {
    transcript += fmt::format("{}:", part.size());
    transcript += part;
}

std::string mac_of(std::string_view label, const Credentials& credentials, const Hello& hello,
                   std::string_view server_nonce) {
    std::string transcript;
    for (const std::string_view part :
         {label, std::string_view(role_name(hello.role)), std::string_view(hello.nonce), server_nonce,
          std::string_view(hello.job_id), std::string_view(hello.name)}) {
        append_part(transcript, part);
    }
    return to_hex(hmac_sha256(credentials.token, transcript));
}

bool equal_macs(std::string_view a, std::string_view b) {
    const auto bytes = [](std::string_view text) {
        return std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    };
    return equal_digest(bytes(a), bytes(b));
}

/// A fixed nonce would let an old proof be used again.
bool is_nonce(std::string_view nonce) {
    const Result<std::string> bytes = from_hex(nonce);
    return bytes && bytes->size() == kNonceBytes;
}

}  // namespace

ClientHandshake::ClientHandshake(Credentials credentials, Hello hello, std::string nonce)
    : credentials_(std::move(credentials)), hello_(std::move(hello)) {
    hello_.job_id = credentials_.job_id;
    hello_.nonce = std::move(nonce);
    if (hello_.name.size() > kNameBytes) hello_.name.resize(kNameBytes);
}

Result<std::optional<Message>> ClientHandshake::receive(const Message& message) {
    Result<std::optional<Message>> decision = decide(message);
    if (!decision) state_ = State::Failed;
    return decision;
}

Result<std::optional<Message>> ClientHandshake::decide(const Message& message) {
    if (const auto* failure = std::get_if<Failure>(&message)) {
        return Error{failure->code == Errc::Limit ? Errc::Limit : Errc::Refused, failure->what, 0};
    }
    if (const auto* challenge = std::get_if<Challenge>(&message);
        challenge != nullptr && state_ == State::AwaitingChallenge) {
        if (!is_nonce(challenge->nonce))
            return Error{Errc::Protocol, "Challenge: 'nonce' is not 32 hexadecimal digits", 0};
        server_nonce_ = challenge->nonce;
        state_ = State::AwaitingWelcome;
        return std::optional<Message>(Proof{mac_of(kClientLabel, credentials_, hello_, server_nonce_)});
    }
    if (const auto* welcome = std::get_if<Welcome>(&message);
        welcome != nullptr && state_ == State::AwaitingWelcome) {
        if (!equal_macs(welcome->mac, mac_of(kServerLabel, credentials_, hello_, server_nonce_))) {
            return Error{Errc::Refused, "the server does not know the job's token", 0};
        }
        state_ = State::Authenticated;
        return std::optional<Message>();
    }
    return Error{Errc::Protocol, fmt::format("{} in the handshake", message_name(message)), 0};
}

ServerHandshake::ServerHandshake(Credentials credentials, std::string nonce)
    : credentials_(std::move(credentials)), nonce_(std::move(nonce)) {}

Error ServerHandshake::refuse(Errc code, std::string log, std::string told) {
    state_ = State::Failed;
    refusal_ = Failure{code, std::move(told)};
    return Error{code, std::move(log), 0};
}

Result<Message> ServerHandshake::receive(const Message& message) {
    const auto* hello = std::get_if<Hello>(&message);
    if (hello != nullptr && state_ == State::AwaitingHello) return on_hello(*hello);
    const auto* proof = std::get_if<Proof>(&message);
    if (proof != nullptr && state_ == State::AwaitingProof) return on_proof(*proof);
    const std::string what = fmt::format("{} in the handshake", message_name(message));
    return refuse(Errc::Protocol, what, what);
}

Result<Message> ServerHandshake::on_hello(const Hello& hello) {
    peer_ = hello;
    if (!is_nonce(hello.nonce) || hello.name.size() > kNameBytes) {
        const std::string what = "Hello: 'nonce' is not 32 hexadecimal digits, or 'name' is too long";
        return refuse(Errc::Protocol, what, what);
    }
    // Said before any proof, because a mistaken job is the likeliest mistake; our own id is not given away.
    if (hello.job_id != credentials_.job_id) {
        return refuse(Errc::Refused,
                      fmt::format("it is of job '{}', this is job '{}'", hello.job_id, credentials_.job_id),
                      fmt::format("this server belongs to another job than '{}'", hello.job_id));
    }
    state_ = State::AwaitingProof;
    return Message(Challenge{nonce_});
}

Result<Message> ServerHandshake::on_proof(const Proof& proof) {
    if (!equal_macs(proof.mac, mac_of(kClientLabel, credentials_, peer_, nonce_))) {
        return refuse(Errc::Refused, "its token is wrong", "wrong token for this job");
    }
    state_ = State::Authenticated;
    return Message(Welcome{mac_of(kServerLabel, credentials_, peer_, nonce_)});
}

}  // namespace ddprun::rdzv
