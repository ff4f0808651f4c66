#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddp/worker/call.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"

/// The layout of the CPU backend's part of the segment. Private to libddp.
///
///   arena      ArenaHead (the shares in use, the numbers of the groups that have them)
///              the first half: groups of the whole node; the second: sub-groups.
///              Each has an equal share of its half of the (sparse) arena, laid out for its n ranks:
///                Control | Identity[n] | RankLine[n] | MessageLine[n] | Slot[n][2] | staging[n][2] |
///                results[n][2] | Channel[n][n] (mapped when used) | allocate_shared regions
///
/// The rule that makes [2] enough everywhere: data written before step e goes to copy e % 2. Readers read it
/// after step e and before they arrive at step e + 1; the writer uses that copy again only after it has met
/// all ranks at step e + 1.
namespace ddp::cpu {

inline constexpr std::size_t kTinyBytes = 4096;         ///< longest message that fits in one step
inline constexpr std::size_t kAreaBytes = 1024 * 1024;  ///< staging per rank and copy
inline constexpr std::uint64_t kMaxGroups = 16;         ///< groups of the whole node that live at one time
inline constexpr std::uint64_t kMaxSplits = 48;         ///< sub-groups of a node that live at one time
inline constexpr std::uint64_t kNotShared = ~std::uint64_t{0};

/// A rank's part of a step: one cache line holds the flag, the call and the smallest messages.
struct alignas(128) Slot {
    std::atomic<std::uint32_t> step;  ///< futex word
    std::atomic<std::uint32_t> sleepers;
    Call call;
    std::uint64_t shared_at;  ///< place of its buffer in the shared regions, or kNotShared
    std::byte with_flag[24];
    std::byte behind_flag[kTinyBytes];

    /// The place of a message of that length. Longer ones start on a new line: vector loads that straddle two
    /// lines cost more than the line.
    [[nodiscard]] std::byte* message(std::size_t bytes) {
        return bytes <= sizeof with_flag ? with_flag : behind_flag;
    }
    [[nodiscard]] const std::byte* message(std::size_t bytes) const {
        return bytes <= sizeof with_flag ? with_flag : behind_flag;
    }
};
static_assert(offsetof(Slot, behind_flag) == 64);

/// A rank's identity, written once when it joins.
struct alignas(128) Identity {
    std::atomic<std::uint32_t> joined;
    std::uint32_t rank;
    std::uint32_t world_size;
    std::uint32_t pid;
    std::uint64_t pid_namespace;  ///< namespace of that pid: see joining.h
    std::uint32_t has_mark;       ///< 1: SegmentMap::is_marked tells whether the rank lives
    std::uint64_t layout;         ///< differs between releases with different layouts
    cpu_set_t cpus;
};

/// The message that a rank waits for, shown in other ranks' errors, and its wake-up word. The rank writes the
/// message with plain atomic stores; after a failure it stays.
struct alignas(128) MessageLine {
    std::atomic<std::uint32_t> operation;  ///< SegmentOp: Send, Recv, or None
    std::atomic<std::uint32_t> peer;       ///< its rank in the group
    std::atomic<std::uint64_t> seq;
    std::atomic<std::uint64_t> bytes;
    std::atomic<std::int64_t> since_ns;
    std::atomic<std::uint32_t> wakeups;   ///< futex word: counts wake-ups of the sleeping rank
    std::atomic<std::uint32_t> sleepers;  ///< 1 while the rank sleeps
};

/// Messages from one rank to another: a ring of pieces.
struct Channel {
    static constexpr std::uint32_t kPieces = 8;
    static constexpr std::size_t kPieceBytes = 16 * 1024;
    struct alignas(64) Piece {
        Call call;  ///< of the piece's message
        std::uint64_t bytes;
    };
    alignas(128) std::atomic<std::uint32_t> written;  ///< pieces so far
    alignas(128) std::atomic<std::uint32_t> read;     ///< pieces so far
    std::atomic<std::uint32_t> refused;               ///< not 0: the receiver expected another message
    Piece pieces[kPieces];
    alignas(4096) std::byte data[kPieces][kPieceBytes];
};

struct Control {
    std::atomic<std::uint32_t> left;  ///< ranks that have left the group; the last one frees its share
    alignas(128) std::atomic<std::uint32_t> joined;  ///< ranks that have joined; futex word
    std::atomic<std::uint64_t> foreign_claim;        ///< packed sizes of a process that fits no slot; 0 none
    /// A failure that one rank saw and that all waiting ranks must throw. 0 none, 1 being written, 2
    /// complete.
    std::atomic<std::uint32_t> failure_state;
    char failure_text[512];                            ///< text of encode_failure()
    alignas(128) std::atomic<std::uint32_t> arrived;   ///< arrivals at steps, when ranks share cores
    alignas(128) std::atomic<std::uint32_t> released;  ///< last complete step; futex word
};

/// One process group's share of the arena, mapped. "Rank" is the rank in the group.
class Arena {
  public:
    /// Whether the launcher sees the group's activity. Only one group per node may use the launcher's lines,
    /// because sequence numbers differ between groups.
    enum class Lines : std::uint8_t { OfTheNode, Private };

    /// A group of all ranks of the node: the next one of this local rank, which makes its groups in the order
    /// of the other ranks. Throws InvalidInput when kMaxGroups of this rank live. Until `deadline` it waits
    /// for a share where other ranks have yet to destroy a group that this one has destroyed, then throws
    /// TimeoutError; PeerLostError when the generation has ended.
    Arena(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, Lines lines,
          ddprun::TimePoint deadline = {});
    /// A sub-group: `members` are local ranks, by rank in the group; all members use the same `share`.
    Arena(std::shared_ptr<SegmentMap> segment, std::vector<std::uint32_t> members, std::uint32_t rank,
          std::uint32_t share);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// Takes a share for a sub-group; it is free again when all members have destroyed their Arena. Throws
    /// InvalidInput past kMaxSplits.
    static std::uint32_t take_share(SegmentMap& segment);
    static void give_back(SegmentMap& segment, std::uint32_t share);
    /// The control page of every rank's first group, for ranks that are not in it.
    static Control& first_control(SegmentMap& segment);

    [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(members_.size()); }
    [[nodiscard]] std::uint32_t rank() const { return rank_; }
    [[nodiscard]] const std::vector<std::uint32_t>& members() const { return members_; }
    /// The rank in the world. Before that rank has joined it is a guess: that the ranks of a node are
    /// consecutive, which some starters do not ensure (mpirun --map-by node).
    [[nodiscard]] int global_rank(std::uint32_t rank) const {
        const Identity& known = identities_[rank];
        if (known.joined.load(std::memory_order_acquire) != 0) return static_cast<int>(known.rank);
        return static_cast<int>(segment_->header().first_rank + members_[rank]);
    }
    [[nodiscard]] SegmentMap& segment() const { return *segment_; }
    [[nodiscard]] ddprun::RankLine& line(std::uint32_t rank) const {
        return own_lines_ != nullptr ? own_lines_[rank] : segment_->line(members_[rank]);
    }
    /// False for a sub-group, whose lines the launcher does not see.
    [[nodiscard]] bool has_lines_of_the_node() const { return own_lines_ == nullptr; }
    [[nodiscard]] MessageLine& message_line(std::uint32_t rank) const { return message_lines_[rank]; }
    [[nodiscard]] Control& control() const { return *control_; }
    [[nodiscard]] Identity& identity(std::uint32_t rank) const { return identities_[rank]; }
    [[nodiscard]] Slot& slot(std::uint32_t rank, std::uint32_t step) const {
        return slots_[2 * rank + step % 2];
    }
    [[nodiscard]] std::byte* staging(std::uint32_t rank, std::uint32_t step) const {
        return staging_ + (2 * rank + step % 2) * kAreaBytes;
    }
    [[nodiscard]] std::byte* results(std::uint32_t rank, std::uint32_t step) const {
        return results_ + (2 * rank + step % 2) * kAreaBytes;
    }
    [[nodiscard]] Channel& channel(std::uint32_t from, std::uint32_t to) const;

    /// Maps the next `bytes` behind all earlier regions. Every rank must ask for the same size.
    struct Piece {
        std::byte* address;
        std::uint64_t offset;
    };
    Piece take(std::uint64_t bytes);

  private:
    struct Layout;
    void require_room(std::uint64_t share_bytes) const;
    void clear_line() const;
    void lay_out(std::uint64_t base, std::uint64_t share_bytes, Lines lines);

    std::shared_ptr<SegmentMap> segment_;
    std::vector<std::uint32_t> members_;
    std::uint32_t rank_;
    bool is_split_ = false;
    std::uint32_t share_ = 0;
    std::uint64_t base_ = 0, channels_ = 0, next_ = 0, end_ = 0;
    Control* control_ = nullptr;
    Identity* identities_ = nullptr;
    ddprun::RankLine* own_lines_ = nullptr;
    MessageLine* message_lines_ = nullptr;
    Slot* slots_ = nullptr;
    std::byte *staging_ = nullptr, *results_ = nullptr;
};

/// A number that is equal for all builds with the same arena layout.
std::uint64_t layout_mark();

}  // namespace ddp::cpu
