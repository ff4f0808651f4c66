#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "env/segment.h"
#include "env/unique_fd.h"

namespace ddp {

struct SegmentShape {
    std::uint32_t local_world_size = 1;
    std::uint32_t world_size = 1;
    std::uint32_t first_rank = 0;
    std::uint64_t generation = 0;
    std::uint32_t cpus = 0;  ///< 0: unknown
    std::uint64_t arena_bytes = ddprun::kArenaBytes;
};
/// Makes a nameless CLOEXEC segment with its header, for a world without a launcher. Throws Error.
ddprun::UniqueFd make_segment(const SegmentShape& shape);

/// The node's shared segment, mapped into this process.
///
/// The arena is far larger than memory and may exceed RLIMIT_AS, so pieces are mapped on demand. Mappings
/// live as long as this object. Thread-safe.
class SegmentMap {
  public:
    /// Takes the descriptor over. Throws InvalidInput when it is not a segment of this release.
    explicit SegmentMap(ddprun::UniqueFd fd);
    ~SegmentMap();
    SegmentMap(const SegmentMap&) = delete;
    SegmentMap& operator=(const SegmentMap&) = delete;

    [[nodiscard]] int descriptor() const { return fd_.get(); }
    [[nodiscard]] ddprun::SegmentHeader& header() const { return *header_; }
    [[nodiscard]] ddprun::RankLine& line(std::uint32_t local_rank) const { return lines_[local_rank]; }

    /// Maps `bytes` of the segment from `offset` (a multiple of the page size), read-write. A repeated
    /// request returns the same mapping. Throws Error with the kernel's reason.
    std::byte* map(std::uint64_t offset, std::uint64_t bytes);
    /// Gives the memory behind a page-aligned piece back to the kernel, for all processes; it reads as zero
    /// after. False: the kernel cannot do it.
    bool discard(std::uint64_t offset, std::uint64_t bytes);

    /// Sets a mark for a rank of this process. It stays until this object or the process ends, and while
    /// children that the process forked run no other program. False: the kernel cannot do it, or there is no
    /// /proc.
    bool mark_present(std::uint32_t local_rank);
    /// Returns true also when the kernel cannot tell.
    [[nodiscard]] bool is_marked(std::uint32_t local_rank) const;

  private:
    struct Piece {
        void* address;
        std::size_t bytes;
    };
    void check_header() const;

    ddprun::UniqueFd fd_;
    ddprun::UniqueFd marks_;  ///< the same file opened again: locks belong to one open file description
    std::uint64_t file_bytes_ = 0;
    ddprun::SegmentHeader* header_ = nullptr;
    ddprun::RankLine* lines_ = nullptr;
    std::mutex mutex_;
    std::multimap<std::uint64_t, Piece> pieces_;
};

/// Allocates the pages behind a mapped piece now, where the kernel can (Linux 5.14), so that the first
/// collective has no page faults. Best effort.
void populate(std::byte* address, std::size_t bytes);

}  // namespace ddp
