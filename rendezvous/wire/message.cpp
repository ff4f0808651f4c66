#include "rendezvous/wire/message.h"

#include <algorithm>
#include <array>

#include "rendezvous/wire/message_fields.h"

namespace ddprun::rdzv {
namespace {

struct MessageRow {
    MessageType type;
    MessageKind kind;
    std::string_view name;
};

constexpr std::array kMessages{
    MessageRow{MessageType::Hello, MessageKind::Handshake, "Hello"},
    MessageRow{MessageType::Challenge, MessageKind::Handshake, "Challenge"},
    MessageRow{MessageType::Proof, MessageKind::Handshake, "Proof"},
    MessageRow{MessageType::Welcome, MessageKind::Handshake, "Welcome"},
    MessageRow{MessageType::Failure, MessageKind::Failure, "Failure"},
    MessageRow{MessageType::Heartbeat, MessageKind::Heartbeat, "Heartbeat"},
    MessageRow{MessageType::Set, MessageKind::StoreRequest, "Set"},
    MessageRow{MessageType::Get, MessageKind::StoreRequest, "Get"},
    MessageRow{MessageType::TryGet, MessageKind::StoreRequest, "TryGet"},
    MessageRow{MessageType::Add, MessageKind::StoreRequest, "Add"},
    MessageRow{MessageType::CompareSet, MessageKind::StoreRequest, "CompareSet"},
    MessageRow{MessageType::Erase, MessageKind::StoreRequest, "Erase"},
    MessageRow{MessageType::Wait, MessageKind::StoreRequest, "Wait"},
    MessageRow{MessageType::Barrier, MessageKind::StoreRequest, "Barrier"},
    MessageRow{MessageType::ClientGone, MessageKind::ClientGone, "ClientGone"},
    MessageRow{MessageType::Done, MessageKind::StoreReply, "Done"},
    MessageRow{MessageType::Value, MessageKind::StoreReply, "Value"},
    MessageRow{MessageType::Absent, MessageKind::StoreReply, "Absent"},
    MessageRow{MessageType::Sum, MessageKind::StoreReply, "Sum"},
    MessageRow{MessageType::Exchanged, MessageKind::StoreReply, "Exchanged"},
    MessageRow{MessageType::Erased, MessageKind::StoreReply, "Erased"},
    MessageRow{MessageType::AgentHello, MessageKind::AgentHello, "AgentHello"},
    MessageRow{MessageType::WorkersStarted, MessageKind::FromAgent, "WorkersStarted"},
    MessageRow{MessageType::WorkerExited, MessageKind::FromAgent, "WorkerExited"},
    MessageRow{MessageType::GenerationEnded, MessageKind::FromAgent, "GenerationEnded"},
    MessageRow{MessageType::FenceEntered, MessageKind::FromAgent, "FenceEntered"},
    MessageRow{MessageType::StandbyListens, MessageKind::FromAgent, "StandbyListens"},
    MessageRow{MessageType::JobMoved, MessageKind::JobMoved, "JobMoved"},
    MessageRow{MessageType::OutputPiece, MessageKind::FromAgent, "OutputPiece"},
    MessageRow{MessageType::StepsDone, MessageKind::FromAgent, "StepsDone"},
    MessageRow{MessageType::WorkerScalars, MessageKind::FromAgent, "WorkerScalars"},
    MessageRow{MessageType::WorkersReady, MessageKind::FromAgent, "WorkersReady"},
    MessageRow{MessageType::StartGeneration, MessageKind::ToAgent, "StartGeneration"},
    MessageRow{MessageType::StopGeneration, MessageKind::ToAgent, "StopGeneration"},
    MessageRow{MessageType::Shutdown, MessageKind::ToAgent, "Shutdown"},
    MessageRow{MessageType::World, MessageKind::ToAgent, "World"},
    MessageRow{MessageType::FenceOver, MessageKind::ToAgent, "FenceOver"},
    MessageRow{MessageType::JobSnapshot, MessageKind::ToAgent, "JobSnapshot"},
    MessageRow{MessageType::Successor, MessageKind::ToAgent, "Successor"},
    MessageRow{MessageType::OutputShown, MessageKind::ToAgent, "OutputShown"},
    MessageRow{MessageType::StopProposal, MessageKind::ToAgent, "StopProposal"},
    MessageRow{MessageType::Release, MessageKind::ToAgent, "Release"},
    MessageRow{MessageType::SuspendGeneration, MessageKind::ToAgent, "SuspendGeneration"},
    MessageRow{MessageType::Notice, MessageKind::EitherWay, "Notice"},
    MessageRow{MessageType::Question, MessageKind::EitherWay, "Question"},
    MessageRow{MessageType::Answer, MessageKind::EitherWay, "Answer"},
    MessageRow{MessageType::ModexRequest, MessageKind::EitherWay, "ModexRequest"},
    MessageRow{MessageType::ModexReply, MessageKind::EitherWay, "ModexReply"},
};

const MessageRow* find_message(std::uint8_t type) {
    const auto* const found = std::find_if(kMessages.begin(), kMessages.end(), [&](const MessageRow& row) {
        return row.type == static_cast<MessageType>(type);
    });
    return found == kMessages.end() ? nullptr : found;
}

constexpr std::array<std::pair<Errc, std::string_view>, 10> kErrorNames{{
    {Errc::System, "system"},
    {Errc::InvalidArgument, "invalid_argument"},
    {Errc::NotFound, "not_found"},
    {Errc::Timeout, "timeout"},
    {Errc::Closed, "closed"},
    {Errc::Refused, "refused"},
    {Errc::StaleGeneration, "stale_generation"},
    {Errc::Mismatch, "mismatch"},
    {Errc::Protocol, "protocol"},
    {Errc::Limit, "limit"},
}};

}  // namespace

MessageKind kind_of(std::uint8_t type) {
    const MessageRow* const row = find_message(type);
    return row == nullptr ? MessageKind::Unknown : row->kind;
}

std::string_view message_name(std::uint8_t type) {
    const MessageRow* const row = find_message(type);
    return row == nullptr ? "unknown" : row->name;
}

void fields(Fields& f, Failure& m) {
    std::string code;
    for (const auto& [errc, name] : kErrorNames) {
        if (errc == m.code) code = name;
    }
    f("code", code);
    // An unknown code of a later minor version is still a Failure; only its name is lost.
    m.code = Failure().code;
    for (const auto& [errc, name] : kErrorNames) {
        if (name == code) m.code = errc;
    }
    cut(m.what, kReportTextBytes);
    f("what", m.what);
}

Result<Failure> decode_failure(Frame frame) { return decode_one<Failure>(std::move(frame)); }

Result<EncodedMessage> encode_message(Failure failure, std::uint32_t request) {
    return encode_one(failure, request);
}

static void fields(Fields& f, Heartbeat& m) { f.usually("received", m.received, std::uint64_t{0}); }
Result<Heartbeat> decode_heartbeat(Frame frame) { return decode_one<Heartbeat>(std::move(frame)); }
Result<EncodedMessage> encode_message(Heartbeat heartbeat) { return encode_one(heartbeat, 0); }

}  // namespace ddprun::rdzv
