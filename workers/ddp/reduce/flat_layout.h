#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/types.h"

namespace ddp {

/// A range of bytes.
struct Extent {
    std::size_t begin = 0, bytes = 0;
    [[nodiscard]] std::size_t end() const { return begin + bytes; }
    bool operator==(const Extent&) const = default;
};
/// Empty, at the begin of `inner`, where the two have no byte in common.
Extent intersection(const Extent& inner, const Extent& outer);

/// The places of tensors in flat memory, bucket after bucket. Weights and gradients of a Model have the same
/// layout, so both of an element lie at the same offset.
struct FlatLayout {
    /// One cache line, and the widest vector: no two tensors share one.
    static constexpr std::size_t kAlignment = 64;
    /// A slice of a bucket is a multiple of this. Norms are sums over these chunks.
    static constexpr std::size_t kChunk = 4096;
    /// The last bucket of a layout that is not sharded ends with at least this many bytes of padding (see
    /// Reducer::request_stop).
    static constexpr std::size_t kTail = 8;

    BucketPlan plan;
    std::vector<Extent> buckets;
    std::vector<DType> types;     ///< of the buckets
    std::vector<Extent> tensors;  ///< in the order of the specs, without padding
    std::vector<std::size_t> bucket_of;
    std::size_t bytes = 0;

    /// The slice of one of `ranks` equal slices of a bucket.
    [[nodiscard]] Extent slice(std::size_t bucket, int rank, int ranks) const {
        const std::size_t each = buckets[bucket].bytes / static_cast<std::size_t>(ranks);
        return {buckets[bucket].begin + static_cast<std::size_t>(rank) * each, each};
    }
};

/// The length of every bucket is a multiple of `multiple`, itself a multiple of kAlignment.
FlatLayout lay_out(std::span<const GradientSpec> specs, BucketPlan plan,
                   std::size_t multiple = FlatLayout::kAlignment);

/// The same buckets in `slots` places, which they take in turn: bucket b shares its memory with b + slots. No
/// bucket moves where there is a slot for each.
FlatLayout in_slots(FlatLayout layout, std::size_t slots);

/// The number of buckets that are incomplete at the same time, when gradients arrive in the reverse of the
/// declared order: 1, or more where buckets of several types fill side by side.
std::size_t most_open_buckets(const FlatLayout& layout);

/// The way in which a Reducer reduces.
struct ReductionPlan {
    /// Buckets whose reduction may be under way, beside the open ones, where buckets share memory.
    static constexpr std::size_t kInFlight = 2;

    FlatLayout layout;  ///< of whole gradients
    /// Every rank gets only its slice of each average.
    bool scatters = false;
    /// Not 0: gradients share memory in time. Each bucket's averaged slice is copied to memory of its own,
    /// and only the next `open_buckets` incomplete buckets may be written.
    std::size_t open_buckets = 0;
    /// No bucket starts before finish(): ranks have the gradients of a bucket at other times, and make
    /// collectives of their own between them.
    bool starts_in_finish = false;
};

}  // namespace ddp
