#include "rendezvous/wire/store_message.h"

#include <fmt/core.h>

#include "rendezvous/wire/message_codec.h"

namespace ddprun::rdzv {

// The members of each operation; the common members stand before them.
namespace store_op {

static void describe(Visitor& v, Set& m) {
    v("key", m.key);
    v.blob(m.value);
}
static void describe(Visitor& v, Get& m) { v("key", m.key); }
static void describe(Visitor& v, TryGet& m) { v("key", m.key); }
static void describe(Visitor& v, Add& m) {
    v("key", m.key);
    v("delta", m.delta);
}
/// The blob of CompareSet holds both values, the expected one first.
static void describe(Visitor& v, CompareSet& m) {
    v("key", m.key);
    std::optional<std::uint32_t> expected_bytes;
    Blob both = m.desired;
    if (m.expected) {
        expected_bytes = static_cast<std::uint32_t>(m.expected->size());
        both = Blob(m.expected->append(m.desired.view()));
    }
    v("expected_bytes", expected_bytes);
    v.blob(both);
    if (expected_bytes > both.size()) return v.fail("'expected_bytes' is beyond the blob");
    m.desired = both;
    if (!expected_bytes) return;
    m.expected = both.view().substr(0, *expected_bytes);
    m.desired = Blob(std::string(both.view().substr(*expected_bytes)));
}
static void describe(Visitor& v, Erase& m) { v("key", m.key); }
static void describe(Visitor& v, Wait& m) { v("keys", m.keys); }
static void describe(Visitor& v, Barrier& m) {
    v("name", m.name);
    v("participants", m.participants);
}

}  // namespace store_op

static void describe(Visitor&, Done&) {}
static void describe(Visitor&, Absent&) {}
static void describe(Visitor& v, Value& m) { v.blob(m.value); }
static void describe(Visitor& v, Sum& m) { v("sum", m.sum); }
static void describe(Visitor& v, Exchanged& m) {
    v("swapped", m.swapped);
    v.blob(m.value);
}
static void describe(Visitor& v, Erased& m) { v("existed", m.existed); }

static void describe_common(Visitor& v, StoreRequest& m) {
    v("generation", m.generation);
    v("timeout_ns", m.timeout);
    v.usually("client", m.client);
    v.usually("waited_ns", m.waited);
}

Result<StoreRequest> decode_store_request(Frame frame) {
    const std::uint8_t type = frame.type;
    return decode_by<StoreRequest>(std::move(frame), [type](JsonReader& reader, StoreRequest& request) {
        describe_common(reader, request);
        read_one_of(request.op, type, reader);
    });
}

Result<EncodedMessage> encode_message(StoreRequest request, std::uint32_t number) {
    JsonWriter writer;
    describe_common(writer, request);
    return std::visit(
        [&](auto& op) {
            describe(writer, op);
            return seal(std::move(writer), op.kType, number);
        },
        request.op);
}

static void describe(Visitor& v, ClientGone& m) { v("client", m.client); }
Result<ClientGone> decode_client_gone(Frame frame) { return decode_one<ClientGone>(std::move(frame)); }
Result<EncodedMessage> encode_message(ClientGone gone) { return encode_one(gone, 0); }

Result<StoreReply> decode_store_reply(Frame frame) {
    const MessageKind kind = kind_of(frame.type);
    if (kind != MessageKind::StoreReply && kind != MessageKind::Failure) {
        return Error{Errc::Protocol, fmt::format("the server answered {}", message_name(frame.type)), 0};
    }
    return decode_one_of<StoreReply>(std::move(frame));
}

Result<EncodedMessage> encode_message(StoreReply reply, std::uint32_t number) {
    return std::visit([&](auto& one) { return encode_one(one, number); }, reply);
}

namespace {

/// Length of the UTF-8 sequence that `text` starts with, 0 when it is none (RFC 3629).
std::size_t utf8_sequence(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return 1;
    const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
    for (std::size_t i = 1; i < length; ++i) {
        if ((byte(i) & 0xc0) != 0x80) return 0;
    }
    const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
    const bool no_character = (lead == 0xed && byte(1) > 0x9f) || (lead == 0xf4 && byte(1) > 0x8f);
    return overlong || no_character ? 0 : length;
}

bool is_utf8(std::string_view text) {
    while (!text.empty()) {
        const std::size_t length = utf8_sequence(text);
        if (length == 0) return false;
        text.remove_prefix(length);
    }
    return true;
}

}  // namespace

Status check_key(std::string_view key, std::size_t max_bytes) {
    if (key.empty()) return Error{Errc::InvalidArgument, "a key of the store is not empty", 0};
    if (key.size() > max_bytes) {
        return Error{Errc::InvalidArgument,
                     fmt::format("a key of {} bytes is longer than {}", key.size(), max_bytes), 0};
    }
    if (!is_utf8(key)) return Error{Errc::InvalidArgument, "a key of the store is UTF-8 text", 0};
    return {};
}

}  // namespace ddprun::rdzv
