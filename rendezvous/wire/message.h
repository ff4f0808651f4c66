#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "env/describe.h"
#include "env/result.h"
#include "rendezvous/wire/frame.h"

/// What all messages have in common. The messages themselves are in handshake.h, store_message.h and
/// agent_message.h. PROTOCOL.md describes them for people.
namespace ddprun::rdzv {

using ddprun::Blob;

/// What kind of program the client of a connection is. The handshake authenticates it.
enum class Role : std::uint8_t { Agent, Worker, Tool };

/// In the order of Role.
inline constexpr std::array<std::string_view, 3> kRoleNames{"agent", "worker", "tool"};
constexpr std::string_view role_name(Role role) { return kRoleNames[static_cast<std::size_t>(role)]; }

/// The type of a message. Released numbers never change.
struct MessageType {
    std::uint8_t number;
    std::string_view name;  ///< for logs
};

/// The direction of a message, and the function that decodes its frame.
enum class MessageKind : std::uint8_t {
    Unknown,       ///< a type this version does not know
    Handshake,     ///< decode_handshake
    Failure,       ///< decode_failure; also part of a handshake and a store's reply
    Heartbeat,     ///< decode_heartbeat
    StoreRequest,  ///< client to store: decode_store_request
    StoreReply,    ///< store to client: decode_store_reply
    ClientGone,    ///< agent to store: decode_client_gone
    AgentHello,    ///< decode_agent_hello
    FromAgent,     ///< agent to controller: decode_from_agent
    ToAgent,       ///< controller to agent: decode_to_agent
    EitherWay,     ///< one of the last two
    JobMoved,      ///< controller to controller: decode_job_moved
};
MessageKind kind_of(std::uint8_t type);

/// "StartGeneration" and so on, for logs; "unknown".
std::string_view message_name(std::uint8_t type);
/// The name of the message in a variant.
template <class... M>
std::string_view message_name(const std::variant<M...>& message) {
    return std::visit([](const auto& one) { return one.kType.name; }, message);
}

/// An encoded frame. The blob follows the head without being copied.
struct EncodedMessage {
    std::string head;
    Blob blob;
    [[nodiscard]] std::string whole() && { return std::move(head.append(blob.view())); }
};

/// The answer to a request that failed, and the last word before a connection is closed on a peer.
struct Failure {
    static constexpr MessageType kType{5, "Failure"};
    Errc code = Errc::Protocol;
    std::string what;
    bool operator==(const Failure&) const = default;
};
inline Failure failure_of(const Error& error) { return {error.code, error.what}; }

/// Shows that its sender lives, and acknowledges received messages.
struct Heartbeat {
    static constexpr MessageType kType{6, "Heartbeat"};
    std::uint64_t received = 0;  ///< messages of the session, all but heartbeats
    bool operator==(const Heartbeat&) const = default;
};

// Each message has a description, by which it is encoded and decoded.
// All decode functions take a frame of their own kind and ignore unknown keys.
// Error: Protocol naming the message, the key and what is wrong with it.
// All encode functions send texts that are not UTF-8 with replacement characters.
// Error: Limit when the message is larger than a peer would take.

Result<Failure> decode_failure(Frame frame);
Result<EncodedMessage> encode_message(Failure failure, std::uint32_t request);
Result<Heartbeat> decode_heartbeat(Frame frame);
Result<EncodedMessage> encode_message(Heartbeat heartbeat);

}  // namespace ddprun::rdzv
