#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "ddp/process_group.h"

/// Buffers that are cut into one slice per rank, one behind the other, and what ranks find when they compare
/// how they cut.
namespace ddp {

/// Where the slice of a rank begins in `whole`, of which each slice has so many bytes.
inline std::byte* slice(const Buffer& whole, int rank, std::size_t bytes) {
    return static_cast<std::byte*>(whole.data) + static_cast<std::size_t>(rank) * bytes;
}

/// Offsets and lengths in bytes.
class Slices {
  public:
    /// All of the same length.
    static Slices even(std::size_t each) { return Slices(each); }
    Slices(const Counts& counts, DType type);

    [[nodiscard]] std::size_t offset(std::size_t rank) const {
        return ends_.empty() ? rank * each_ : end(rank);
    }
    [[nodiscard]] std::size_t length(std::size_t rank) const {
        return ends_.empty() ? each_ : end(rank + 1) - end(rank);
    }
    [[nodiscard]] std::size_t longest() const { return each_; }
    /// How much of a rank's slice lies in the `most` bytes from `at` of it.
    [[nodiscard]] std::size_t within(std::size_t rank, std::size_t at, std::size_t most) const {
        return at < length(rank) ? std::min(most, length(rank) - at) : 0;
    }
    [[nodiscard]] Buffer of(const Buffer& whole, int rank) const;

  private:
    explicit Slices(std::size_t each) : each_(each) {}
    [[nodiscard]] std::size_t end(std::size_t ranks) const { return ranks == 0 ? 0 : ends_[ranks - 1]; }

    std::size_t each_ = 0;           ///< of the longest
    std::vector<std::size_t> ends_;  ///< none where all are alike
};

// What ranks tell each other before an uneven collective: their rank in the world, and their counts. Pure; ""
// where they agree.

/// "rank 0 counts 3, 4, rank 2 counts 3, 5": of all_gather_v and reduce_scatter_v, all count alike.
std::string unequal_counts(const std::vector<Counts>& told);
/// "rank 2 sends 5 elements to rank 0, which receives 4": of all_to_all_v; sent and then received counts.
std::string unmatched_counts(const std::vector<Counts>& told);

}  // namespace ddp
