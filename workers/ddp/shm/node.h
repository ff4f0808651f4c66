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
#include "ddp/worker/slices.h"

namespace ddp::cpu {

inline constexpr std::size_t kLine = 64;  ///< bytes of a cache line
/// Bytes that a rank stages at a time: few enough to stay in the caches until they are read.
inline constexpr std::size_t kStagedBytes = 256 * 1024;

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
        return {begin, end, round_up((end - begin + ranks - 1) / ranks, kLine)};
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

/// Sends a text to the ranks that make sub-groups together, and returns theirs by rank; "" for other ranks.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

/// The ranks of one node, or of a sub-group on it, that meet in its shared segment: their steps, messages and
/// shared regions. The backends of one node and of several are made of it. One thread at a time.
class Node {
  public:
    /// Joins the ranks of `env`'s node on `segment`. Throws the errors of check_claim and join. `kernels` are
    /// borrowed.
    Node(std::shared_ptr<SegmentMap> segment, const ddprun::WorkerEnv& env, std::chrono::nanoseconds timeout,
         Arena::Lines lines = Arena::Lines::OfTheNode, const Kernels& kernels = cpu::kernels());
    /// Joins a sub-group: `members` are ranks of the parent, in the new order. See Arena for `share`.
    Node(const Node& parent, const std::vector<std::uint32_t>& members, std::uint32_t share);
    ~Node();
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

    [[nodiscard]] std::string describe() const;
    void report_progress(std::uint64_t step, std::uint64_t samples);
    /// Applies to later calls.
    void set_timeout(std::chrono::nanoseconds timeout) {
        steps.set_timeout(timeout), messages_.set_timeout(timeout);
    }

    // Whole calls of all ranks of the node. Throw MismatchError, PeerLostError, TimeoutError.
    std::span<std::byte> allocate_shared(std::size_t bytes);
    /// `mark` is the reported operation: kBytesMark or kSplitMark.
    std::vector<std::string> all_gather_bytes(std::string_view mine, std::int16_t mark = kBytesMark);
    /// Messages within the node; see PointToPoint.
    void move(std::span<const Message> messages, const std::function<bool()>& meanwhile = {});

    /// Takes a share of the arena for the sub-group of `members`, or for none; those of this node, by their
    /// ranks in `exchange`, in which this rank is `own`. The first member takes it. Throws InvalidInput on
    /// all ranks when a node has no room for one of the sub-groups.
    std::uint32_t take_share(const std::vector<std::uint32_t>& members, std::uint32_t own,
                             const Exchange& exchange);

    // Parts of a call.
    void meet() { loops.fence(), steps.meet(); }
    std::vector<std::string> gather_bytes(std::string_view mine);
    /// All ranks have met, so that they ask for the same size.
    std::span<std::byte> take_region(std::size_t bytes);
    /// Throws InvalidInput above the largest region.
    static Call allocation_of(std::size_t bytes);

    /// The memory that one call of allocate_shared gave to all ranks, by rank; empty unless `mine` is all
    /// that it gave to this one.
    [[nodiscard]] std::span<std::byte> shared_by_all(std::span<std::byte> mine);
    /// Whether this rank's memory lies in the shared regions.
    [[nodiscard]] bool is_shared(const void* data, std::size_t bytes) const {
        return locate(data, bytes) != kNotShared;
    }
    /// Tells the other ranks with the next step where this memory lies in the shared regions. False: in none.
    bool tell_place(const void* data, std::size_t bytes);
    /// The number of ranks whose memory lies in the shared regions, as they told with the last step.
    [[nodiscard]] std::uint32_t ranks_in_shared_memory() const;
    /// That memory by rank; empty unless all ranks' lies there.
    [[nodiscard]] std::vector<std::byte*> shared_buffers() const;
    [[nodiscard]] ReduceFunction reduction(DType type, ReduceOp op) const;

    const ddprun::WorkerEnv env;
    const std::shared_ptr<SegmentMap> segment;
    Arena arena;
    const std::uint32_t rank, size;
    const NodeCpus cpus;
    Lockstep steps;
    const Kernels& loops;

  private:
    /// The place of this rank's memory in the shared regions (SharedPlace), or kNotShared.
    [[nodiscard]] std::uint64_t locate(const void* data, std::size_t bytes) const;

    struct Region {
        std::byte* base;
        std::uint64_t offset;  ///< in the segment
        std::size_t stride;    ///< bytes per rank
        bool others_use_it;    ///< this rank's bytes may be in use after its end
    };
    PointToPoint messages_;
    std::vector<Region> regions_;
};

}  // namespace ddp::cpu
