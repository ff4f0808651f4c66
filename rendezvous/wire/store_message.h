#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/wire/message.h"
#include "rendezvous/wire/protocol_limits.h"

/// The requests to the store, and its answers.
namespace ddprun::rdzv {

namespace store_op {
struct Set {
    static constexpr MessageType kType{16, "Set"};
    std::string key;
    Blob value;
    bool operator==(const Set&) const = default;
};
/// Waits until the key exists.
struct Get {
    static constexpr MessageType kType{17, "Get"};
    std::string key;
    bool operator==(const Get&) const = default;
};
struct TryGet {
    static constexpr MessageType kType{18, "TryGet"};
    std::string key;
    bool operator==(const TryGet&) const = default;
};
struct Add {
    static constexpr MessageType kType{19, "Add"};
    std::string key;
    std::int64_t delta = 0;
    bool operator==(const Add&) const = default;
};
struct CompareSet {
    static constexpr MessageType kType{20, "CompareSet"};
    std::string key;
    std::optional<std::string> expected;  ///< nullopt: "absent"
    Blob desired;
    bool operator==(const CompareSet&) const = default;
};
struct Erase {
    static constexpr MessageType kType{21, "Erase"};
    std::string key;
    bool operator==(const Erase&) const = default;
};
struct Wait {
    static constexpr MessageType kType{22, "Wait"};
    std::vector<std::string> keys;
    bool operator==(const Wait&) const = default;
};
struct Barrier {
    static constexpr MessageType kType{23, "Barrier"};
    std::string name;
    int participants = 0;
    bool operator==(const Barrier&) const = default;
};
}  // namespace store_op

using StoreOp = std::variant<store_op::Set, store_op::Get, store_op::TryGet, store_op::Add,
                             store_op::CompareSet, store_op::Erase, store_op::Wait, store_op::Barrier>;

struct StoreRequest {
    std::uint64_t generation = 0;
    std::optional<Duration>
        timeout;  ///< for Get, Wait and Barrier, from the server's receipt; nullopt: no limit
    StoreOp op;
    std::uint64_t client = 0;  ///< in an agent's request: the worker that asks; 0: the agent itself
    Duration waited =
        Duration::zero();  ///< in an agent's request: the wait before it was sent, for the text of a Timeout
    bool operator==(const StoreRequest&) const = default;
};
/// An agent's message that one of its workers is gone, so that its requests are dropped. Not answered.
struct ClientGone {
    static constexpr MessageType kType{24, "ClientGone"};
    std::uint64_t client = 0;
    bool operator==(const ClientGone&) const = default;
};

struct Done {
    static constexpr MessageType kType{32, "Done"};
    bool operator==(const Done&) const = default;
};
struct Value {
    static constexpr MessageType kType{33, "Value"};
    Blob value;
    bool operator==(const Value&) const = default;
};
struct Absent {
    static constexpr MessageType kType{34, "Absent"};
    bool operator==(const Absent&) const = default;
};
struct Sum {
    static constexpr MessageType kType{35, "Sum"};
    std::int64_t sum = 0;
    bool operator==(const Sum&) const = default;
};
struct Exchanged {
    static constexpr MessageType kType{36, "Exchanged"};
    bool swapped = false;
    Blob value;  ///< the present value; empty when the key is absent
    bool operator==(const Exchanged&) const = default;
};
struct Erased {
    static constexpr MessageType kType{37, "Erased"};
    bool existed = false;
    bool operator==(const Erased&) const = default;
};

using StoreReply = std::variant<Failure, Done, Value, Absent, Sum, Exchanged, Erased>;

Result<StoreRequest> decode_store_request(Frame frame);
Result<EncodedMessage> encode_message(StoreRequest request, std::uint32_t number);
Result<ClientGone> decode_client_gone(Frame frame);
Result<EncodedMessage> encode_message(ClientGone gone);
/// Error: also Protocol, when the frame is no answer of a store.
Result<StoreReply> decode_store_reply(Frame frame);
Result<EncodedMessage> encode_message(StoreReply reply, std::uint32_t number);

/// Checks a key or a barrier's name: UTF-8, not empty, within the limit. Error: InvalidArgument.
Status check_key(std::string_view key, std::size_t max_bytes = StoreLimits{}.key_bytes);

}  // namespace ddprun::rdzv
