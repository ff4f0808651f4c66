#include "rendezvous/wire/handshake.h"

#include <fmt/core.h>

#include <span>
#include <utility>
#include <vector>

#include "env/hmac.h"
#include "env/text.h"
#include "rendezvous/wire/message_codec.h"

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
                   std::string_view server_nonce, std::string_view binding) {
    std::string transcript;
    for (const std::string_view part :
         {label, std::string_view(role_name(hello.role)), std::string_view(hello.nonce), server_nonce,
          std::string_view(hello.job_id), std::string_view(hello.name)}) {
        append_part(transcript, part);
    }
    if (!hello.session.empty()) append_part(transcript, hello.session);
    if (!binding.empty()) append_part(transcript, binding);
    return to_hex(hmac_sha256(credentials.token, transcript));
}

/// With TLS a wrong proof may also mean a man in the middle: adds that to the text.
std::string or_between(std::string what, std::string_view binding) {
    return binding.empty() ? what : what + ", or somebody has come between: its certificate is another one";
}

bool equal_macs(std::string_view a, std::string_view b) {
    const auto bytes = [](std::string_view text) {
        return std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    };
    return equal_digest(bytes(a), bytes(b));
}

/// Checks a nonce's length: a short one could be repeated, and an old proof used again.
bool is_nonce(std::string_view nonce) {
    const Result<std::string> bytes = from_hex(nonce);
    return bytes && bytes->size() == kNonceBytes;
}

}  // namespace

// The members are in the order of their names, as in the first release.
static void describe(Visitor& v, Hello& m) {
    v("job_id", m.job_id);
    v("name", m.name);
    v("nonce", m.nonce);
    v.choice("role", m.role, kRoleNames);
    v.usually("session", m.session);
}
static void describe(Visitor& v, Challenge& m) { v("nonce", m.nonce); }
static void describe(Visitor& v, Proof& m) { v("mac", m.mac); }
static void describe(Visitor& v, Welcome& m) { v("mac", m.mac); }

Result<HandshakeMessage> decode_handshake(Frame frame) {
    const MessageKind kind = kind_of(frame.type);
    if (kind != MessageKind::Handshake && kind != MessageKind::Failure) {
        return Error{Errc::Protocol, fmt::format("{} in the handshake", message_name(frame.type)), 0};
    }
    return decode_one_of<HandshakeMessage>(std::move(frame));
}

Result<EncodedMessage> encode_message(HandshakeMessage message, std::uint32_t request) {
    return std::visit([&](auto& one) { return encode_one(one, request); }, message);
}

ClientHandshake::ClientHandshake(Credentials credentials, Hello hello, std::string nonce)
    : credentials_(std::move(credentials)), hello_(std::move(hello)) {
    hello_.job_id = credentials_.job_id;
    hello_.nonce = std::move(nonce);
    if (hello_.name.size() > kNameBytes) hello_.name.resize(kNameBytes);
}

Result<std::optional<HandshakeMessage>> ClientHandshake::receive(const HandshakeMessage& message) {
    Result<std::optional<HandshakeMessage>> decision = decide(message);
    if (!decision) state_ = State::Failed;
    return decision;
}

Result<std::optional<HandshakeMessage>> ClientHandshake::decide(const HandshakeMessage& message) {
    if (const auto* failure = std::get_if<Failure>(&message)) {
        const bool was_busy = failure->code == Errc::Limit || failure->code == Errc::Timeout;
        const bool session_is_over = failure->code == Errc::Closed && !hello_.session.empty();
        const Errc code = session_is_over ? Errc::StaleGeneration : was_busy ? failure->code : Errc::Refused;
        return Error{code, failure->what, 0};
    }
    if (const auto* challenge = std::get_if<Challenge>(&message);
        challenge != nullptr && state_ == State::AwaitingChallenge) {
        if (!is_nonce(challenge->nonce))
            return Error{Errc::Protocol, "Challenge: 'nonce' is not 32 hexadecimal digits", 0};
        server_nonce_ = challenge->nonce;
        state_ = State::AwaitingWelcome;
        return std::optional<HandshakeMessage>(
            Proof{mac_of(kClientLabel, credentials_, hello_, server_nonce_, binding_)});
    }
    if (const auto* welcome = std::get_if<Welcome>(&message);
        welcome != nullptr && state_ == State::AwaitingWelcome) {
        if (!equal_macs(welcome->mac, mac_of(kServerLabel, credentials_, hello_, server_nonce_, binding_))) {
            return Error{Errc::Refused, or_between("the server does not know the job's token", binding_), 0};
        }
        state_ = State::Authenticated;
        return std::optional<HandshakeMessage>();
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

Result<HandshakeMessage> ServerHandshake::receive(const HandshakeMessage& message) {
    const auto* hello = std::get_if<Hello>(&message);
    if (hello != nullptr && state_ == State::AwaitingHello) return on_hello(*hello);
    const auto* proof = std::get_if<Proof>(&message);
    if (proof != nullptr && state_ == State::AwaitingProof) return on_proof(*proof);
    const std::string what = fmt::format("{} in the handshake", message_name(message));
    return refuse(Errc::Protocol, what, what);
}

Result<HandshakeMessage> ServerHandshake::on_hello(const Hello& hello) {
    peer_ = hello;
    if (!is_nonce(hello.nonce) || hello.name.size() > kNameBytes) {
        const std::string what = "Hello: 'nonce' is not 32 hexadecimal digits, or 'name' is too long";
        return refuse(Errc::Protocol, what, what);
    }
    // Told before any proof, because a wrong job is the likeliest mistake; our own id is not told.
    if (hello.job_id != credentials_.job_id) {
        return refuse(Errc::Refused,
                      fmt::format("it is of job '{}', this is job '{}'", hello.job_id, credentials_.job_id),
                      fmt::format("this server belongs to another job than '{}'", hello.job_id));
    }
    state_ = State::AwaitingProof;
    return HandshakeMessage(Challenge{nonce_});
}

Result<HandshakeMessage> ServerHandshake::on_proof(const Proof& proof) {
    if (!equal_macs(proof.mac, mac_of(kClientLabel, credentials_, peer_, nonce_, binding_))) {
        return refuse(
            Errc::Refused,
            or_between(
                "its token is wrong (all nodes need the same DDPRUN_TOKEN, or the same secret file; or all "
                "--insecure)",
                binding_),
            or_between("wrong token for this job", binding_));
    }
    if (!peer_.session.empty() && !has_session_) {
        return refuse(Errc::Closed, "its session is over", "this node was taken for lost");
    }
    state_ = State::Authenticated;
    return HandshakeMessage(Welcome{mac_of(kServerLabel, credentials_, peer_, nonce_, binding_)});
}

}  // namespace ddprun::rdzv
