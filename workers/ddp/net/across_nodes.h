#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/net/failure_notice.h"
#include "ddp/net/layout.h"
#include "ddp/net/link.h"
#include "ddp/shm/cpu_backend.h"
#include "ddp/worker/bootstrap_store.h"

namespace ddp::net {

using cpu::bytes_of;
using cpu::copy_bytes;

/// The means of the rendezvous of several nodes; tests have their own.
struct Parts {
    BootstrapStore bootstrap;
    int group = 0;  ///< number of this group in the generation
    std::function<std::unique_ptr<Link>()> open_link;
};

/// Collectives of ranks on several nodes: over shared memory within a node, over a link between nodes. One
/// thread at a time. across_all_reduce.cpp has all_reduce, across_collectives.cpp the other collectives,
/// across_nodes.cpp the rendezvous, headers and waits.
///
/// Sums are in rank order within a node and in node order between nodes, whatever arrives first: all ranks
/// get the same bits in every run. The first rank of a node, its leader, sends the header of its current call
/// to the other leaders, so that all of them see a mismatch. The tag of a message between two ranks is its
/// number, combined with a secret that only members know.
class AcrossNodes final : public cpu::Backend {
  public:
    /// Joins the world. Throws on all ranks: TimeoutError naming the missing rank, MismatchError,
    /// InvalidInput (no libfabric).
    AcrossNodes(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                std::chrono::nanoseconds timeout, const Parts& parts);
    /// The ranks of a sub-group on several nodes, for split().
    struct SubGroup {
        std::vector<std::uint32_t> members;  ///< by rank in the parent, in the new order
        std::vector<std::uint32_t> locals;   ///< members on this node, by position there
        std::uint32_t share = 0;
        std::unique_ptr<Link> link;
        std::vector<std::string> introductions;  ///< of all ranks of the parent
    };
    AcrossNodes(const AcrossNodes& parent, SubGroup part);
    ~AcrossNodes() override;

    [[nodiscard]] int rank() const override { return static_cast<int>(layout_.rank); }
    [[nodiscard]] int size() const override { return static_cast<int>(layout_.size()); }
    [[nodiscard]] std::string describe() const override;
    [[nodiscard]] cpu::Node& node() override { return node_; }

    void run(const Operation& operation) override;
    std::span<std::byte> allocate_shared(std::size_t bytes) override;
    std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark) override;
    std::unique_ptr<cpu::Backend> split(const std::vector<std::uint32_t>& members,
                                        const cpu::Exchange& exchange) override;

  private:
    /// Another rank, for errors.
    struct Peer {
        int world_rank = 0;
        std::string host;
    };
    /// Messages that were started together. Their memory must outlive the batch.
    class Batch {
      public:
        explicit Batch(AcrossNodes& owner) : owner_(owner) {}
        ~Batch();
        Batch(const Batch&) = delete;
        Batch& operator=(const Batch&) = delete;

        void send(std::uint32_t peer, std::span<const std::byte> from);
        void send(std::uint32_t peer, std::span<const std::byte> from, std::uint64_t tag);
        void receive(std::uint32_t peer, std::span<std::byte> into);
        /// A started transfer, with the lengths that are correct.
        struct Pending {
            Transfer transfer;
            std::uint32_t peer;
            std::size_t least, most;  ///< limits of the received bytes
            [[nodiscard]] bool has_wrong_length() const {
                return transfer.bytes < least || transfer.bytes > most;
            }
        };
        const Pending& receive_up_to(std::uint32_t peer, std::span<std::byte> into);
        bool progress();
        void wait();

      private:
        friend class AcrossNodes;
        AcrossNodes& owner_;
        std::deque<Pending> messages_;
    };
    /// The arithmetic of a sum within the node and between nodes.
    struct Sum {
        DType type;  ///< type of the buffers
        DType
            partial;  ///< type of a node's sum: float32 for 16-bit floats, so that only the result is rounded
        cpu::ReduceFunction here, across;  ///< `type` to `partial`, `partial` to `partial`
        ReduceOp op;
        [[nodiscard]] bool is_wide() const { return partial != type; }
        /// Bytes of the partial sums of `bytes` bytes of a buffer.
        [[nodiscard]] std::size_t partial_bytes(std::size_t bytes) const {
            return bytes / size_of(type) * size_of(partial);
        }
    };
    /// A lane's piece of an all-reduce, summed between the nodes.
    class Exchange;

    // Rendezvous.
    void join_world(const Parts& parts);
    [[nodiscard]] std::string make_introduction(std::unique_ptr<Link>& link,
                                                std::exception_ptr& failure) const;
    void connect_peers(const std::vector<std::string>& introductions, const std::vector<int>& world_ranks);

    // A call and its headers.
    void in_call(const Call& call, const std::function<void()>& body);
    [[nodiscard]] bool is_leader() const { return layout_.place() == 0; }
    void meet_on_node();
    void meet_all_nodes();
    [[nodiscard]] std::vector<std::byte*> begin_with(const void* data, std::size_t bytes);
    /// Starts the exchange of the leaders' headers, each with as many bytes of own_payload(), at most
    /// header_payload_bytes(); receive_headers() ends it. In round k a leader sends the headers that it has
    /// to the node 2^k further, so each one sends and receives log2(nodes) messages.
    void send_header(std::size_t payload_bytes = 0);
    void receive_headers();
    void advance_headers();
    void send_header_round();
    [[nodiscard]] std::byte* own_payload() { return headers_.data() + sizeof(Call); }
    [[nodiscard]] const std::byte* payload_of(std::uint32_t node) const;

    // Waiting.
    [[nodiscard]] std::chrono::nanoseconds deadline_extension() const;
    [[nodiscard]] std::uint64_t next_tag(std::vector<std::uint64_t>& counts, std::uint32_t peer) const;
    void wait_for(const Batch::Pending& message);
    [[noreturn]] void throw_lost_or_mismatch(const Batch::Pending& message);
    void throw_if_failed(std::uint32_t peer);
    void throw_failure_notice() const;
    void announce_failure(const std::exception_ptr& failure);
    template <class Exception>
    [[noreturn]] void fail(const std::string& what);
    void fail_group(const std::exception_ptr& why);
    [[nodiscard]] std::string attempt() const;
    [[nodiscard]] std::string name_of(std::uint32_t peer) const;

    // Steps within the node, as parts of a call.
    /// By place: the ranks whose slices the node's rank at that place holds; its own, and one or more of
    /// every other node.
    [[nodiscard]] std::vector<std::vector<std::uint32_t>> slices_held() const;
    [[nodiscard]] std::vector<std::string> gather_everywhere(std::string_view mine);

    [[nodiscard]] bool run_by_leaders(const Operation& operation);
    void all_reduce(const Buffer& buffer, ReduceOp op);
    void stage_for_lanes(const Buffer& buffer, const cpu::Pieces& pieces, std::uint32_t lanes);
    void collect_from_lanes(const Buffer& buffer, const cpu::Pieces& pieces, std::uint32_t lanes);
    void broadcast(const Operation& operation);
    void reduce(const Operation& operation);
    void move_slices(const Operation& operation);
    void all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices);
    void reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices, ReduceOp op);
    void all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                    const Slices& sent, std::size_t longest);
    void batch(std::span<const Message> messages);
    [[nodiscard]] Sum sum_of(DType type, ReduceOp op) const;
    /// Turns `sum`, over all nodes, into `bytes` of the result: divided for an average, and rounded. `to` may
    /// be `sum` unless the sum is wide.
    void finish_sum(const Sum& how, void* to, std::byte* sum, std::size_t bytes) const;
    struct RemoteMessage;
    void begin(RemoteMessage& remote, Batch& together);
    void arrive(const RemoteMessage& remote);

    void meet() { node_.meet(); }
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return steps_.timeout(); }
    [[nodiscard]] const ddprun::SegmentHeader& header() const { return node_.segment->header(); }

    cpu::Node node_;
    // Its parts, by short names.
    cpu::Arena& arena_ = node_.arena;
    cpu::Lockstep& steps_ = node_.steps;
    const cpu::Kernels& kernels_ = node_.loops;
    const ddprun::WorkerEnv& env_ = node_.env;
    const std::uint32_t rank_ = node_.rank, size_ = node_.size;           ///< within the node
    std::vector<const void*> sources_ = std::vector<const void*>(size_);  ///< reused
    std::function<std::unique_ptr<Link>()> open_link_;
    std::optional<FailureNotice> failure_notice_;  ///< outlives the link
    std::unique_ptr<Link> link_;
    Layout layout_;
    std::vector<Peer> peers_;
    std::uint64_t secret_ = 0;
    std::vector<std::uint64_t> sent_, received_;              ///< by peer: transfers of the link
    std::vector<std::uint64_t> messages_to_, messages_from_;  ///< by peer: calls of send and recv
    Call call_;                                               ///< the current call
    std::int64_t began_ns_ = 0;
    cpu::SpinBudget spin_budget_;
    /// A leader's messages of a round of the exchange of headers.
    struct HeaderRound {
        std::vector<std::byte> arrived;  ///< headers of as many nodes as this one had before the round
        const Batch::Pending* arriving = nullptr;
        std::uint64_t tag = 0;  ///< of the message to the node 2^round further
    };
    std::vector<HeaderRound> header_rounds_;
    std::size_t header_round_ = 0;  ///< the first whose message has not arrived
    std::vector<std::byte>
        headers_;                   ///< this node's (a Call, and its payload), then those of nodes before it
    std::size_t header_bytes_ = 0;  ///< of each
    std::array<std::vector<std::byte>, 2>
        scratch_;  ///< for the exchanges of an all-reduce, at most two at a time
    std::unique_ptr<Batch> header_batch_;
};

}  // namespace ddp::net
