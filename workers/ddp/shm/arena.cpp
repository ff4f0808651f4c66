#include "ddp/shm/arena.h"

#include <fmt/core.h>

#include <bit>
#include <numeric>

#include "ddp/worker/slices.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::RankLine;
using ddprun::SegmentHeader;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = 2 * 1024 * 1024;

struct ArenaHead {
    std::atomic<std::uint64_t> splits;  ///< one bit per share in use
    /// One std::atomic<std::uint32_t> per local rank follows: the number of groups that it has made.
};
static_assert(kMaxSplits <= 64);
static_assert(sizeof(RankLine) % alignof(MessageLine) == 0);

/// The division of the arena, as offsets in the segment; the same for all ranks.
struct Partition {
    std::uint64_t head_bytes, first_group, group_bytes, first_split, split_bytes;
};
Partition partition_of(const SegmentHeader& header) {
    Partition at{};
    at.head_bytes =
        round_up(sizeof(ArenaHead) + header.local_world_size * sizeof(std::atomic<std::uint32_t>), kPage);
    at.first_group = round_up(header.arena_offset + at.head_bytes, kHugePage);
    const std::uint64_t end = header.arena_offset + header.arena_bytes;
    const std::uint64_t half = end > at.first_group ? (end - at.first_group) / 2 / kHugePage * kHugePage : 0;
    at.group_bytes = half / kMaxGroups / kHugePage * kHugePage;
    at.first_split = at.first_group + half;
    at.split_bytes = half / kMaxSplits / kHugePage * kHugePage;
    if (at.group_bytes == 0) {
        throw InvalidInput(fmt::format(
            "the ranks' shared memory can have {} only, which is not enough for any group: raise the "
            "hard limit on file sizes (ulimit -Hf)",
            ddprun::format_bytes(header.arena_bytes)));
    }
    return at;
}

ArenaHead& head_of(SegmentMap& segment, const Partition& at) {
    return *reinterpret_cast<ArenaHead*>(segment.map(segment.header().arena_offset, at.head_bytes));
}

std::uint64_t next_group(SegmentMap& segment, const Partition& at, std::uint32_t local_rank) {
    auto* counters = reinterpret_cast<std::atomic<std::uint32_t>*>(&head_of(segment, at) + 1);
    const std::uint32_t index = counters[local_rank].fetch_add(1);
    if (index >= kMaxGroups) {
        throw InvalidInput(
            fmt::format("this process has made {} process groups; one generation has room for {}: "
                        "keep one for the whole run",
                        index, kMaxGroups));
    }
    return index;
}

std::vector<std::uint32_t> whole_node(const SegmentMap& segment) {
    std::vector<std::uint32_t> members(segment.header().local_world_size);
    std::iota(members.begin(), members.end(), 0U);
    return members;
}

}  // namespace

/// Offsets in the share of a group of n ranks.
struct Arena::Layout {
    std::uint64_t identities, lines, messages, slots, staging, results, channels, regions;

    explicit Layout(std::uint64_t n)
        : identities(round_up(sizeof(Control), kPage)),
          lines(round_up(identities + n * sizeof(Identity), kPage)),
          messages(lines + n * sizeof(RankLine)),
          slots(round_up(messages + n * sizeof(MessageLine), kPage)),
          staging(round_up(slots + n * 2 * sizeof(Slot), kHugePage)),
          results(staging + n * 2 * kAreaBytes),
          channels(results + n * 2 * kAreaBytes),
          regions(round_up(channels + n * n * sizeof(Channel), kHugePage)) {}
};

Arena::Arena(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, Lines lines)
    : segment_(std::move(segment)), members_(whole_node(*segment_)), rank_(local_rank) {
    const Partition at = partition_of(segment_->header());
    lay_out(at.first_group + at.group_bytes * next_group(*segment_, at, local_rank), at.group_bytes, lines);
}

Arena::Arena(std::shared_ptr<SegmentMap> segment, std::vector<std::uint32_t> members, std::uint32_t rank,
             std::uint32_t share)
    : segment_(std::move(segment)), members_(std::move(members)), rank_(rank), split_(share) {
    const Partition at = partition_of(segment_->header());
    lay_out(at.first_split + at.split_bytes * share, at.split_bytes, Lines::Private);
}

void Arena::lay_out(std::uint64_t base, std::uint64_t share_bytes, Lines lines) {
    const Layout at(ranks());
    if (share_bytes < at.regions) {
        throw InvalidInput(fmt::format(
            "the ranks' shared memory can have {} only, too little for {} ranks: raise the hard limit "
            "on file sizes (ulimit -Hf)",
            ddprun::format_bytes(segment_->header().arena_bytes), ranks()));
    }
    std::byte* mapped = segment_->map(base, at.channels);
    control_ = reinterpret_cast<Control*>(mapped);
    identities_ = reinterpret_cast<Identity*>(mapped + at.identities);
    if (lines == Lines::Private) own_lines_ = reinterpret_cast<RankLine*>(mapped + at.lines);
    message_lines_ = reinterpret_cast<MessageLine*>(mapped + at.messages);
    slots_ = reinterpret_cast<Slot*>(mapped + at.slots);
    staging_ = mapped + at.staging;
    results_ = mapped + at.results;
    base_ = base;
    channels_ = base + at.channels;
    next_ = base + at.regions;
    end_ = base + share_bytes;
}

// A sub-group's share is used again, and its next owner expects zeros.
Arena::~Arena() {
    if (!split_ || control_ == nullptr || control_->left.fetch_add(1) + 1 != ranks()) return;
    segment_->discard(base_, end_ - base_);
    give_back(*segment_, *split_);
}

void Arena::give_back(SegmentMap& segment, std::uint32_t share) {
    head_of(segment, partition_of(segment.header())).splits.fetch_and(~(std::uint64_t{1} << share));
}

std::uint32_t Arena::take_share(SegmentMap& segment) {
    std::atomic<std::uint64_t>& taken = head_of(segment, partition_of(segment.header())).splits;
    for (std::uint64_t seen = taken.load();;) {
        const auto free = static_cast<std::uint32_t>(std::countr_one(seen));
        if (free >= kMaxSplits) {
            throw InvalidInput(fmt::format(
                "split: this node has {} sub-groups, and there is room for no more: end some of them",
                kMaxSplits));
        }
        if (taken.compare_exchange_weak(seen, seen | std::uint64_t{1} << free)) return free;
    }
}

Control& Arena::first_control(SegmentMap& segment) {
    const Layout layout(segment.header().local_world_size);
    return *reinterpret_cast<Control*>(
        segment.map(partition_of(segment.header()).first_group, layout.channels));
}

Channel& Arena::channel(std::uint32_t from, std::uint32_t to) const {
    const std::uint64_t offset = channels_ + (std::uint64_t{from} * ranks() + to) * sizeof(Channel);
    return *reinterpret_cast<Channel*>(segment_->map(offset, sizeof(Channel)));
}

Arena::Piece Arena::take(std::uint64_t bytes) {
    if (bytes > end_ - next_) {
        throw InvalidInput(
            fmt::format("allocate_shared: {} bytes for all ranks do not fit, the group's arena has {} left",
                        bytes, end_ - next_));
    }
    const std::uint64_t offset = next_;
    std::byte* address = segment_->map(offset, bytes);
    next_ += round_up(bytes, kHugePage);
    return {address, offset};
}

std::uint64_t layout_mark() {
    std::uint64_t mark = ddprun::kSegmentVersion;
    for (const std::uint64_t part :
         {std::uint64_t{4}, std::uint64_t{sizeof(Slot)}, std::uint64_t{sizeof(Identity)},
          std::uint64_t{sizeof(Control)}, std::uint64_t{sizeof(Channel)}, std::uint64_t{kAreaBytes},
          kMaxGroups, kMaxSplits}) {
        mark = mark * 1'000'003 + part;
    }
    return mark;
}

}  // namespace ddp::cpu
