#include "tests/rendezvous/any_message.h"

namespace ddprun::rdzv {
namespace {

template <class Family>
Result<Message> widen(Result<Family> message) {
    if (!message) return message.error();
    return any(*std::move(message));
}

template <class M>
Result<Message> as_it_is(Result<M> message) {
    if (!message) return message.error();
    return Message(*std::move(message));
}

template <class... M>
struct Messages {
    /// The result of `use` with the message as what it is.
    template <class Use>
    static auto visit(const Use& use, const Message& message) {
        std::optional<decltype(use(Unknown{}))> result;
        static_cast<void>(
            ((holds_alternative<M>(message) && (result = use(*get_if<M>(message)), true)) || ...));
        return result.value();
    }
};
using AllMessages =
    Messages<Unknown, Hello, Challenge, Proof, Welcome, Failure, Heartbeat, StoreRequest, ClientGone, Done,
             Value, Absent, Sum, Exchanged, Erased, AgentHello, WorkersStarted, WorkerExited, GenerationEnded,
             StartGeneration, StopGeneration, Shutdown, Question, Answer, World, FenceEntered, FenceOver,
             ModexRequest, ModexReply, JobSnapshot, StandbyListens, Successor, JobMoved, OutputPiece,
             OutputShown, StepsDone, StopProposal, WorkersReady, Release, SuspendGeneration, WorkerScalars,
             StopRequest, RehearsalRequest, Remark, Waiting, ForwardSignal, EndCollectives, EndJoining,
             KillRank, Preempt>;

struct Encode {
    std::uint32_t request;
    Result<EncodedMessage> operator()(const Unknown& message) const {
        return EncodedMessage{encode(Frame{message.type, request, "", ""}), {}};
    }
    Result<EncodedMessage> operator()(const Question& message) const {
        return encode_message(ToAgent(message));
    }
    Result<EncodedMessage> operator()(const Answer& message) const {
        return encode_message(ToAgent(message));
    }
    Result<EncodedMessage> operator()(const ModexRequest& message) const {
        return encode_message(ToAgent(message));
    }
    Result<EncodedMessage> operator()(const ModexReply& message) const {
        return encode_message(ToAgent(message));
    }
    template <class M>
    Result<EncodedMessage> operator()(const M& message) const {
        if constexpr (requires { encode_message(message, request); }) return encode_message(message, request);
        else return encode_message(message);
    }
};

}  // namespace

std::string_view message_name(const Message& message) {
    const auto name = []<class M>(const M& one) {
        if constexpr (requires { one.kType; }) return one.kType.name;
        else if constexpr (std::is_same_v<M, StoreRequest>) return message_name(one.op);
        else return std::string_view("unknown");
    };
    return AllMessages::visit(name, message);
}

void PrintTo(const Message& message, std::ostream* out) { *out << message_name(message); }

std::optional<HandshakeMessage> as_handshake(const Message& message) {
    const auto narrow = []<class M>(const M& one) -> std::optional<HandshakeMessage> {
        if constexpr (std::is_constructible_v<HandshakeMessage, M>) return HandshakeMessage(one);
        else return std::nullopt;
    };
    return AllMessages::visit(narrow, message);
}

Result<Message> decode(Frame frame) {
    switch (kind_of(frame.type)) {
        case MessageKind::Unknown: return Message(Unknown{frame.type});
        case MessageKind::Heartbeat: return as_it_is(decode_heartbeat(std::move(frame)));
        case MessageKind::Failure: return as_it_is(decode_failure(std::move(frame)));
        case MessageKind::Handshake: return widen(decode_handshake(std::move(frame)));
        case MessageKind::StoreRequest: return as_it_is(decode_store_request(std::move(frame)));
        case MessageKind::ClientGone: return as_it_is(decode_client_gone(std::move(frame)));
        case MessageKind::StoreReply: return widen(decode_store_reply(std::move(frame)));
        case MessageKind::AgentHello: return as_it_is(decode_agent_hello(std::move(frame)));
        case MessageKind::JobMoved: return as_it_is(decode_job_moved(std::move(frame)));
        case MessageKind::FromAgent: return widen(decode_from_agent(std::move(frame)));
        case MessageKind::ToAgent:
        case MessageKind::EitherWay: return widen(decode_to_agent(std::move(frame)));
    }
    return Error{Errc::Protocol, "no such kind", 0};
}

Result<std::string> encode(const Message& message, std::uint32_t request) {
    Result<EncodedMessage> encoded = AllMessages::visit(Encode{request}, message);
    if (!encoded) return encoded.error();
    return std::move(*encoded).whole();
}

}  // namespace ddprun::rdzv
