#include "rendezvous/wire/message.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "rendezvous/wire/agent_message.h"
#include "rendezvous/wire/handshake.h"
#include "rendezvous/wire/message_codec.h"
#include "rendezvous/wire/store_message.h"

namespace ddprun::rdzv {
namespace {

struct MessageRow {
    MessageKind kind = MessageKind::Unknown;
    std::string_view name = "unknown";
};

/// All messages, by their numbers.
struct MessageTable {
    std::array<MessageRow, 256> rows{};

    template <class M>
    constexpr void add(MessageKind kind, const M*) {
        MessageRow& row = rows[M::kType.number];
        const bool is_either_way = row.kind == MessageKind::FromAgent && kind == MessageKind::ToAgent;
        row = {is_either_way ? MessageKind::EitherWay : kind, M::kType.name};
    }
    template <class... M>
    constexpr void add(MessageKind kind, const std::variant<M...>*) {
        (add(kind, static_cast<const M*>(nullptr)), ...);
    }
    template <class M>
    constexpr void add(MessageKind kind) {
        add(kind, static_cast<const M*>(nullptr));
    }

    constexpr MessageTable() {
        add<HandshakeMessage>(MessageKind::Handshake);
        add<StoreOp>(MessageKind::StoreRequest);
        add<StoreReply>(MessageKind::StoreReply);
        add<Failure>(MessageKind::Failure);
        add<Heartbeat>(MessageKind::Heartbeat);
        add<ClientGone>(MessageKind::ClientGone);
        add<AgentHello>(MessageKind::AgentHello);
        add<JobMoved>(MessageKind::JobMoved);
        add<FromAgent>(MessageKind::FromAgent);
        add<ToAgent>(MessageKind::ToAgent);
    }
};
constexpr MessageTable kMessages;

/// In the order of Errc.
constexpr std::array<std::string_view, 10> kErrorNames{
    "system",  "invalid_argument", "not_found", "timeout",  "closed",
    "refused", "stale_generation", "mismatch",  "protocol", "limit",
};

}  // namespace

MessageKind kind_of(std::uint8_t type) { return kMessages.rows[type].kind; }

std::string_view message_name(std::uint8_t type) { return kMessages.rows[type].name; }

void cut(std::string& text, std::size_t max_bytes) {
    if (text.size() > max_bytes) text.resize(max_bytes);
}

Result<EncodedMessage> seal(JsonWriter writer, const MessageType& type, std::uint32_t request) {
    EncodedMessage encoded;
    encoded.blob = writer.take_blob();
    std::string json = std::move(writer).text();
    if (json == "{}") json.clear();
    const std::size_t blob_bytes = encoded.blob.size();
    if (json.size() > kPeerLimits.json_bytes || blob_bytes > kPeerLimits.blob_bytes) {
        return Error{Errc::Limit,
                     fmt::format("{}: {} + {} bytes are more than a message may have ({} + {})", type.name,
                                 json.size(), blob_bytes, kPeerLimits.json_bytes, kPeerLimits.blob_bytes),
                     0};
    }
    encoded.head.reserve(kHeaderBytes + json.size());
    append_header(encoded.head, type.number, request, static_cast<std::uint32_t>(json.size()),
                  static_cast<std::uint32_t>(blob_bytes));
    encoded.head += json;
    return encoded;
}

void describe(Visitor& v, Failure& m) {
    std::string code(kErrorNames[static_cast<std::size_t>(m.code)]);
    v("code", code);
    // An unknown code of a later minor version is still a Failure; only its name is lost.
    const auto* const known = std::find(kErrorNames.begin(), kErrorNames.end(), code);
    m.code = known == kErrorNames.end() ? Failure().code : static_cast<Errc>(known - kErrorNames.begin());
    cut(m.what, kReportTextBytes);
    v("what", m.what);
}

Result<Failure> decode_failure(Frame frame) { return decode_one<Failure>(std::move(frame)); }

Result<EncodedMessage> encode_message(Failure failure, std::uint32_t request) {
    return encode_one(failure, request);
}

static void describe(Visitor& v, Heartbeat& m) { v.usually("received", m.received); }
Result<Heartbeat> decode_heartbeat(Frame frame) { return decode_one<Heartbeat>(std::move(frame)); }
Result<EncodedMessage> encode_message(Heartbeat heartbeat) { return encode_one(heartbeat, 0); }

}  // namespace ddprun::rdzv
