#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "env/clock.h"
#include "env/result.h"
#include "rendezvous/frame.h"
#include "rendezvous/role.h"

/// What the protocol says, as values. PROTOCOL.md is the same for people; message.cpp is the only file that
/// sees JSON.
namespace ddprun::rdzv {

/// Bytes that many may hold and nobody changes: a stored value is not copied for each of its readers.
class Blob {
  public:
    Blob() = default;
    explicit Blob(std::string bytes) {
        if (!bytes.empty()) bytes_ = std::make_shared<const std::string>(std::move(bytes));
    }
    [[nodiscard]] std::string_view view() const {
        return bytes_ ? std::string_view(*bytes_) : std::string_view();
    }
    [[nodiscard]] std::size_t size() const { return bytes_ ? bytes_->size() : 0; }
    bool operator==(const Blob& other) const { return view() == other.view(); }

  private:
    std::shared_ptr<const std::string> bytes_;
};

// ---- handshake.h tells the order and what the proofs are made of

struct Hello {
    Role role = Role::Worker;
    std::string name;  ///< for people: "rank 3 on node02"
    std::string job_id;
    std::string nonce;
    bool operator==(const Hello&) const = default;
};
struct Challenge {
    std::string nonce;
    bool operator==(const Challenge&) const = default;
};
struct Proof {
    std::string mac;
    bool operator==(const Proof&) const = default;
};
struct Welcome {
    std::string mac;
    bool operator==(const Welcome&) const = default;
};

/// The answer to a request that failed, and the last word before a connection is closed on a peer.
struct Failure {
    Errc code = Errc::Protocol;
    std::string what;
    bool operator==(const Failure&) const = default;
};
struct Heartbeat {
    bool operator==(const Heartbeat&) const = default;
};
/// A type this version does not know.
struct Unknown {
    std::uint8_t type = 0;
    bool operator==(const Unknown&) const = default;
};

// ---- store requests

namespace store_op {
struct Set {
    std::string key;
    Blob value;
    bool operator==(const Set&) const = default;
};
/// Waits until the key exists.
struct Get {
    std::string key;
    bool operator==(const Get&) const = default;
};
struct TryGet {
    std::string key;
    bool operator==(const TryGet&) const = default;
};
struct Add {
    std::string key;
    std::int64_t delta = 0;
    bool operator==(const Add&) const = default;
};
struct CompareSet {
    std::string key;
    std::optional<std::string> expected;  ///< nullopt: "absent"
    Blob desired;
    bool operator==(const CompareSet&) const = default;
};
struct Erase {
    std::string key;
    bool operator==(const Erase&) const = default;
};
struct Wait {
    std::vector<std::string> keys;
    bool operator==(const Wait&) const = default;
};
struct Barrier {
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
        timeout;  ///< of Get, Wait and Barrier, from the server's receipt; nullopt: for ever
    StoreOp op;
    bool operator==(const StoreRequest&) const = default;
};

// ---- store answers (or Failure)

struct Done {
    bool operator==(const Done&) const = default;
};
struct Value {
    Blob value;
    bool operator==(const Value&) const = default;
};
struct Absent {
    bool operator==(const Absent&) const = default;
};
struct Sum {
    std::int64_t sum = 0;
    bool operator==(const Sum&) const = default;
};
struct Exchanged {
    bool swapped = false;
    Blob value;  ///< what stands there now; empty when the key is absent
    bool operator==(const Exchanged&) const = default;
};
struct Erased {
    bool existed = false;
    bool operator==(const Erased&) const = default;
};

// ---- agent to controller

/// An agent's first message: it wants to be part of the job.
struct AgentHello {
    std::string host;
    std::optional<int> node_rank;  ///< nullopt: any
    int slots = 0;                 ///< workers this node runs
    int pid = 0;
    std::string version;                 ///< of ddprun
    std::vector<std::string> addresses;  ///< where other nodes can reach this one
    std::string spec_hash;               ///< of the parts of the command line on which all nodes must agree
    std::string role = "default";
    bool operator==(const AgentHello&) const = default;
};
struct WorkersStarted {
    std::uint64_t generation = 0;
    bool operator==(const WorkersStarted&) const = default;
};
struct WorkerExited {
    std::uint64_t generation = 0;
    int local_rank = 0;
    int rank = 0;
    int pid = 0;
    bool signaled = false;
    int status = 0;  ///< exit code, or the signal when `signaled`
    bool dumped_core = false;
    bool by_us = false;  ///< we stopped it
    std::int64_t after_start_ns = 0;
    std::string exec_failure;              ///< why it never ran; "" it ran
    std::vector<std::string> last_stderr;  ///< cut to kReportLines (the last) of kReportLineBytes
    std::string error_file;                ///< cut to kReportErrorBytes
    std::string meaning;                   ///< as exec_failure and last_collective, cut to kReportTextBytes
    std::string last_collective;
    std::int64_t steps = -1;  ///< training steps done, where the worker says; -1 it does not
    bool stopped_failing = false;    ///< we stopped it when it had reported its error: its end is its own failure
    std::int64_t error_age_ns = -1;  ///< how long before this its error report was written; -1 it wrote none
    bool operator==(const WorkerExited&) const = default;
};
/// No worker of the generation is left on this node.
struct GenerationDrained {
    std::uint64_t generation = 0;
    std::vector<std::string> notes;  ///< for the report: "process 4171 could not be killed"
    bool operator==(const GenerationDrained&) const = default;
};

// ---- controller to agent

/// Form the world and start the workers. Grows with the nodes, not with the ranks.
struct StartGeneration {
    std::uint64_t generation = 0;
    int group_rank = 0;
    int group_world_size = 1;
    int first_rank = 0;  ///< global rank of this node's local rank 0
    int world_size = 1;
    std::vector<int> local_world_sizes;  ///< by group rank
    int role_first_rank = 0;             ///< rank within the role of this node's local rank 0
    int role_world_size = 1;
    std::string master_addr;
    int master_port = 0;
    int restart_count = 0;
    int max_restarts = 0;
    bool operator==(const StartGeneration&) const = default;
};
struct StopGeneration {
    std::uint64_t generation = 0;
    int signal = 15;
    std::int64_t grace_ns = 0;  ///< then SIGKILL
    int failed_rank = -1;       ///< whose end is the cause; its peers' collectives end at once. -1: nobody's
    std::string why;
    bool operator==(const StopGeneration&) const = default;
};
/// The job is over.
struct Shutdown {
    int exit_code = 0;
    std::string why;
    bool operator==(const Shutdown&) const = default;
};

/// Either way: something workers or the controller should know. kind "preempt": stop soon, save first.
struct Notice {
    std::string kind;
    std::string text;
    bool operator==(const Notice&) const = default;
};

/// Either way: something about the running job. Answered once with the same number, or not at all.
struct Question {
    std::uint64_t number = 0;  ///< chosen by whoever asks
    std::string request;       ///< a line as a job's control socket takes it (docs/events.md)
    bool operator==(const Question&) const = default;
};
struct Answer {
    std::uint64_t number = 0;
    Blob value;  ///< a line as a job's control socket answers it
    bool operator==(const Answer&) const = default;
};

using StoreReply = std::variant<Failure, Done, Value, Absent, Sum, Exchanged, Erased>;
using Message =
    std::variant<Unknown, Hello, Challenge, Proof, Welcome, Failure, Heartbeat, StoreRequest, Done, Value,
                 Absent, Sum, Exchanged, Erased, AgentHello, WorkersStarted, WorkerExited, GenerationDrained,
                 StartGeneration, StopGeneration, Shutdown, Notice, Question, Answer>;

/// "StartGeneration" and so on, for logs; a store request gives its operation ("Set").
std::string_view message_name(const Message& message);

/// Makes sense of a frame. Keys it does not know are ignored; a type it does not know gives Unknown.
/// Error: Protocol naming the message, the key and what is wrong with it.
Result<Message> decode(Frame frame);

/// The whole frame as bytes. Texts that are not UTF-8 are sent with replacement characters.
/// Error: Limit when the message is larger than a peer would take.
Result<std::string> encode(const Message& message, std::uint32_t request);

/// The same without the blob's bytes, which the caller sends next, uncopied.
struct EncodedMessage {
    std::string head;
    Blob blob;
};
Result<EncodedMessage> encode_parted(const Message& message, std::uint32_t request);

/// A store answer as the message it is.
Message to_message(StoreReply reply);

/// Checks a key or a barrier's name: UTF-8, not empty, within the limit. Error: InvalidArgument.
Status check_key(std::string_view key, std::size_t max_bytes = StoreLimits{}.key_bytes);

}  // namespace ddprun::rdzv
