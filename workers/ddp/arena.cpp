#include "ddp/arena.h"

#include <fmt/core.h>

namespace ddp::cpu {

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = 2 * 1024 * 1024;

constexpr std::uint64_t up(std::uint64_t value, std::uint64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/// Where things lie, as offsets in the segment; the same for all ranks.
struct Layout {
    std::uint64_t head_bytes, identities, slots, staging, results,
        fixed;  // the middle four from a group's begin
    std::uint64_t first_group, share;
};

Layout layout_of(const ddprun::SegmentHeader& header) {
    const std::uint64_t n = header.local_world_size;
    Layout at{};
    at.head_bytes = up(n * sizeof(std::uint32_t), kPage);
    at.identities = up(sizeof(Control), kPage);
    at.slots = up(at.identities + n * sizeof(Identity), kPage);
    at.staging = up(at.slots + n * 2 * sizeof(Slot), kHugePage);
    at.results = at.staging + n * 2 * kAreaBytes;
    at.fixed = at.results + n * 2 * kAreaBytes;
    at.first_group = up(header.arena_offset + at.head_bytes, kHugePage);
    const std::uint64_t end = header.arena_offset + header.arena_bytes;
    at.share = end > at.first_group ? (end - at.first_group) / kMaxGroups / kHugePage * kHugePage : 0;
    if (at.share < at.fixed) {
        throw InvalidInput(
            fmt::format("the segment's arena of {} bytes is too small for {} ranks", header.arena_bytes, n));
    }
    return at;
}

std::uint64_t next_group(SegmentMap& segment, const Layout& at, std::uint32_t local_rank) {
    std::byte* head = segment.map(segment.header().arena_offset, at.head_bytes);
    const std::uint32_t index = reinterpret_cast<std::atomic<std::uint32_t>*>(head)[local_rank].fetch_add(1);
    if (index >= kMaxGroups) {
        throw InvalidInput(
            fmt::format("this process has made {} process groups; one generation has room for {}: "
                        "keep one for the whole run",
                        index, kMaxGroups));
    }
    return index;
}

}  // namespace

Arena::Arena(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank)
    : segment_(std::move(segment)), ranks_(segment_->header().local_world_size) {
    const Layout at = layout_of(segment_->header());
    const std::uint64_t base = at.first_group + at.share * next_group(*segment_, at, local_rank);
    std::byte* mapped = segment_->map(base, at.fixed);
    control_ = reinterpret_cast<Control*>(mapped);
    identities_ = reinterpret_cast<Identity*>(mapped + at.identities);
    slots_ = reinterpret_cast<Slot*>(mapped + at.slots);
    staging_ = mapped + at.staging;
    results_ = mapped + at.results;
    next_ = base + at.fixed;
    end_ = base + at.share;
}

Control& Arena::first_control(SegmentMap& segment) {
    const Layout at = layout_of(segment.header());
    return *reinterpret_cast<Control*>(segment.map(at.first_group, at.fixed));
}

Arena::Piece Arena::take(std::uint64_t bytes) {
    if (bytes > end_ - next_) {
        throw InvalidInput(
            fmt::format("allocate_shared: {} bytes for all ranks do not fit, the group's arena has {} left",
                        bytes, end_ - next_));
    }
    const std::uint64_t offset = next_;
    std::byte* address = segment_->map(offset, bytes);
    next_ += up(bytes, kHugePage);
    return {address, offset};
}

std::uint64_t layout_mark() {
    std::uint64_t mark = ddprun::kSegmentVersion;
    for (const std::uint64_t part :
         {std::uint64_t{1}, std::uint64_t{sizeof(Slot)}, std::uint64_t{sizeof(Identity)},
          std::uint64_t{sizeof(Control)}, std::uint64_t{kAreaBytes}, kMaxGroups}) {
        mark = mark * 1'000'003 + part;
    }
    return mark;
}

}  // namespace ddp::cpu
