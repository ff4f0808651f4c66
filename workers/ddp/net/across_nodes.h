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

#include "ddp/net/last_words.h"
#include "ddp/net/layout.h"
#include "ddp/net/link.h"
#include "ddp/shm/cpu_backend.h"
#include "ddp/worker/board.h"

namespace ddp::net {

/// How a world of several nodes finds itself; tests bring their own.
struct Parts {
    Board board;
    int group = 0;  ///< the how many-th of this generation
    std::function<std::unique_ptr<Link>()> open_link;
};

/// Collectives of ranks on several nodes: in shared memory within each, by a link between them. One thread at
/// a time. across_all_reduce.cpp has all_reduce, across_collectives.cpp the others, across_nodes.cpp how the
/// nodes meet, speak and wait.
///
/// Sums are made in rank order within a node and in node order between them, whatever comes first: all ranks
/// get the same bits in every run. The first rank of a node tells those of the others which call it is in, so
/// that a mismatch is seen by all. Messages of a pair of ranks are counted, and their tags are that number
/// under a secret which only members know.
class AcrossNodes final : public cpu::CpuBackend {
  public:
    /// Joins the world. Throws TimeoutError naming who did not come, MismatchError, InvalidInput (no
    /// libfabric) on all ranks.
    AcrossNodes(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                std::chrono::nanoseconds timeout, const Parts& parts);
    /// Some ranks of a group, on several nodes: split() makes it.
    struct SubGroup {
        std::vector<std::uint32_t> members;  ///< by their ranks in the parent, in the new order
        std::vector<std::uint32_t> locals;   ///< those of this node, by their places there
        std::uint32_t share = 0;
        std::unique_ptr<Link> link;
        std::vector<std::string> introductions;  ///< of all ranks of the parent
    };
    AcrossNodes(const AcrossNodes& parent, SubGroup part);
    ~AcrossNodes() override;

    [[nodiscard]] int rank() const override { return static_cast<int>(layout_.rank); }
    [[nodiscard]] int size() const override { return static_cast<int>(layout_.size()); }
    [[nodiscard]] std::string describe() const override;

    void all_reduce(Buffer buffer, ReduceOp op) override;
    void broadcast(Buffer buffer, int root) override;
    void all_gather(Buffer output, Buffer input) override;
    void reduce_scatter(Buffer output, Buffer input, ReduceOp op) override;
    void reduce(Buffer buffer, int root, ReduceOp op) override;
    void gather(Buffer output, Buffer input, int root) override;
    void scatter(Buffer output, Buffer input, int root) override;
    void all_to_all(Buffer output, Buffer input) override;
    void all_gather_v(Buffer output, Buffer input, const Counts& counts) override;
    void reduce_scatter_v(Buffer output, Buffer input, const Counts& counts, ReduceOp op) override;
    void all_to_all_v(Buffer output, const Counts& received, Buffer input, const Counts& sent) override;
    void send(Buffer buffer, int to) override;
    void recv(Buffer buffer, int from) override;
    void batch(const std::vector<Message>& messages) override;
    void barrier() override;
    std::span<std::byte> allocate_shared(std::size_t bytes) override;
    std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark) override;
    std::unique_ptr<CpuBackend> split(const std::vector<std::uint32_t>& members) override;

  private:
    /// Another rank, for messages.
    struct Peer {
        int world_rank = 0;
        std::string host;
    };
    /// Messages that were begun together. Memory that they use must outlive it.
    class Batch {
      public:
        explicit Batch(AcrossNodes& owner) : owner_(owner) {}
        ~Batch();
        Batch(const Batch&) = delete;
        Batch& operator=(const Batch&) = delete;

        void send(std::uint32_t peer, std::span<const std::byte> from);
        void receive(std::uint32_t peer, std::span<std::byte> into);
        /// Of any length up to that of `into`.
        struct Begun {
            Transfer transfer;
            std::uint32_t peer;
            std::size_t least, most;  ///< bytes that may come
            [[nodiscard]] bool is_other() const { return transfer.bytes < least || transfer.bytes > most; }
        };
        const Begun& receive_up_to(std::uint32_t peer, std::span<std::byte> into);
        bool look();
        void wait();

      private:
        friend class AcrossNodes;
        AcrossNodes& owner_;
        std::deque<Begun> messages_;
    };
    /// How a sum is made within the node and then between nodes.
    struct Sum {
        DType type;     ///< of the buffers
        DType partial;  ///< of a node's sum: float32 for 16-bit floats, that all is rounded once
        cpu::ReduceFunction here, across;  ///< `type` to `partial`, `partial` to `partial`
        ReduceOp op;
        [[nodiscard]] bool is_wide() const { return partial != type; }
        /// Of the partial sums of so many bytes of a buffer.
        [[nodiscard]] std::size_t partial_bytes(std::size_t bytes) const {
            return bytes / size_of(type) * size_of(partial);
        }
    };
    /// A lane's piece of an all-reduce, summed between the nodes.
    class Exchange;

    // How the nodes meet.
    void meet_world(const Parts& parts);
    [[nodiscard]] std::string introduce(std::unique_ptr<Link>& link, const std::string& failure) const;
    void settle(const std::vector<std::string>& introductions, const std::vector<int>& world_ranks);

    // A call, and what its ranks say first.
    template <class Body>
    void in_call(const Call& call, Body body);
    [[nodiscard]] bool speaks() const { return layout_.place() == 0; }
    void meet_here();
    void open();
    /// Tells the other nodes which call this is, with some bytes; theirs stand in words_ once hear() is back.
    void greet(std::span<const std::byte> bytes = {});
    void hear();
    void compare_heard();
    [[nodiscard]] const std::byte* heard_from(std::uint32_t node) const {
        return words_[node].data() + sizeof(Call);
    }

    // Waiting.
    [[nodiscard]] std::chrono::nanoseconds patience() const;
    [[nodiscard]] std::uint64_t next_tag(std::vector<std::uint64_t>& counts, std::uint32_t peer) const;
    void wait_for(const Batch::Begun& message);
    [[noreturn]] void lament(const Batch::Begun& message);
    void throw_if_hopeless(std::uint32_t peer);
    void throw_last_words() const;
    void pass_on(const std::exception_ptr& failure);
    template <class Exception>
    [[noreturn]] void fail(const std::string& what);
    void end_with(const std::exception_ptr& why);
    [[nodiscard]] std::string attempt() const;
    [[nodiscard]] std::string name_of(std::uint32_t peer) const;

    // Within the node, as parts of a call.
    template <class Give, class Take>
    void in_steps(std::size_t total, Give give, Take take);
    void share(std::uint32_t from_place, std::byte* bytes, std::size_t length);
    [[nodiscard]] std::vector<std::string> gather_everywhere(std::string_view mine);

    void all_reduce_now(const Buffer& buffer, ReduceOp op);
    void reduce_by_speakers(const Buffer& buffer, const Sum& how);
    void reduce_by_lanes(const Buffer& buffer, const Sum& how);
    void stage_for_lanes(const Buffer& buffer, const cpu::Pieces& pieces, std::uint32_t lanes);
    void collect_from_lanes(const Buffer& buffer, const cpu::Pieces& pieces, std::uint32_t lanes);
    void gather_slices(const Buffer& output, const Buffer& input, const Slices& slices);
    void reduce_slices(const Buffer& output, const Buffer& input, const Slices& slices, ReduceOp op);
    void exchange_slices(const Buffer& output, const Slices& received, const Buffer& input,
                         const Slices& sent, std::size_t longest);
    [[nodiscard]] std::vector<Counts> tell_counts_everywhere(const Counts& own);
    void agree_on_counts(const Counts& counts);
    [[nodiscard]] Sum sum_of(DType type, ReduceOp op) const;
    /// What all nodes' sums make, `bytes` of a buffer: divided for an average, and rounded. `to` may be `sum`
    /// unless it is wide.
    void settle_sum(const Sum& how, void* to, std::byte* sum, std::size_t bytes) const;
    struct Carried;
    void begin(Carried& carried, Batch& together);
    void arrive(const Carried& carried);

    std::function<std::unique_ptr<Link>()> open_link_;
    std::optional<LastWords> last_words_;  ///< outlives the link
    std::unique_ptr<Link> link_;
    Layout layout_;
    std::vector<Peer> peers_;
    std::uint64_t secret_ = 0;
    std::vector<std::uint64_t> sent_, received_;              ///< by peer: what the link carried
    std::vector<std::uint64_t> messages_to_, messages_from_;  ///< by peer: calls of send and recv
    Call call_;                                               ///< that we are in
    std::int64_t began_ns_ = 0;
    cpu::Attention attention_;
    std::vector<std::vector<std::byte>> words_;  ///< by node: a Call, and some bytes
    std::array<std::vector<std::byte>, 2>
        scratch_;  ///< of the exchanges of an all-reduce, at most two at a time
    std::unique_ptr<Batch> greetings_;
    std::vector<bool> compared_;  ///< by node
};

}  // namespace ddp::net
