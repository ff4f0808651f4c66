#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/shm/node.h"
#include "ddp/worker/operation.h"

namespace ddp::cpu {

/// Blocking collectives for a process group on host memory: of one node (CpuBackend) or of several
/// (net::AcrossNodes). One thread at a time. The calls throw MismatchError, PeerLostError, TimeoutError.
class Backend {
  public:
    virtual ~Backend() = default;
    [[nodiscard]] virtual int rank() const = 0;
    [[nodiscard]] virtual int size() const = 0;
    [[nodiscard]] virtual std::string describe() const = 0;
    /// The ranks of this node.
    [[nodiscard]] virtual Node& node() = 0;

    virtual void run(const Operation& operation) = 0;
    virtual std::span<std::byte> allocate_shared(std::size_t bytes) = 0;
    /// `mark` is the reported operation: kBytesMark or kSplitMark.
    virtual std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark) = 0;
    /// The group of `members`, by rank in the new order; null for none. Called by the ranks of `exchange`.
    /// Throws the errors of Node::take_share.
    virtual std::unique_ptr<Backend> split(const std::vector<std::uint32_t>& members,
                                           const Exchange& exchange) = 0;
};

/// Compares the counts of the ranks, which `exchange` collects; throws MismatchError when they do not fit
/// each other. Returns the bytes of the longest slice of any rank.
std::size_t agree_on_counts(const Operation& operation, Node& node, const Exchange& exchange);

/// Collectives of one node over its shared segment. all_reduce.cpp has the algorithms of all_reduce,
/// collectives.cpp the other collectives.
///
/// Four algorithms reduce; all sum in rank order element by element, so the algorithm and the sizes of its
/// pieces never change a bit of the result:
///   tiny       the message travels in the slot; one step, each rank sums everything
///   small      the buffer is copied to shared memory; one step, each rank sums everything
///   zero-copy  every rank's buffer lies in an allocate_shared region: each sums its slice over all the
///              buffers and writes the result into all of them; two steps
///   staged     pieces for other ranks are copied to shared memory first; one step per piece
/// The other collectives of many bytes are zero-copy or staged in the same way.
class CpuBackend final : public Backend {
  public:
    /// Arguments of Node.
    template <class... Arguments>
    explicit CpuBackend(Arguments&&... arguments) : node_(std::forward<Arguments>(arguments)...) {}

    [[nodiscard]] int rank() const override { return static_cast<int>(rank_); }
    [[nodiscard]] int size() const override { return static_cast<int>(size_); }
    [[nodiscard]] std::string describe() const override { return node_.describe(); }
    [[nodiscard]] Node& node() override { return node_; }

    void run(const Operation& operation) override;
    std::span<std::byte> allocate_shared(std::size_t bytes) override;
    std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark) override;
    std::unique_ptr<Backend> split(const std::vector<std::uint32_t>& members,
                                   const Exchange& exchange) override;

  private:
    void meet() { node_.meet(); }
    [[nodiscard]] std::size_t stretch_bytes() const;
    [[nodiscard]] std::size_t piece_bytes() const;
    template <class Give, class Take>
    void in_pieces(std::size_t total, std::size_t most, Give give, Take take, bool is_shown = false);
    template <class Direct, class Give, class Take>
    void direct_or_staged(const void* data, std::size_t bytes, Direct direct, std::size_t total,
                          std::size_t most, Give give, Take take);
    void show(const std::byte* from, std::size_t length);
    void collect_from_all(const Buffer& output, const Slices& slices, std::size_t at, std::size_t most);
    void stage_for_each(const ConstBuffer& buffer, const Slices& slices, std::size_t at, std::size_t most);
    [[nodiscard]] std::byte* piece_for(std::uint32_t owner) const;
    [[nodiscard]] const std::byte* staged_by(std::uint32_t rank) const;

    void all_reduce(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine);
    void broadcast(const Operation& operation);
    void reduce(const Operation& operation, ReduceFunction combine);
    void gather(const Operation& operation);
    void scatter(const Operation& operation);
    void all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices);
    void reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                        ReduceFunction combine);
    void all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                    const Slices& sent, std::size_t longest);

    void reduce_tiny(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine);
    void reduce_small(const Buffer& buffer, const ConstBuffer& input, ReduceFunction combine);
    void reduce_large(const Buffer& buffer, ReduceFunction combine);
    void reduce_in_place(const std::vector<std::byte*>& buffers, const Buffer& buffer,
                         ReduceFunction combine);
    void reduce_staged(const Buffer& buffer, ReduceFunction combine, bool first_is_met);
    void stage(const Buffer& buffer, const Pieces& pieces);
    void sum_own(const Buffer& buffer, const Pieces& pieces, ReduceFunction combine);
    void collect(const Buffer& buffer, const Pieces& pieces);

    Node node_;
    // Its parts, by short names.
    Arena& arena_ = node_.arena;
    Lockstep& steps_ = node_.steps;
    const Kernels& kernels_ = node_.loops;
    const std::uint32_t rank_ = node_.rank, size_ = node_.size;
    std::vector<const void*> sources_ = std::vector<const void*>(size_);  ///< reused
};

/// A process group over this backend. Joining blocks; throws the errors of ProcessGroup::create.
/// Progress::Auto becomes Inline when this rank has less than two CPUs.
std::unique_ptr<ProcessGroup> make_group(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options);
/// Uses a backend that has joined.
std::unique_ptr<ProcessGroup> make_group(std::unique_ptr<Backend> backend, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options);

}  // namespace ddp::cpu
