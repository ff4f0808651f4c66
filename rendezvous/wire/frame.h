#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/result.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun::rdzv {

inline constexpr std::string_view kMagic = "DDPR";
inline constexpr std::uint8_t kMajorVersion = 1;
inline constexpr std::size_t kHeaderBytes = 20;

/// One message as it crosses the wire, not yet decoded. PROTOCOL.md has the bytes.
struct Frame {
    std::uint8_t type = 0;
    std::uint32_t request = 0;  ///< chosen by the asking side and repeated in the answer; 0: no request
    std::string json;
    std::string blob;
    bool operator==(const Frame&) const = default;
};

/// Appends the header of a frame whose JSON and blob the caller appends next.
void append_header(std::string& out, std::uint8_t type, std::uint32_t request, std::uint32_t json_bytes,
                   std::uint32_t blob_bytes);
std::string encode(const Frame& frame);

/// Cuts a byte stream, fed in pieces of any size, into frames. Pure; holds at most one frame and one piece.
class FrameDecoder {
  public:
    explicit FrameDecoder(FrameLimits limits) : limits_(limits) {}

    /// Sets the limits for frames whose header has not been read yet.
    void set_limits(FrameLimits limits) { limits_ = limits; }
    void feed(std::string_view bytes);
    /// The next whole frame; nullopt: feed more. Lengths are checked as soon as the header is there.
    /// Error: Protocol (not our magic, another major version, a reserved bit), Limit (a length beyond the
    /// limits). After an error every call returns the same error.
    Result<std::optional<Frame>> next();
    /// Bytes of a frame that is not complete yet.
    [[nodiscard]] std::size_t pending() const { return buffer_.size() - offset_; }

    /// True when the first byte was not ours: the peer would not understand a Failure.
    [[nodiscard]] bool is_foreign() const { return is_foreign_; }

  private:
    std::optional<Error> check_start(std::string_view bytes);

    FrameLimits limits_;
    std::string buffer_;
    std::size_t offset_ = 0;  ///< of the first byte not yet given out
    std::optional<Error> broken_;
    bool is_foreign_ = false;
};

}  // namespace ddprun::rdzv
