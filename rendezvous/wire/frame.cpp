#include "rendezvous/wire/frame.h"

#include <fmt/core.h>

#include <algorithm>

namespace ddprun::rdzv {
namespace {

constexpr std::size_t kMajorAt = 4;
constexpr std::size_t kTypeAt = 5;
constexpr std::size_t kReservedAt = 6;
constexpr std::size_t kRequestAt = 8;
constexpr std::size_t kJsonBytesAt = 12;
constexpr std::size_t kBlobBytesAt = 16;

std::uint8_t byte_at(std::string_view bytes, std::size_t at) { return static_cast<std::uint8_t>(bytes[at]); }

std::uint32_t big_endian_at(std::string_view bytes, std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4; ++i) value = value << 8 | byte_at(bytes, at + i);
    return value;
}

void put_big_endian(char* out, std::uint32_t value) {
    for (int i = 3; i >= 0; --i, value >>= 8) out[i] = static_cast<char>(value & 0xff);
}

}  // namespace

void append_header(std::string& out, std::uint8_t type, std::uint32_t request, std::uint32_t json_bytes,
                   std::uint32_t blob_bytes) {
    char header[kHeaderBytes] = {
        'D', 'D', 'P', 'R', static_cast<char>(kMajorVersion), static_cast<char>(type)};
    put_big_endian(header + kRequestAt, request);
    put_big_endian(header + kJsonBytesAt, json_bytes);
    put_big_endian(header + kBlobBytesAt, blob_bytes);
    out.append(header, kHeaderBytes);
}

std::string encode(const Frame& frame) {
    std::string out;
    out.reserve(kHeaderBytes + frame.json.size() + frame.blob.size());
    append_header(out, frame.type, frame.request, static_cast<std::uint32_t>(frame.json.size()),
                  static_cast<std::uint32_t>(frame.blob.size()));
    return out.append(frame.json).append(frame.blob);
}

void FrameDecoder::feed(std::string_view bytes) {
    if (broken_) return;
    if (offset_ == buffer_.size()) {
        buffer_.clear();
        offset_ = 0;
    } else if (offset_ > 65536 && offset_ > buffer_.size() / 2) {
        buffer_.erase(0, offset_);
        offset_ = 0;
    }
    buffer_.append(bytes);
}

/// Checks the fixed first bytes as far as they have come, so that one byte shows another protocol.
std::optional<Error> FrameDecoder::check_start(std::string_view bytes) {
    const std::string_view magic = bytes.substr(0, kMagic.size());
    if (magic != kMagic.substr(0, magic.size())) {
        is_foreign_ = magic[0] != kMagic[0];
        return Error::protocol(
            fmt::format("the peer does not speak ddprun's protocol (first byte {:#04x})", byte_at(magic, 0)));
    }
    if (bytes.size() > kMajorAt && byte_at(bytes, kMajorAt) != kMajorVersion) {
        return Error::protocol(fmt::format("the peer speaks version {} of the protocol, this is version {}",
                                           byte_at(bytes, kMajorAt), kMajorVersion));
    }
    for (std::size_t at = kReservedAt; at < std::min(bytes.size(), kRequestAt); ++at) {
        if (bytes[at] != 0) return Error::protocol("reserved bytes of a header are not zero");
    }
    return std::nullopt;
}

Result<std::optional<Frame>> FrameDecoder::next() {
    if (broken_) return *broken_;
    const std::string_view bytes = std::string_view(buffer_).substr(offset_);
    broken_ = check_start(bytes);
    if (broken_) return *broken_;
    if (bytes.size() < kHeaderBytes) return std::optional<Frame>();
    const std::uint32_t json_bytes = big_endian_at(bytes, kJsonBytesAt);
    const std::uint32_t blob_bytes = big_endian_at(bytes, kBlobBytesAt);
    if (json_bytes > limits_.json_bytes || blob_bytes > limits_.blob_bytes) {
        broken_ = Error{Errc::Limit,
                        fmt::format("a message of type {} announces {} + {} bytes, allowed are {} + {}",
                                    byte_at(bytes, kTypeAt), json_bytes, blob_bytes, limits_.json_bytes,
                                    limits_.blob_bytes),
                        0};
        return *broken_;
    }
    const std::size_t whole = kHeaderBytes + json_bytes + blob_bytes;
    if (bytes.size() < whole) {
        buffer_.reserve(offset_ + whole);
        return std::optional<Frame>();
    }
    Frame frame{byte_at(bytes, kTypeAt), big_endian_at(bytes, kRequestAt),
                std::string(bytes.substr(kHeaderBytes, json_bytes)),
                std::string(bytes.substr(kHeaderBytes + json_bytes, blob_bytes))};
    offset_ += whole;
    return std::optional<Frame>(std::move(frame));
}

}  // namespace ddprun::rdzv
