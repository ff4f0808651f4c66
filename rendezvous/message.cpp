#include "rendezvous/message.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "rendezvous/message_fields.h"

namespace ddprun::rdzv {
namespace {

template <class T>
constexpr std::uint8_t wire_type() {
    return static_cast<std::uint8_t>(kTag<T>.first);
}

// ---- writing

bool is_plain(std::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
}

/// Writes the flat objects of store requests and answers without building them first: they are the only
/// messages whose cost a user can feel.
class FlatWriter {
  public:
    FlatWriter() { text_ = "{"; }
    void operator()(const char* key, const std::string& value) {
        name(key);
        if (is_plain(value)) fmt::format_to(std::back_inserter(text_), "\"{}\"", value);
        else text_ += Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    void operator()(const char* key, const std::vector<std::string>& values) {
        name(key);
        text_ += Json(values).dump(-1, ' ', false, Json::error_handler_t::replace);
    }
    void operator()(const char* key, bool value) {
        name(key);
        text_ += value ? "true" : "false";
    }
    template <std::integral T>
    void operator()(const char* key, T value) {
        name(key);
        text_ += fmt::format_int(value).c_str();
    }
    std::string text() && { return std::move(text_ += "}"); }

  private:
    void name(const char* key) {
        fmt::format_to(std::back_inserter(text_), "{}\"{}\":", text_.size() > 1 ? "," : "", key);
    }
    std::string text_;
};

/// A message on its way out.
struct Outgoing {
    std::uint8_t type = 0;
    std::string json;
    Blob blob;
};

template <class M>
Outgoing outgoing(const M& message) {
    FieldWriter writer;
    fields(writer, message);
    return {wire_type<M>(), writer.text(), {}};
}
Outgoing outgoing(const Unknown& message) { return {message.type, "", {}}; }
Outgoing outgoing(const Heartbeat&) { return {wire_type<Heartbeat>(), "", {}}; }
Outgoing outgoing(const Done&) { return {wire_type<Done>(), "", {}}; }
Outgoing outgoing(const Absent&) { return {wire_type<Absent>(), "", {}}; }
Outgoing outgoing(const Value& message) { return {wire_type<Value>(), "", message.value}; }

template <class M>
Outgoing flat(const M& message, Blob blob = {}) {
    FlatWriter writer;
    fields(writer, message);
    return {wire_type<M>(), std::move(writer).text(), std::move(blob)};
}
Outgoing outgoing(const Sum& message) { return flat(message); }
Outgoing outgoing(const Erased& message) { return flat(message); }
Outgoing outgoing(const Exchanged& message) { return flat(message, message.value); }

Outgoing outgoing(const Answer& message) { return flat(message, message.value); }

Outgoing outgoing(const Failure& message) {
    const auto* const found = std::find_if(kErrorNames.begin(), kErrorNames.end(),
                                           [&](const auto& entry) { return entry.first == message.code; });
    FieldWriter writer;
    writer("code", std::string(found->second));
    writer("what", message.what.substr(0, kReportTextBytes));
    return {wire_type<Failure>(), writer.text(), {}};
}

/// What follows the operation's own fields, and its blob.
template <class Op>
Blob finish(FlatWriter&, const Op&) {
    return {};
}
Blob finish(FlatWriter&, const store_op::Set& op) { return op.value; }
Blob finish(FlatWriter& writer, const store_op::CompareSet& op) {
    if (!op.expected) return op.desired;
    writer("expected_bytes", op.expected->size());
    return Blob(*op.expected + std::string(op.desired.view()));
}

Outgoing outgoing(const StoreRequest& request) {
    FlatWriter writer;
    writer("generation", request.generation);
    if (request.timeout) writer("timeout_ns", request.timeout->count());
    return std::visit(
        [&](const auto& op) {
            fields(writer, op);
            Blob blob = finish(writer, op);
            return Outgoing{wire_type<std::remove_cvref_t<decltype(op)>>(), std::move(writer).text(),
                            std::move(blob)};
        },
        request.op);
}

void cut(std::string& text, std::size_t max_bytes) {
    if (text.size() > max_bytes) text.resize(max_bytes);
}

Outgoing outgoing(const WorkerExited& message) {
    WorkerExited brief = message;
    std::vector<std::string>& lines = brief.last_stderr;
    if (lines.size() > kReportLines) lines.erase(lines.begin(), lines.end() - kReportLines);
    for (std::string& line : lines) cut(line, kReportLineBytes);
    cut(brief.error_file, kReportErrorBytes);
    for (std::string* text : {&brief.exec_failure, &brief.meaning, &brief.last_collective})
        cut(*text, kReportTextBytes);
    FieldWriter writer;
    fields(writer, brief);
    return {wire_type<WorkerExited>(), writer.text(), {}};
}

// ---- reading

/// The tables are the only place that knows all types: a message that is missing in one of them does not
/// decode.
template <class T>
Result<Message> read(Frame&& frame) {
    FieldReader reader(kTag<T>.second, frame.json);
    T message{};
    fields(reader, message);
    if (!frame.blob.empty()) reader.fail("carries a blob, but has none");
    if (reader.error()) return *reader.error();
    return Message(std::move(message));
}

/// As read<T>, for answers whose value is the blob.
template <class T>
Result<Message> read_value(Frame&& frame) {
    FieldReader reader(kTag<T>.second, frame.json);
    T message{};
    fields(reader, message);
    if (reader.error()) return *reader.error();
    message.value = Blob(std::move(frame.blob));
    return Message(std::move(message));
}

Result<Message> read_failure(const Frame& frame) {
    FieldReader reader("Failure", frame.json);
    std::string code;
    Failure message;
    reader("code", code);
    reader("what", message.what);
    if (reader.error()) return *reader.error();
    // A code of a later minor version stays a failure: only what it is called is lost.
    for (const auto& [errc, name] : kErrorNames) {
        if (name == code) message.code = errc;
    }
    return Message(std::move(message));
}

template <class Op>
void take_blob(FieldReader& reader, Op&, std::string&& blob) {
    if (!blob.empty()) reader.fail("carries a blob, but has none");
}
void take_blob(FieldReader&, store_op::Set& op, std::string&& blob) { op.value = Blob(std::move(blob)); }
void take_blob(FieldReader& reader, store_op::CompareSet& op, std::string&& blob) {
    std::optional<std::uint32_t> expected_bytes;
    reader("expected_bytes", expected_bytes);
    if (expected_bytes && *expected_bytes > blob.size())
        return reader.fail("'expected_bytes' is beyond the blob");
    if (expected_bytes) {
        op.expected = blob.substr(0, *expected_bytes);
        blob.erase(0, *expected_bytes);
    }
    op.desired = Blob(std::move(blob));
}

template <class Op>
Result<Message> read_request(Frame&& frame) {
    FieldReader reader(kTag<Op>.second, frame.json);
    StoreRequest request;
    Op op{};
    reader("generation", request.generation);
    reader("timeout_ns", request.timeout);
    fields(reader, op);
    take_blob(reader, op, std::move(frame.blob));
    if (reader.error()) return *reader.error();
    request.op = std::move(op);
    return Message(std::move(request));
}

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

std::string_view message_name(const Message& message) {
    return std::visit(
        [](const auto& m) -> std::string_view {
            using M = std::remove_cvref_t<decltype(m)>;
            if constexpr (std::same_as<M, Unknown>) return "unknown";
            else if constexpr (std::same_as<M, StoreRequest>)
                return std::visit(
                    [](const auto& op) { return kTag<std::remove_cvref_t<decltype(op)>>.second; }, m.op);
            else return kTag<M>.second;
        },
        message);
}

Result<Message> decode(Frame frame) {
    switch (static_cast<Type>(frame.type)) {
        case Type::Hello:
            return read<Hello>(std::move(frame));
        case Type::Challenge:
            return read<Challenge>(std::move(frame));
        case Type::Proof:
            return read<Proof>(std::move(frame));
        case Type::Welcome:
            return read<Welcome>(std::move(frame));
        case Type::Failure:
            return read_failure(frame);
        case Type::Heartbeat:
            return read<Heartbeat>(std::move(frame));
        case Type::Set:
            return read_request<store_op::Set>(std::move(frame));
        case Type::Get:
            return read_request<store_op::Get>(std::move(frame));
        case Type::TryGet:
            return read_request<store_op::TryGet>(std::move(frame));
        case Type::Add:
            return read_request<store_op::Add>(std::move(frame));
        case Type::CompareSet:
            return read_request<store_op::CompareSet>(std::move(frame));
        case Type::Erase:
            return read_request<store_op::Erase>(std::move(frame));
        case Type::Wait:
            return read_request<store_op::Wait>(std::move(frame));
        case Type::Barrier:
            return read_request<store_op::Barrier>(std::move(frame));
        case Type::Done:
            return read<Done>(std::move(frame));
        case Type::Value:
            return read_value<Value>(std::move(frame));
        case Type::Absent:
            return read<Absent>(std::move(frame));
        case Type::Sum:
            return read<Sum>(std::move(frame));
        case Type::Exchanged:
            return read_value<Exchanged>(std::move(frame));
        case Type::Erased:
            return read<Erased>(std::move(frame));
        case Type::AgentHello:
            return read<AgentHello>(std::move(frame));
        case Type::WorkersStarted:
            return read<WorkersStarted>(std::move(frame));
        case Type::WorkerExited:
            return read<WorkerExited>(std::move(frame));
        case Type::GenerationDrained:
            return read<GenerationDrained>(std::move(frame));
        case Type::StartGeneration:
            return read<StartGeneration>(std::move(frame));
        case Type::StopGeneration:
            return read<StopGeneration>(std::move(frame));
        case Type::Shutdown:
            return read<Shutdown>(std::move(frame));
        case Type::Notice:
            return read<Notice>(std::move(frame));
        case Type::Question:
            return read<Question>(std::move(frame));
        case Type::Answer:
            return read_value<Answer>(std::move(frame));
    }
    return Message(Unknown{frame.type});
}

Result<EncodedMessage> encode_parted(const Message& message, std::uint32_t request) {
    Outgoing out = std::visit([](const auto& m) { return outgoing(m); }, message);
    if (out.json.size() > kPeerLimits.json_bytes || out.blob.size() > kPeerLimits.blob_bytes) {
        return Error{
            Errc::Limit,
            fmt::format("{}: {} + {} bytes are more than a message may have ({} + {})", message_name(message),
                        out.json.size(), out.blob.size(), kPeerLimits.json_bytes, kPeerLimits.blob_bytes),
            0};
    }
    EncodedMessage encoded;
    encoded.head.reserve(kHeaderBytes + out.json.size());
    append_header(encoded.head, out.type, request, static_cast<std::uint32_t>(out.json.size()),
                  static_cast<std::uint32_t>(out.blob.size()));
    encoded.head += out.json;
    encoded.blob = std::move(out.blob);
    return encoded;
}

Result<std::string> encode(const Message& message, std::uint32_t request) {
    Result<EncodedMessage> parts = encode_parted(message, request);
    if (!parts) return parts.error();
    return std::move(parts->head).append(parts->blob.view());
}

Message to_message(StoreReply reply) {
    return std::visit([](auto&& answer) { return Message(std::forward<decltype(answer)>(answer)); },
                      std::move(reply));
}

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
