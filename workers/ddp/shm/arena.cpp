#include "ddp/shm/arena.h"

#include <fmt/core.h>

#include <bit>
#include <numeric>
#include <optional>

#include "ddp/shm/waiting.h"
#include "ddp/worker/slices.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::RankLine;
using ddprun::SegmentHeader;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kHugePage = 2 * 1024 * 1024;

constexpr std::uint64_t kAnnounced =
    64;  // more groups than ranks can be apart: each waits for all at a group

struct ArenaHead {
    std::atomic<std::uint64_t> splits;                 ///< one bit per share in use
    std::atomic<std::uint64_t> groups;                 ///< likewise, of groups of the whole node
    std::atomic<std::uint64_t> announced[kAnnounced];  ///< see announcement()
    std::atomic<std::uint32_t> given_back;             ///< shares of groups so far; futex word
    /// One RankGroups per local rank follows.
};
struct RankGroups {
    std::atomic<std::uint32_t> made;   ///< groups of the whole node so far
    std::atomic<std::uint32_t> alive;  ///< those of them that are not destroyed
};

/// The word that tells the ranks which share group number `number` has. Number n uses announced[n %
/// kAnnounced]; the first rank that comes to it writes the word.
constexpr std::uint64_t announcement(std::uint64_t number, std::uint32_t share) {
    return (number + 1) << 8 | share;
}
constexpr std::uint64_t numbered(std::uint64_t word) { return word >> 8; }  // 1 + the number; 0: none
constexpr std::uint32_t share_in(std::uint64_t word) { return static_cast<std::uint32_t>(word & 0xff); }

static_assert(kMaxSplits <= 64 && kMaxGroups <= 64);
static_assert(sizeof(RankLine) % alignof(MessageLine) == 0);

/// The division of the arena, as offsets in the segment; the same for all ranks.
struct Partition {
    std::uint64_t head_bytes, first_group, group_bytes, first_split, split_bytes;
};
Partition partition_of(const SegmentHeader& header) {
    Partition at{};
    at.head_bytes = round_up(sizeof(ArenaHead) + header.local_world_size * sizeof(RankGroups), kPage);
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

RankGroups& groups_of(SegmentMap& segment, std::uint32_t local_rank) {
    return reinterpret_cast<RankGroups*>(&head_of(segment, partition_of(segment.header())) + 1)[local_rank];
}

/// Takes the lowest free bit; nullopt when `most` are in use.
std::optional<std::uint32_t> take_bit(std::atomic<std::uint64_t>& taken, std::uint64_t most) {
    for (std::uint64_t seen = taken.load();;) {
        const auto free = static_cast<std::uint32_t>(std::countr_one(seen));
        if (free >= most) return std::nullopt;
        if (taken.compare_exchange_weak(seen, seen | std::uint64_t{1} << free)) return free;
    }
}
void give_bit_back(std::atomic<std::uint64_t>& taken, std::uint32_t bit) {
    taken.fetch_and(~(std::uint64_t{1} << bit));
}

/// The first group has share 0 in any order of arrival: see Arena::first_control.
std::optional<std::uint32_t> take_group(ArenaHead& head, std::uint64_t number) {
    if (number > 0) return take_bit(head.groups, kMaxGroups);
    head.groups.fetch_or(1);
    return 0;
}

/// The share of group number `number`: the announced one, or one that this rank takes and announces. nullopt:
/// all are in use. A rank that is killed in between keeps one share from the others, in a generation that its
/// end ends.
std::optional<std::uint32_t> share_of(ArenaHead& head, std::uint64_t number) {
    std::atomic<std::uint64_t>& place = head.announced[number % kAnnounced];
    std::uint64_t seen = place.load();
    if (numbered(seen) == number + 1) return share_in(seen);
    if (numbered(seen) > number + 1)
        throw Error(
            fmt::format("joining process group {} of this process: the other ranks have gone on to group {}",
                        number + 1, numbered(seen)));
    const std::optional<std::uint32_t> mine = take_group(head, number);
    if (!mine || place.compare_exchange_strong(seen, announcement(number, *mine))) return mine;
    if (number > 0) give_bit_back(head.groups, *mine);
    return share_in(seen);
}

/// The share of this rank's next group.
std::uint32_t next_group(SegmentMap& segment, const Partition& at, std::uint32_t local_rank,
                         ddprun::TimePoint deadline) {
    RankGroups& mine = groups_of(segment, local_rank);
    ArenaHead& head = head_of(segment, at);
    const std::string attempt = fmt::format("rank {}: joining", segment.header().first_rank + local_rank);
    if (const std::uint32_t alive = mine.alive.load(); alive >= kMaxGroups) {
        throw InvalidInput(
            fmt::format("{}: this process has {} process groups, and there is room for no more: destroy "
                        "one first, or make more by split()",
                        attempt, alive));
    }
    for (;;) {
        const std::uint32_t before = head.given_back.load();
        if (const std::optional<std::uint32_t> share = share_of(head, mine.made.load())) {
            mine.made.fetch_add(1);
            mine.alive.fetch_add(1);
            return *share;
        }
        throw_if_lost(segment.header(), attempt);
        if (ddprun::MonotonicClock::now() >= deadline) {
            throw TimeoutError(
                fmt::format("{}: the node has room for {} process groups, and other ranks have not "
                            "destroyed some that this rank has destroyed: destroy them on all ranks",
                            attempt, kMaxGroups));
        }
        futex_wait(head.given_back, before, kSleepSlice);
    }
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

Arena::Arena(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, Lines lines,
             ddprun::TimePoint deadline)
    : segment_(std::move(segment)), members_(whole_node(*segment_)), rank_(local_rank) {
    const Partition at = partition_of(segment_->header());
    require_room(at.group_bytes);
    share_ = next_group(*segment_, at, local_rank, deadline);
    lay_out(at.first_group + at.group_bytes * share_, at.group_bytes, lines);
    if (lines == Lines::OfTheNode && groups_of(*segment_, rank_).alive.load() == 1) clear_line();
}

Arena::Arena(std::shared_ptr<SegmentMap> segment, std::vector<std::uint32_t> members, std::uint32_t rank,
             std::uint32_t share)
    : segment_(std::move(segment)),
      members_(std::move(members)),
      rank_(rank),
      is_split_(true),
      share_(share) {
    const Partition at = partition_of(segment_->header());
    require_room(at.split_bytes);
    lay_out(at.first_split + at.split_bytes * share, at.split_bytes, Lines::Private);
}

void Arena::require_room(std::uint64_t share_bytes) const {
    const std::uint64_t needed = Layout(ranks()).regions;
    if (share_bytes >= needed) return;
    if (segment_->header().arena_bytes >= ddprun::kArenaBytes)
        throw InvalidInput(fmt::format(
            "{} of {} ranks on one node needs {} of shared memory, because each pair of ranks has channels of its own; "
            "there is room for {}: use fewer ranks per node",
            is_split_ ? "a sub-group" : "a process group", ranks(), ddprun::format_bytes(needed),
            ddprun::format_bytes(share_bytes)));
    throw InvalidInput(fmt::format(
        "the ranks' shared memory can have {} only, too little for {} ranks: raise the hard limit "
        "on file sizes (ulimit -Hf)",
        ddprun::format_bytes(segment_->header().arena_bytes), ranks()));
}

/// The launcher and communication_seconds() see the new group's calls, which count from 1.
void Arena::clear_line() const {
    RankLine& line = segment_->line(rank_);
    line.started_seq.store(0);
    line.finished_seq.store(0);
    line.comm_ns.store(0);
}

void Arena::lay_out(std::uint64_t base, std::uint64_t share_bytes, Lines lines) {
    const Layout at(ranks());
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

// The share is used again, and its next owner expects zeros. No rank uses it once all have left.
Arena::~Arena() {
    if (!is_split_) groups_of(*segment_, rank_).alive.fetch_sub(1);
    if (control_->left.fetch_add(1) + 1 != ranks()) return;
    if (!segment_->discard(base_, end_ - base_)) return;
    if (is_split_) {
        give_back(*segment_, share_);
        return;
    }
    ArenaHead& head = head_of(*segment_, partition_of(segment_->header()));
    give_bit_back(head.groups, share_);
    head.given_back.fetch_add(1);
    futex_wake_all(head.given_back);
}

void Arena::give_back(SegmentMap& segment, std::uint32_t share) {
    give_bit_back(head_of(segment, partition_of(segment.header())).splits, share);
}

std::uint32_t Arena::take_share(SegmentMap& segment) {
    const auto share = take_bit(head_of(segment, partition_of(segment.header())).splits, kMaxSplits);
    if (share) return *share;
    throw InvalidInput(fmt::format(
        "split: this node has {} sub-groups, and there is room for no more: end some of them", kMaxSplits));
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
         {std::uint64_t{6}, std::uint64_t{sizeof(ArenaHead)}, std::uint64_t{sizeof(Slot)},
          std::uint64_t{sizeof(Identity)}, std::uint64_t{sizeof(Control)}, std::uint64_t{sizeof(Channel)},
          std::uint64_t{kAreaBytes}, kMaxGroups, kMaxSplits}) {
        mark = mark * 1'000'003 + part;
    }
    return mark;
}

}  // namespace ddp::cpu
