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

/// One message as it crosses the wire, not yet understood. PROTOCOL.md has the bytes.
struct Frame {
    std::uint8_t type = 0;
    std::uint32_t request = 0;  ///< chosen by the asking side, echoed by the answer; 0 where nothing is asked
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

    /// Holds for frames whose header has not been looked at yet.
    void set_limits(FrameLimits limits) { limits_ = limits; }
    void feed(std::string_view bytes);
    /// The next whole frame; nullopt: feed more. Lengths are judged as soon as the header is there.
    /// Error: Protocol (not our magic, another major version, a reserved bit), Limit (a length beyond the
    /// limits). The stream is then lost: every further call gives the same error.
    Result<std::optional<Frame>> next();
    /// Bytes of a frame that is not complete yet. Not 0 at the end of the stream: it was cut in mid-frame.
    [[nodiscard]] std::size_t pending() const { return buffer_.size() - offset_; }

    /// The first byte already was not ours: nobody to explain anything to.
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
