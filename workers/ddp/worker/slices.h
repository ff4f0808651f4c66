#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "ddp/process_group.h"

/// Buffers divided into one slice per rank, one after the other, and the comparison of the ranks' counts.
namespace ddp {

/// The beginning of a rank's slice of `whole`; each slice has `bytes` bytes.
inline std::byte* slice(const Buffer& whole, int rank, std::size_t bytes) {
    return static_cast<std::byte*>(whole.data) + static_cast<std::size_t>(rank) * bytes;
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
    [[nodiscard]] std::size_t longest() const { return each_; }
    /// How much of a rank's slice lies in the `most` bytes that begin at byte `at` of the slice.
    [[nodiscard]] std::size_t within(std::size_t rank, std::size_t at, std::size_t most) const {
        return at < length(rank) ? std::min(most, length(rank) - at) : 0;
    }
    [[nodiscard]] Buffer of(const Buffer& whole, int rank) const;

  private:
    explicit Slices(std::size_t each) : each_(each) {}
    [[nodiscard]] std::size_t end(std::size_t ranks) const { return ranks == 0 ? 0 : ends_[ranks - 1]; }

    std::size_t each_ = 0;           ///< length of the longest
    std::vector<std::size_t> ends_;  ///< empty when all have equal lengths
};

// Checks of the counts that ranks exchange before an uneven collective. `all_counts` holds, for each rank,
// its rank in the world and then its counts. Pure; "" when all agree.

/// "rank 0 counts 3, 4, rank 2 counts 3, 5": for all_gather_v and reduce_scatter_v, where all counts are
/// equal.
std::string unequal_counts(const std::vector<Counts>& all_counts);
/// "rank 2 sends 5 elements to rank 0, which receives 4": for all_to_all_v; sent counts come before received
/// ones.
std::string unmatched_counts(const std::vector<Counts>& all_counts);

}  // namespace ddp
