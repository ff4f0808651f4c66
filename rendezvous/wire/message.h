#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "env/result.h"
#include "rendezvous/wire/frame.h"

/// What all messages have in common. What they say, by who speaks: handshake.h, store_message.h,
/// agent_message.h. PROTOCOL.md is the same for people.
namespace ddprun::rdzv {

/// A frame's type. A number that was released stays.
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
    StartGeneration = 80,
    StopGeneration,
    Shutdown,
    World,
    FenceOver,
    Legacy,
    Successor,
    OutputShown,
    Notice = 96,
    Question,
    Answer,
    ModexRequest,
    ModexReply,
};

/// Who says a message to whom, and with which function its frame is read.
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
/// Of one of a family of messages.
template <class... M>
std::string_view message_name(const std::variant<M...>& message) {
    return std::visit([](const auto& one) { return message_name(static_cast<std::uint8_t>(one.kType)); },
                      message);
}

/// Bytes that many may hold and nobody changes: a stored value is not copied for each of its readers.
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

/// A frame as bytes, but for the blob's, which follow it uncopied.
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

/// Says that its sender lives, and how much it has received.
struct Heartbeat {
    static constexpr MessageType kType = MessageType::Heartbeat;
    std::uint64_t received = 0;  ///< messages of the session, all but heartbeats
    bool operator==(const Heartbeat&) const = default;
};

// Of all decode functions: the frame is of the kind they are for; keys they do not know are ignored.
// Error: Protocol naming the message, the key and what is wrong with it.
// Of all encode functions: texts that are not UTF-8 are sent with replacement characters.
// Error: Limit when the message is larger than a peer would take.

Result<Failure> decode_failure(Frame frame);
Result<EncodedMessage> encode_message(Failure failure, std::uint32_t request);
Result<Heartbeat> decode_heartbeat(Frame frame);
Result<EncodedMessage> encode_message(Heartbeat heartbeat);

}  // namespace ddprun::rdzv
