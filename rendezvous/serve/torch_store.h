#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "env/result.h"

/// The requests of PyTorch's TCPStore clients (the protocol of its libuv server), as values, and their store.
///
/// A request is one byte and its fields, without a frame. Since PyTorch 2.2 a client begins with a greeting,
/// the request 0; earlier clients sent none, and counted requests from SET = 0. Numbers are little-endian.
/// PROTOCOL.md has the table.
namespace ddprun::rdzv {

/// The limits for these clients. The first three are PyTorch's own.
struct TorchLimits {
    std::size_t key_bytes = 8U << 10;
    std::size_t value_bytes = 8U << 20;
    std::size_t keys_per_request = 128U << 10;
    std::size_t request_bytes = 64U << 20;  ///< all keys and values of one request; also of one answer
    std::size_t output_bytes = 80U << 20;   ///< answers that a client has not read yet
    std::size_t keys = 1U << 20;            ///< in the store, including queued values
    std::size_t total_bytes = std::size_t{1} << 30;  ///< keys, values and queued values
    std::size_t waiting_bytes = 512U << 20;          ///< key names that all clients wait for
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
/// True when the first byte is that of a TCPStore client: 0 (a greeting, or SET before PyTorch 2.2) to the
/// CANCEL_WAIT of such an older client.
constexpr bool may_be_torch(char first_byte) {
    return static_cast<unsigned char>(first_byte) < static_cast<unsigned char>(TorchOp::CancelWait);
}

struct TorchRequest {
    TorchOp op = TorchOp::Ping;
    std::vector<std::string> keys;
    std::vector<std::string> values;  ///< CompareSet: the expected one, then the desired one
    std::int64_t number = 0;          ///< Add: the addend; Barrier: the participants; Ping: the nonce
    bool operator==(const TorchRequest&) const = default;
};

/// The bytes of a request, as a client sends it.
std::string encode_torch(const TorchRequest& request);
/// The first bytes of a client since PyTorch 2.2.
std::string encode_torch_greeting();

/// The parts of answers. A value is its length in 8 bytes, then its bytes.
void append_number(std::string& out, std::int64_t number);
void append_value(std::string& out, std::string_view value);

/// Parses a client's bytes, fed in pieces of any size, into requests. Pure; holds at most one request and one
/// piece.
class TorchParser {
  public:
    explicit TorchParser(TorchLimits limits = {}) : limits_(limits) {}

    void feed(std::string_view bytes);
    /// The next whole request; nullopt: feed more. The greeting is not returned.
    /// Error: Protocol (an unknown request, a second greeting), Limit (a length beyond the limits, checked
    /// before memory is allocated). After an error every call returns the same error.
    Result<std::optional<TorchRequest>> next();
    /// True for a client of PyTorch before 2.2, once it has spoken.
    [[nodiscard]] bool is_ungreeted() const { return dialect_ == Dialect::Ungreeted; }

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
    std::optional<TorchRequest> open_;  ///< the request of which a part has come
    std::string fields_;                ///< fields of `open_` that this item still needs
    std::optional<std::uint64_t>
        items_;  ///< items still to come, including this one; nullopt: their number comes first
    std::size_t open_bytes_ = 0;
    std::optional<Error> broken_;
};

/// The store of PyTorch's TCPStore clients, without connections, clocks or threads.
///
/// It differs from Store: a key is any bytes, an absent key reads as empty, a value can be appended to, a key
/// can be a queue, and clients can count the keys. Every request has the effect and the answer that it has in
/// PyTorch's own libuv server.
class TorchStore {
  public:
    using Client = std::uint64_t;
    struct Answer {
        Client client;
        std::string bytes;
    };
    /// The result of a request: answers to its client and to clients that waited, and the error when it
    /// cannot be served. The protocol has no error answer, so the caller closes the connection then, as
    /// PyTorch's server does.
    struct Outcome {
        std::vector<Answer> answers;
        std::optional<Error> refused;
    };

    explicit TorchStore(TorchLimits limits = {}) : limits_(limits) {}

    Outcome apply(Client client, TorchRequest request);
    /// Drops the client's wait.
    void disconnect(Client client);
    /// Drops all keys, queues and waits, for a new generation.
    void clear();

    [[nodiscard]] std::size_t keys() const { return values_.size(); }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    [[nodiscard]] std::size_t waiters() const { return waits_.size(); }

  private:
    using WaitId = std::uint64_t;
    struct Wait {
        Client client;
        std::set<std::string> missing;
        std::size_t bytes = 0;
    };

    /// The answer to the client itself; "" when there is none, or none yet.
    Result<std::string> perform(Client client, TorchRequest& request);
    Status put(const std::string& key, std::string value);
    Status reserve(std::size_t freed, std::size_t taken, std::size_t entries) const;
    [[nodiscard]] std::string get(const std::string& key) const;
    [[nodiscard]] bool is_there(const std::string& key) const;
    Result<std::int64_t> add(const std::string& key, std::int64_t delta);
    Result<std::string> compare_set(const std::string& key, const std::string& expected, std::string desired);
    Result<std::string> multi_get(const std::vector<std::string>& keys) const;
    [[nodiscard]] Result<std::string> list_keys() const;
    Status append_within(std::string& answer, std::string_view value) const;
    Status multi_set(TorchRequest& request);
    Status push(const std::string& key, std::string value);
    std::string pop(const std::string& key);
    Result<std::string> wait(Client client, std::set<std::string> missing);
    Result<std::string> enter_barrier(Client client, const std::string& key, std::int64_t participants);
    void wake(const std::string& key);
    void wake_one(const std::string& key);
    void finish(WaitId id);
    void forget(WaitId id);

    TorchLimits limits_;
    std::unordered_map<std::string, std::string> values_;
    std::unordered_map<std::string, std::deque<std::string>> queues_;  ///< none is empty
    std::size_t queued_ = 0;                                           ///< values in queues
    std::size_t bytes_ = 0;
    std::map<WaitId, Wait> waits_;
    std::unordered_map<Client, WaitId> wait_of_;
    std::unordered_map<std::string, std::set<WaitId>> waiting_for_;  ///< in order of arrival
    std::size_t waiting_bytes_ = 0;
    WaitId next_wait_ = 1;
    std::vector<Answer> answers_;  ///< of the call in progress, to clients that waited
};

}  // namespace ddprun::rdzv
