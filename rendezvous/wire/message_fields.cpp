#include "rendezvous/wire/message_fields.h"

#include <fmt/format.h>

namespace ddprun::rdzv {

void Fields::operator()(const char* key, int& value) {
    std::int64_t wide = value;
    whole(key, wide, std::numeric_limits<int>::min(), std::numeric_limits<int>::max());
    value = static_cast<int>(wide);
}

void Fields::operator()(const char* key, std::uint32_t& value) {
    std::int64_t wide = value;
    whole(key, wide, 0, std::numeric_limits<std::uint32_t>::max());
    value = static_cast<std::uint32_t>(wide);
}

void Fields::operator()(const char* key, Duration& value) {
    std::int64_t nanoseconds = value.count();
    (*this)(key, nanoseconds);
    if (nanoseconds < 0) return fail(fmt::format("'{}' is negative", key));
    value = Duration(nanoseconds);
}

// ---- writing

void FieldWriter::name(const char* key) {
    json_ += json_.empty() ? "{\"" : ",\"";
    json_ += key;
    json_ += "\":";
}

void FieldWriter::operator()(const char* key, std::string& value) {
    name(key);
    append_json_text(json_, value);
}

void FieldWriter::operator()(const char* key, bool& value) {
    name(key);
    json_ += value ? "true" : "false";
}

void FieldWriter::operator()(const char* key, std::vector<std::string>& values) {
    name(key);
    json_ += to_text(values);
}

void FieldWriter::operator()(const char* key, std::uint64_t& value) {
    name(key);
    json_ += fmt::format_int(value).c_str();
}

void FieldWriter::whole(const char* key, std::int64_t& value, std::int64_t, std::int64_t) {
    name(key);
    json_ += fmt::format_int(value).c_str();
}

Result<EncodedMessage> FieldWriter::seal(MessageType type, std::uint32_t request) && {
    if (!json_.empty()) json_ += '}';
    const auto number = static_cast<std::uint8_t>(type);
    if (json_.size() > kPeerLimits.json_bytes || blob_.size() > kPeerLimits.blob_bytes) {
        return Error{
            Errc::Limit,
            fmt::format("{}: {} + {} bytes are more than a message may have ({} + {})", message_name(number),
                        json_.size(), blob_.size(), kPeerLimits.json_bytes, kPeerLimits.blob_bytes),
            0};
    }
    EncodedMessage encoded;
    encoded.head.reserve(kHeaderBytes + json_.size());
    append_header(encoded.head, number, request, static_cast<std::uint32_t>(json_.size()),
                  static_cast<std::uint32_t>(blob_.size()));
    encoded.head += json_;
    encoded.blob = std::move(blob_);
    return encoded;
}

// ---- reading

FieldReader::FieldReader(Frame frame) : frame_(std::move(frame)) {
    if (frame_.json.empty()) return;  // no fields
    Result<Json> object = parse_json(frame_.json);
    if (!object) fail("not valid JSON: " + object.error().what);
    else if (!object->is_object()) fail("not a JSON object");
    else object_ = *std::move(object);
}

Status FieldReader::end() {
    if (!frame_.blob.empty()) fail("carries a blob, but has none");
    return error_ ? Status(*error_) : Status();
}

void FieldReader::fail(std::string_view what) {
    if (!error_) error_ = Error{Errc::Protocol, fmt::format("{}: {}", message_name(frame_.type), what), 0};
}

template <class T>
std::optional<T> FieldReader::read(const char* key) {
    const auto found = object_.find(key);
    const Result<T> value = found == object_.end() ? Error::protocol("is missing") : as<T>(*found);
    if (value) return *value;
    fail(fmt::format("'{}' {}", key, value.error().what));
    return std::nullopt;
}

void FieldReader::operator()(const char* key, std::string& value) {
    if (std::optional<std::string> text = read<std::string>(key)) value = *std::move(text);
}

void FieldReader::operator()(const char* key, bool& value) { value = read<bool>(key).value_or(value); }

void FieldReader::operator()(const char* key, std::vector<std::string>& values) {
    const Json& found = member(object_, key);
    if (!found.is_array()) {
        return fail(object_.contains(key) ? fmt::format("'{}' is {}, expected a list", key, found.type_name())
                                          : fmt::format("'{}' is missing", key));
    }
    values.clear();
    for (const Json& element : elements(found)) {
        const Result<std::string> text = as<std::string>(element);
        if (!text) return fail(fmt::format("'{}' {}", key, text.error().what));
        values.push_back(*text);
    }
}

void FieldReader::operator()(const char* key, std::uint64_t& value) {
    value = read<std::uint64_t>(key).value_or(value);
}

void FieldReader::whole(const char* key, std::int64_t& value, std::int64_t least, std::int64_t most) {
    const std::optional<std::int64_t> number = read<std::int64_t>(key);
    if (!number) return;
    if (*number >= least && *number <= most) value = *number;
    else fail(fmt::format("'{}' is out of range", key));
}

void cut(std::string& text, std::size_t max_bytes) {
    if (text.size() > max_bytes) text.resize(max_bytes);
}

}  // namespace ddprun::rdzv
