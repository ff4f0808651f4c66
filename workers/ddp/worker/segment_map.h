#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "env/segment.h"
#include "env/unique_fd.h"

namespace ddp {

/// What a new segment is made for.
struct SegmentShape {
    std::uint32_t local_world_size = 1;
    std::uint32_t world_size = 1;
    std::uint32_t first_rank = 0;
    std::uint64_t generation = 0;
    std::uint32_t cpus = 0;  ///< 0: not known
    std::uint64_t arena_bytes = ddprun::kArenaBytes;
};
/// A nameless segment with its header filled in, CLOEXEC: for a world without a launcher. Throws Error.
ddprun::UniqueFd make_segment(const SegmentShape& shape);

/// The node's shared segment as this process sees it.
///
/// The arena is far larger than memory and may be larger than RLIMIT_AS, so pieces are mapped when asked for.
/// Mappings live as long as this object. Thread-safe.
class SegmentMap {
  public:
    /// Takes the descriptor over. Throws InvalidInput when it is not a segment of this release.
    explicit SegmentMap(ddprun::UniqueFd fd);
    ~SegmentMap();
    SegmentMap(const SegmentMap&) = delete;
    SegmentMap& operator=(const SegmentMap&) = delete;

    [[nodiscard]] ddprun::SegmentHeader& header() const { return *header_; }
    [[nodiscard]] ddprun::RankLine& line(std::uint32_t local_rank) const { return lines_[local_rank]; }

    /// `bytes` of the segment from `offset` (a multiple of the page size), read-write. The same piece asked
    /// for twice is mapped once. Throws Error with the kernel's reason.
    std::byte* map(std::uint64_t offset, std::uint64_t bytes);
    /// Gives the memory behind a page-aligned piece back to the kernel, for all processes; it reads as zero
    /// after.
    void discard(std::uint64_t offset, std::uint64_t bytes);

    /// Leaves a mark for a rank of ours that stays until this object ends, or the process however it ends
    /// (and those it forked that run no other program). False: the kernel cannot, or there is no /proc.
    bool mark_present(std::uint32_t local_rank);
    /// True also when that cannot be found out.
    [[nodiscard]] bool is_marked(std::uint32_t local_rank) const;

  private:
    struct Piece {
        void* address;
        std::size_t bytes;
    };
    void check_header() const;

    ddprun::UniqueFd fd_;
    ddprun::UniqueFd marks_;  ///< the same file, opened for ourselves: locks belong to an opening
    std::uint64_t file_bytes_ = 0;
    ddprun::SegmentHeader* header_ = nullptr;
    ddprun::RankLine* lines_ = nullptr;
    std::mutex mutex_;
    std::multimap<std::uint64_t, Piece> pieces_;
};

/// Makes the CPU pages behind a mapped piece exist now, where the kernel can (Linux 5.14), so that the first
/// collective does not pay for page faults. Best effort.
void populate(std::byte* address, std::size_t bytes);

}  // namespace ddp
