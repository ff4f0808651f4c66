#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "ddp/process_group.h"
#include "env/segment.h"

/// Buffers divided into one slice per rank, one after the other, and the comparison of the ranks' counts.
namespace ddp {

/// Memory that is only read, in a place for any memory.
inline Buffer writable(const ConstBuffer& buffer) {
    return {const_cast<void*>(buffer.data), buffer.count, buffer.dtype, buffer.device};
}

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/// Offsets and lengths in bytes.
class Slices {
  public:
    /// Equal lengths.
    static Slices even(std::size_t each) { return Slices(each); }
    Slices(const Counts& counts, DType type);

    [[nodiscard]] std::size_t offset(std::size_t rank) const {
        return ends_.empty() ? rank * each_ : end(rank);
    }
    [[nodiscard]] std::size_t length(std::size_t rank) const {
        return ends_.empty() ? each_ : end(rank + 1) - end(rank);
    }
    [[nodiscard]] bool are_even() const { return ends_.empty(); }
    [[nodiscard]] std::size_t longest() const { return each_; }
    /// How much of a rank's slice lies in the `most` bytes that begin at byte `at` of the slice.
    [[nodiscard]] std::size_t within(std::size_t rank, std::size_t at, std::size_t most) const {
        return at < length(rank) ? std::min(most, length(rank) - at) : 0;
    }
    [[nodiscard]] Buffer of(const Buffer& whole, int rank) const;
    [[nodiscard]] ConstBuffer of(const ConstBuffer& whole, int rank) const {
        return of(writable(whole), rank);
    }

  private:
    explicit Slices(std::size_t each) : each_(each) {}
    [[nodiscard]] std::size_t end(std::size_t ranks) const { return ranks == 0 ? 0 : ends_[ranks - 1]; }

    std::size_t each_ = 0;           ///< length of the longest
    std::vector<std::size_t> ends_;  ///< empty when all have equal lengths
};

/// Compares the counts that ranks exchange before an uneven collective. `all_counts` holds, for each rank,
/// its rank in the world and then its counts. Pure; "" when all agree. For all_to_all_v, whose sent counts
/// come before the received ones: "rank 2 sends 5 elements to rank 0, which receives 4"; for the others,
/// where all counts are equal: "rank 0 counts 3, 4, rank 2 counts 3, 5".
std::string compare_counts(ddprun::SegmentOp operation, const std::vector<Counts>& all_counts);
/// The largest count of any rank.
std::size_t longest_of(const std::vector<Counts>& all_counts);

}  // namespace ddp
