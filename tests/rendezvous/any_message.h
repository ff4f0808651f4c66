#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/store_message.h"

/// Any message of the protocol, for tests of all messages and for peers that send forbidden ones.
namespace ddprun::rdzv {

/// A message of an unknown type.
struct Unknown {
    std::uint8_t type = 0;
    bool operator==(const Unknown&) const = default;
};

using Message = std::variant<Unknown, Hello, Challenge, Proof, Welcome, Failure, Heartbeat, StoreRequest,
                             ClientGone, Done, Value, Absent, Sum, Exchanged, Erased, AgentHello,
                             WorkersStarted, WorkerExited, GenerationEnded, StartGeneration, StopGeneration,
                             Shutdown, Notice, Question, Answer, World, FenceEntered, FenceOver, ModexRequest,
                             ModexReply, Legacy, StandbyListens, Successor, JobMoved, OutputPiece,
                             OutputShown, StepsDone, StopProposal, WorkersReady, Release, WorkerScalars>;

/// Converts a message of one family to an AnyMessage.
template <class Family>
Message any(Family family) {
    return std::visit([](auto& one) { return Message(std::move(one)); }, family);
}

/// nullopt if the message is no part of a handshake.
std::optional<HandshakeMessage> as_handshake(const Message& message);

std::string_view message_name(const Message& message);
Result<Message> decode(Frame frame);
Result<std::string> encode(const Message& message, std::uint32_t request);

}  // namespace ddprun::rdzv
