#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"

/// What clients of PyTorch's TCPStore say (the protocol of its libuv server), as values.
///
/// A request is one byte and what belongs to it; nothing frames it. Since PyTorch 2.2 a client begins with a
/// greeting, the request 0; before, it did not, and counted its requests from SET = 0. Numbers are in the
/// byte order of the machine, which is that of the clients: little-endian. PROTOCOL.md has the table.
namespace ddprun::rdzv {

/// Everything such a client can make grow. The first three are PyTorch's own.
struct TorchLimits {
    std::size_t key_bytes = 8U << 10;
    std::size_t value_bytes = 8U << 20;
    std::size_t keys_per_request = 128U << 10;
    std::size_t request_bytes = 64U << 20;  ///< of all keys and values of one request; and of one answer
    std::size_t output_bytes = 80U << 20;   ///< of answers that a client has not read yet
    std::size_t keys = 1U << 20;            ///< in the store, queued values among them
    std::size_t total_bytes = std::size_t{1} << 30;  ///< keys, values and queued values
    std::size_t waiting_bytes = 512U << 20;          ///< of the names that all clients wait for
    std::size_t clients = 32768;
};

/// A request's first byte.
enum class TorchOp : std::uint8_t {
    Validate,
    Set,
    CompareSet,
    Get,
    Add,
    Check,
    Wait,
    CountKeys,
    DeleteKey,
    Append,
    MultiGet,
    MultiSet,
    CancelWait,
    Ping,
    QueuePush,
    QueuePop,
    QueueLength,
    ListKeys,
    Barrier,
};
/// By what a server tells such a client from ours: 0 (a greeting, or a SET before PyTorch 2.2) to CANCEL_WAIT
/// of then.
constexpr bool may_be_torch(char first_byte) {
    return static_cast<unsigned char>(first_byte) < static_cast<unsigned char>(TorchOp::CancelWait);
}

struct TorchRequest {
    TorchOp op = TorchOp::Ping;
    std::vector<std::string> keys;
    std::vector<std::string> values;  ///< CompareSet: the expected one, then the desired one
    std::int64_t number = 0;          ///< Add: what is added; Barrier: how many; Ping: the nonce
    bool operator==(const TorchRequest&) const = default;
};

/// The bytes of a request, as a client sends it.
std::string encode_torch(const TorchRequest& request);
/// The first thing that a client says.
std::string encode_torch_greeting();

/// What answers are made of. A value is its length in 8 bytes, then its bytes.
void append_number(std::string& out, std::int64_t number);
void append_value(std::string& out, std::string_view value);

/// Cuts what a client sends, fed in pieces of any size, into requests. Pure; holds at most one request and
/// one piece.
class TorchParser {
  public:
    explicit TorchParser(TorchLimits limits = {}) : limits_(limits) {}

    void feed(std::string_view bytes);
    /// The next whole request; nullopt: feed more. The greeting is none.
    /// Error: Protocol (an unknown request, a second greeting), Limit (a length beyond the limits, judged
    /// before anything is allocated). The stream is then lost: every further call gives the same error.
    Result<std::optional<TorchRequest>> next();

  private:
    enum class Dialect : std::uint8_t { Unknown, Greeted, Ungreeted };

    bool read_greeting();
    Result<bool> read_request();
    Result<bool> begin_request();
    Result<bool> read_field(char field);
    Result<bool> read_text(std::vector<std::string>& to, std::size_t most, std::string_view what);
    std::optional<std::uint64_t> read_number(std::size_t bytes);
    [[nodiscard]] std::size_t available() const { return buffer_.size() - offset_; }

    TorchLimits limits_;
    std::string buffer_;
    std::size_t offset_ = 0;  ///< of the first byte not yet used
    Dialect dialect_ = Dialect::Unknown;
    std::optional<TorchRequest> open_;  ///< as far as it has come
    std::string fields_;                ///< of `open_`, still to come for this item
    std::optional<std::uint64_t>
        items_;  ///< still to come, this one among them; nullopt: their number is to come first
    std::size_t open_bytes_ = 0;
    std::optional<Error> broken_;
};

}  // namespace ddprun::rdzv
