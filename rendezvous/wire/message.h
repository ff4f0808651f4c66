#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "env/result.h"
#include "rendezvous/wire/frame.h"

/// What all messages have in common. The messages themselves are in handshake.h, store_message.h and
/// agent_message.h. PROTOCOL.md describes them for people.
namespace ddprun::rdzv {

/// A frame's type. Released numbers never change.
enum class MessageType : std::uint8_t {
    Hello = 1,
    Challenge,
    Proof,
    Welcome,
    Failure,
    Heartbeat,
    Set = 16,
    Get,
    TryGet,
    Add,
    CompareSet,
    Erase,
    Wait,
    Barrier,
    ClientGone,
    Done = 32,
    Value,
    Absent,
    Sum,
    Exchanged,
    Erased,
    AgentHello = 64,
    WorkersStarted,
    WorkerExited,
    GenerationEnded,
    FenceEntered,
    StandbyListens,
    JobMoved,
    OutputPiece,
    StepsDone,
    WorkerScalars,
    WorkersReady,
    StartGeneration = 80,
    StopGeneration,
    Shutdown,
    World,
    FenceOver,
    JobSnapshot,
    Successor,
    OutputShown,
    StopProposal,
    Release,
    SuspendGeneration,
    Notice = 96,
    Question,
    Answer,
    ModexRequest,
    ModexReply,
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
    return std::visit([](const auto& one) { return message_name(static_cast<std::uint8_t>(one.kType)); },
                      message);
}

/// Shared, immutable bytes, so that a stored value is not copied for each of its readers.
class Blob {
  public:
    Blob() = default;
    explicit Blob(std::string bytes) {
        if (!bytes.empty()) bytes_ = std::make_shared<const std::string>(std::move(bytes));
    }
    [[nodiscard]] std::string_view view() const {
        return bytes_ ? std::string_view(*bytes_) : std::string_view();
    }
    [[nodiscard]] std::size_t size() const { return bytes_ ? bytes_->size() : 0; }
    bool operator==(const Blob& other) const { return view() == other.view(); }

  private:
    std::shared_ptr<const std::string> bytes_;
};

/// An encoded frame. The blob follows the head without being copied.
struct EncodedMessage {
    std::string head;
    Blob blob;
    [[nodiscard]] std::string whole() && { return std::move(head.append(blob.view())); }
};

/// The answer to a request that failed, and the last word before a connection is closed on a peer.
struct Failure {
    static constexpr MessageType kType = MessageType::Failure;
    Errc code = Errc::Protocol;
    std::string what;
    bool operator==(const Failure&) const = default;
};
inline Failure failure_of(const Error& error) { return {error.code, error.what}; }

/// Shows that its sender lives, and acknowledges received messages.
struct Heartbeat {
    static constexpr MessageType kType = MessageType::Heartbeat;
    std::uint64_t received = 0;  ///< messages of the session, all but heartbeats
    bool operator==(const Heartbeat&) const = default;
};

// All decode functions take a frame of their own kind and ignore unknown keys.
// Error: Protocol naming the message, the key and what is wrong with it.
// All encode functions send texts that are not UTF-8 with replacement characters.
// Error: Limit when the message is larger than a peer would take.

Result<Failure> decode_failure(Frame frame);
Result<EncodedMessage> encode_message(Failure failure, std::uint32_t request);
Result<Heartbeat> decode_heartbeat(Frame frame);
Result<EncodedMessage> encode_message(Heartbeat heartbeat);

}  // namespace ddprun::rdzv
