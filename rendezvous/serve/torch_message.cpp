#include "rendezvous/serve/torch_message.h"

#include <fmt/core.h>

#include <array>
#include <cstring>

namespace ddprun::rdzv {
namespace {

constexpr std::uint32_t kGreeting = 0x3C85F7CE;

/// The fields of a request: k a key, v a value, i a number of 8 bytes, u one of 4. Where several items may
/// come, their number comes first.
struct Shape {
    std::string_view item;
    bool is_counted = false;
};
constexpr std::array<Shape, 19> kShapes{{
    {"u"},       {"kv"},       {"kvv"}, {"k"}, {"ki"}, {"k", true}, {"k", true}, {""}, {"k"},  {"kv"},
    {"k", true}, {"kv", true}, {""},    {"u"}, {"kv"}, {"k"},       {"k"},       {""}, {"ki"},
}};
static_assert(kShapes.size() == static_cast<std::size_t>(TorchOp::Barrier) + 1);

const Shape& shape_of(TorchOp op) { return kShapes[static_cast<std::size_t>(op)]; }

template <class T>
void append_raw(std::string& out, T number) {
    out.append(reinterpret_cast<const char*>(&number), sizeof number);
}

}  // namespace

void append_number(std::string& out, std::int64_t number) { append_raw(out, number); }

void append_value(std::string& out, std::string_view value) {
    append_raw<std::uint64_t>(out, value.size());
    out += value;
}

std::string encode_torch_greeting() { return encode_torch({TorchOp::Validate, {}, {}, kGreeting}); }

std::string encode_torch(const TorchRequest& request) {
    const Shape& shape = shape_of(request.op);
    std::string out(1, static_cast<char>(request.op));
    const std::size_t items = shape.is_counted ? request.keys.size() : 1;
    if (shape.is_counted) append_raw<std::uint64_t>(out, items);
    std::size_t values = 0;
    for (std::size_t i = 0; i < items; ++i) {
        for (const char field : shape.item) {
            if (field == 'k') append_value(out, request.keys[i]);
            else if (field == 'v') append_value(out, request.values[values++]);
            else if (field == 'i') append_number(out, request.number);
            else append_raw(out, static_cast<std::uint32_t>(request.number));
        }
    }
    return out;
}

void TorchParser::feed(std::string_view bytes) {
    if (broken_) return;
    buffer_.erase(0, offset_);
    offset_ = 0;
    buffer_ += bytes;
}

Result<std::optional<TorchRequest>> TorchParser::next() {
    if (broken_) return *broken_;
    const Result<bool> whole = read_request();
    if (!whole) {
        broken_ = whole.error();
        buffer_.clear();
        offset_ = 0;
        return *broken_;
    }
    if (!*whole) return std::optional<TorchRequest>();
    return std::exchange(open_, std::nullopt);
}

/// False, here and below: more bytes are needed. Fields already read are kept.
bool TorchParser::read_greeting() {
    std::uint32_t word = 0;
    const bool may_be_greeting = available() > 0 && buffer_[offset_] == '\0';
    if (available() == 0 || (may_be_greeting && available() < 1 + sizeof word)) return false;
    if (may_be_greeting) std::memcpy(&word, buffer_.data() + offset_ + 1, sizeof word);
    dialect_ = word == kGreeting ? Dialect::Greeted : Dialect::Ungreeted;
    if (dialect_ == Dialect::Greeted) offset_ += 1 + sizeof word;
    return true;
}

Result<bool> TorchParser::begin_request() {
    if (dialect_ == Dialect::Unknown && !read_greeting()) return false;
    if (available() == 0) return false;
    const bool is_greeted = dialect_ == Dialect::Greeted;
    const int byte = static_cast<unsigned char>(buffer_[offset_]);
    const int op = is_greeted ? byte : byte + 1;
    const int last = static_cast<int>(is_greeted ? TorchOp::Barrier : TorchOp::CancelWait);
    if (op > last)
        return Error{Errc::Protocol, fmt::format("request {} of a TCPStore client is not known here", byte),
                     0};
    if (op == 0) return Error{Errc::Protocol, "a second greeting", 0};
    ++offset_;
    open_ = TorchRequest{static_cast<TorchOp>(op), {}, {}, 0};
    const Shape& shape = shape_of(open_->op);
    items_ = shape.is_counted ? std::nullopt : std::optional<std::uint64_t>(1);
    fields_ = shape.item;
    open_bytes_ = 0;
    return true;
}

Result<bool> TorchParser::read_request() {
    if (!open_) {
        const Result<bool> begun = begin_request();
        if (!begun || !*begun) return begun;
    }
    if (!items_) {
        items_ = read_number(8);
        if (!items_) return false;
        if (*items_ > limits_.keys_per_request) {
            return Error{
                Errc::Limit,
                fmt::format("{} keys in one request, allowed are {}", *items_, limits_.keys_per_request), 0};
        }
    }
    for (; *items_ > 0; --*items_, fields_ = shape_of(open_->op).item) {
        while (!fields_.empty()) {
            const Result<bool> read = read_field(fields_.front());
            if (!read || !*read) return read;
            fields_.erase(0, 1);
        }
    }
    return true;
}

Result<bool> TorchParser::read_field(char field) {
    if (field == 'k') return read_text(open_->keys, limits_.key_bytes, "key");
    if (field == 'v') return read_text(open_->values, limits_.value_bytes, "value");
    const std::optional<std::uint64_t> number = read_number(field == 'i' ? 8 : 4);
    if (!number) return false;
    open_->number = static_cast<std::int64_t>(*number);
    return true;
}

Result<bool> TorchParser::read_text(std::vector<std::string>& to, std::size_t most, std::string_view what) {
    const std::size_t start = offset_;
    const std::optional<std::uint64_t> length = read_number(8);
    if (!length) return false;
    if (*length > most)
        return Error{Errc::Limit, fmt::format("a {} of {} bytes, allowed are {}", what, *length, most), 0};
    if (open_bytes_ + *length > limits_.request_bytes) {
        return Error{Errc::Limit, fmt::format("a request of more than {} bytes", limits_.request_bytes), 0};
    }
    if (available() < *length) {
        offset_ = start;  // the length is read again when there is more
        return false;
    }
    to.push_back(buffer_.substr(offset_, *length));
    offset_ += *length;
    open_bytes_ += *length;
    return true;
}

std::optional<std::uint64_t> TorchParser::read_number(std::size_t bytes) {
    if (available() < bytes) return std::nullopt;
    std::uint64_t number = 0;
    std::memcpy(&number, buffer_.data() + offset_, bytes);
    offset_ += bytes;
    return number;
}

}  // namespace ddprun::rdzv
