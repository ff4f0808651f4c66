#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/shm/kernels.h"
#include "ddp/shm/lockstep.h"
#include "ddp/shm/point_to_point.h"
#include "ddp/worker/operation.h"

namespace ddp::cpu {

inline constexpr std::size_t kLine = 64;  ///< bytes of a cache line

inline std::byte* bytes_of(const Buffer& buffer) { return static_cast<std::byte*>(buffer.data); }
inline const std::byte* bytes_of(const ConstBuffer& buffer) {
    return static_cast<const std::byte*>(buffer.data);
}
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// A range of a buffer, divided into one piece per rank. Offsets and lengths in bytes.
struct Pieces {
    std::size_t begin, end, each;

    // Pieces end on cache lines of the range, so that two ranks never write the same line of it.
    static Pieces cut(std::size_t begin, std::size_t end, std::size_t ranks) {
        const std::size_t share = (end - begin + ranks - 1) / ranks;
        return {begin, end, (share + kLine - 1) / kLine * kLine};
    }
    [[nodiscard]] std::size_t offset(std::size_t rank) const { return std::min(begin + rank * each, end); }
    [[nodiscard]] std::size_t length(std::size_t rank) const { return offset(rank + 1) - offset(rank); }
};

/// The place of a buffer in a group's shared regions, in one word for other ranks: the number of the region,
/// and the offset in the rank's part of it.
struct SharedPlace {
    static constexpr unsigned kOffsetBits = 44;
    static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << kOffsetBits;  ///< of a rank's part

    std::uint64_t region, offset;

    static SharedPlace of(std::uint64_t word) { return {word >> kOffsetBits, word & (kMostBytes - 1)}; }
    [[nodiscard]] std::uint64_t word() const { return region << kOffsetBits | offset; }
};

/// Blocking collectives of one node over its shared segment. One thread at a time. all_reduce.cpp has the
/// algorithms of all_reduce, collectives.cpp the other collectives, cpu_group.cpp the process group.
///
/// Four algorithms reduce; all sum in rank order element by element, so the algorithm and the sizes of its
/// pieces never change a bit of the result:
///   tiny       the message travels in the slot; one step, each rank sums everything
///   small      the buffer is copied to shared memory; one step, each rank sums everything
///   zero-copy  every rank's buffer lies in an allocate_shared region: each sums its slice over all the
///              buffers and writes the result into all of them; two steps
///   staged     pieces for other ranks are copied to shared memory first; one step per piece
class CpuBackend {
  public:
    /// Joins the ranks of `env`'s node on `segment`. Throws the errors of check_claim and join. `loops` are
    /// borrowed.
    CpuBackend(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
               std::chrono::nanoseconds timeout, Arena::Lines lines = Arena::Lines::OfTheNode,
               const Kernels& loops = kernels());
    /// Joins a sub-group: `members` are ranks of the parent, in the new order. See Arena for `share`.
    CpuBackend(const CpuBackend& parent, const std::vector<std::uint32_t>& members, std::uint32_t share);
    virtual ~CpuBackend();
    CpuBackend(const CpuBackend&) = delete;
    CpuBackend& operator=(const CpuBackend&) = delete;

    [[nodiscard]] virtual int rank() const { return static_cast<int>(rank_); }
    [[nodiscard]] virtual int size() const { return static_cast<int>(size_); }
    [[nodiscard]] const NodeCpus& node_cpus() const { return node_cpus_; }
    [[nodiscard]] virtual std::string describe() const;

    /// Throws MismatchError, PeerLostError, TimeoutError.
    virtual void run(const Operation& operation);
    virtual std::span<std::byte> allocate_shared(std::size_t bytes);
    /// Takes a share of the arena for the sub-group of `members`; ranks that are in none call it too and get
    /// 0. The first member takes it. Throws InvalidInput on all ranks when the arena has no room for one of
    /// the sub-groups.
    std::uint32_t take_share(const std::vector<std::uint32_t>& members);
    /// `mark` is the reported operation: kBytesMark or kSplitMark.
    virtual std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark = kBytesMark);
    /// Collective: the group of `members`, by rank in the new order; null for ranks that are in none. Throws
    /// the errors of take_share.
    virtual std::unique_ptr<CpuBackend> split(const std::vector<std::uint32_t>& members);

    /// Applies to later calls.
    void set_timeout(std::chrono::nanoseconds timeout) {
        steps_.set_timeout(timeout), messages_.set_timeout(timeout);
    }
    /// Makes every later collective fail with `why`; peers detect it by their deadlines.
    void mark_broken(std::exception_ptr why) { steps_.mark_broken(std::move(why)); }

    [[nodiscard]] double communication_seconds() const { return steps_.communication_seconds(); }
    [[nodiscard]] double waiting_seconds() const { return steps_.waiting_seconds(); }
    void report_progress(std::uint64_t step, std::uint64_t samples);

  protected:
    // Members for AcrossNodes, whose ranks of one node meet here.
    struct Region {
        std::byte* base;
        std::uint64_t offset;  ///< in the segment
        std::size_t stride;    ///< bytes per rank
    };

    [[nodiscard]] std::uint64_t locate(const void* data, std::size_t bytes) const;
    [[nodiscard]] std::byte* shared_buffer(std::uint32_t rank, std::uint64_t location) const;
    void meet() { kernels_.fence(), steps_.meet(); }
    /// Throws InvalidInput above the largest region.
    static Call allocation_of(std::size_t bytes);
    /// Part of a call in which all ranks have met, so that they ask for the same size.
    std::span<std::byte> take_region(std::size_t bytes);
    [[nodiscard]] ReduceFunction reduction(DType type, ReduceOp op) const;
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return steps_.timeout(); }
    /// Messages within the node; see PointToPoint.
    void batch_here(std::span<const Message> messages, const std::function<bool()>& meanwhile = {});
    /// Part of a call: every rank's bytes.
    std::vector<std::string> gather_bytes(std::string_view mine);

    const ddprun::WorkerEnv env_;
    std::shared_ptr<SegmentMap> segment_;
    Arena arena_;
    const std::uint32_t rank_, size_;
    NodeCpus node_cpus_;
    Lockstep steps_;
    const Kernels& kernels_;
    PointToPoint messages_;
    std::vector<Region> regions_;
    std::vector<const void*> sources_;  ///< one per rank, reused

  private:
    [[nodiscard]] std::size_t stretch_bytes() const;
    [[nodiscard]] std::size_t piece_bytes() const;
    template <class Give, class Take>
    void in_pieces(std::size_t total, std::size_t most, Give give, Take take);
    void show(const std::byte* from, std::size_t length);
    void collect_from_all(const Buffer& output, const Slices& slices, std::size_t at, std::size_t most);
    void stage_for_each(const ConstBuffer& buffer, const Slices& slices, std::size_t at, std::size_t most);
    [[nodiscard]] const std::byte* staged_by(std::uint32_t rank) const;
    std::size_t agree_on_counts(const Operation& operation);

    void all_reduce(const Buffer& buffer, ReduceFunction combine);
    void broadcast(const Operation& operation);
    void reduce(const Operation& operation, ReduceFunction combine);
    void gather(const Operation& operation);
    void scatter(const Operation& operation);
    void all_gather(const Buffer& output, const ConstBuffer& input, const Slices& slices);
    void reduce_scatter(const Buffer& output, const ConstBuffer& input, const Slices& slices,
                        ReduceFunction combine);
    void all_to_all(const Buffer& output, const Slices& received, const ConstBuffer& input,
                    const Slices& sent, std::size_t longest);

    void reduce_tiny(const Buffer& buffer, ReduceFunction combine);
    void reduce_small(const Buffer& buffer, ReduceFunction combine);
    void reduce_large(const Buffer& buffer, ReduceFunction combine);
    void reduce_in_place(const Buffer& buffer, ReduceFunction combine);
    void sum_in_place(const std::vector<std::byte*>& buffers, std::size_t at, std::size_t count,
                      ReduceFunction combine);
    void copy_to_others(const std::vector<std::byte*>& buffers, std::size_t at, std::size_t length);
    void reduce_staged(const Buffer& buffer, ReduceFunction combine, bool first_is_met);
    void stage(const Buffer& buffer, const Pieces& pieces);
    void sum_own(const Buffer& buffer, const Pieces& pieces, ReduceFunction combine);
    void collect(const Buffer& buffer, const Pieces& pieces);
};

/// A process group over this backend. Joining blocks; throws the errors of ProcessGroup::create.
/// Progress::Auto becomes Inline when this rank has less than two CPUs.
std::unique_ptr<ProcessGroup> make_group(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options);
/// Uses a backend that has joined.
std::unique_ptr<ProcessGroup> make_group(std::unique_ptr<CpuBackend> backend, const ddprun::WorkerEnv& env,
                                         const ProcessGroupOptions& options);

}  // namespace ddp::cpu
