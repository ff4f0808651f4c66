#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ddp/worker/call.h"
#include "ddp/worker/segment_map.h"

/// How the CPU backend lays its part of the segment out. Private to libddp.
///
///   arena      ArenaHead (how many groups each local rank has made so far, which shares splits have taken)
///              the first half: group 0, group 1, ... of the whole node; the second: sub-groups.
///              Each has an equal share of its half of the (sparse) arena, laid out for its n ranks:
///                Control | Identity[n] | RankLine[n] | MessageLine[n] | Slot[n][2] | staging[n][2] |
///                results[n][2] | Channel[n][n] (mapped when used) | allocate_shared regions
///
/// The rule that makes [2] enough everywhere: what a rank writes before step e goes to copy e % 2. It is read
/// after step e and before its reader arrives at step e + 1; the writer touches that copy again only after it
/// has met everybody at step e + 1.
namespace ddp::cpu {

inline constexpr std::size_t kTinyBytes = 4096;         ///< up to here one step moves a whole message
inline constexpr std::size_t kAreaBytes = 1024 * 1024;  ///< staging per rank and copy
inline constexpr std::uint64_t kMaxGroups = 16;         ///< process groups per rank and generation
inline constexpr std::uint64_t kMaxSplits = 48;         ///< sub-groups of a node that live at one time
inline constexpr std::uint64_t kNotShared = ~std::uint64_t{0};

/// What a rank shows at a step: one cache line carries the flag, the call and the smallest messages.
struct alignas(128) Slot {
    std::atomic<std::uint32_t> step;  ///< futex word
    std::atomic<std::uint32_t> sleepers;
    Call call;
    std::uint64_t shared_at;  ///< where its buffer lies in the shared regions, or kNotShared
    std::byte with_flag[24];
    std::byte behind_flag[kTinyBytes];

    /// Where a message of that length goes. Longer ones start on a line of their own: vector loads that
    /// straddle two lines cost more than the line.
    [[nodiscard]] std::byte* message(std::size_t bytes) {
        return bytes <= sizeof with_flag ? with_flag : behind_flag;
    }
    [[nodiscard]] const std::byte* message(std::size_t bytes) const {
        return bytes <= sizeof with_flag ? with_flag : behind_flag;
    }
};
static_assert(offsetof(Slot, behind_flag) == 64);

/// Who a rank is, written once when it joins.
struct alignas(128) Identity {
    std::atomic<std::uint32_t> joined;
    std::uint32_t rank;
    std::uint32_t world_size;
    std::uint32_t pid;
    std::uint64_t pid_space;  ///< in which that pid counts: see roster.h
    std::uint32_t has_mark;   ///< 1: SegmentMap::is_marked tells whether it is there
    std::uint64_t layout;     ///< differs when two releases would disagree about this file
    cpu_set_t cpus;
};

/// Which message a rank waits for, for those who ask why it does not come, and what wakes it. The first is
/// written by it with plain atomic stores; of one that failed it stays.
struct alignas(128) MessageLine {
    std::atomic<std::uint32_t> operation;  ///< SegmentOp: Send, Recv, or None
    std::atomic<std::uint32_t> peer;       ///< its rank in the group
    std::atomic<std::uint64_t> seq;
    std::atomic<std::uint64_t> bytes;
    std::atomic<std::int64_t> since_ns;
    std::atomic<std::uint32_t> bell;      ///< futex word: rung when a channel of a sleeping rank moves
    std::atomic<std::uint32_t> sleepers;  ///< it sleeps
};

/// Messages from one rank to another: a ring of pieces.
struct Channel {
    static constexpr std::uint32_t kPieces = 8;
    static constexpr std::size_t kPieceBytes = 16 * 1024;
    struct alignas(64) Piece {
        Call call;  ///< of the message that it belongs to
        std::uint64_t bytes;
    };
    alignas(128) std::atomic<std::uint32_t> written;  ///< pieces so far
    alignas(128) std::atomic<std::uint32_t> read;     ///< pieces so far
    std::atomic<std::uint32_t> refused;               ///< not 0: the receiver expected another message
    Piece pieces[kPieces];
    alignas(4096) std::byte data[kPieces][kPieceBytes];
};

struct Control {
    std::atomic<std::uint32_t> left;  ///< ranks that have left a sub-group; the last gives its share back
    alignas(128) std::atomic<std::uint32_t> joined;  ///< ranks that have joined; futex word
    std::atomic<std::uint64_t> stranger;             ///< packed claim of a process that fits no slot; 0 none
    /// What a rank found wrong and nobody else of the node can see: all who wait are told. 0 none, 1 being
    /// written, 2 there.
    std::atomic<std::uint32_t> has_complaint;
    char complaint[512];                               ///< as told() gives it
    alignas(128) std::atomic<std::uint32_t> arrived;   ///< arrivals at steps, when ranks share cores
    alignas(128) std::atomic<std::uint32_t> released;  ///< last complete step; futex word
};

/// One process group's share of the arena, mapped. "Rank" is the rank in the group.
class Arena {
  public:
    /// Whether the launcher sees what the group does. Its numbers would not fit those of another group.
    enum class Lines : std::uint8_t { OfTheNode, Private };

    /// All ranks of the node: takes the next group of this local rank. Throws InvalidInput past kMaxGroups.
    Arena(std::shared_ptr<SegmentMap> segment, std::uint32_t local_rank, Lines lines);
    /// Some of them: `members` are the local ranks, by rank in the group; the others use the same `share`.
    Arena(std::shared_ptr<SegmentMap> segment, std::vector<std::uint32_t> members, std::uint32_t rank,
          std::uint32_t share);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// A share for a sub-group; it is free again when all members have ended their Arena. Throws InvalidInput
    /// past kMaxSplits.
    static std::uint32_t take_share(SegmentMap& segment);
    static void give_back(SegmentMap& segment, std::uint32_t share);
    /// The control page of every rank's first group, without taking part in it.
    static Control& first_control(SegmentMap& segment);

    [[nodiscard]] std::uint32_t ranks() const { return static_cast<std::uint32_t>(members_.size()); }
    [[nodiscard]] std::uint32_t rank() const { return rank_; }
    [[nodiscard]] const std::vector<std::uint32_t>& members() const { return members_; }
    /// In the world. Of one that has not joined it is a guess: that the node's ranks follow each other, which
    /// a starter may do otherwise (mpirun --map-by node).
    [[nodiscard]] int global_rank(std::uint32_t rank) const {
        const Identity& known = identities_[rank];
        if (known.joined.load(std::memory_order_acquire) != 0) return static_cast<int>(known.rank);
        return static_cast<int>(segment_->header().first_rank + members_[rank]);
    }
    [[nodiscard]] SegmentMap& segment() const { return *segment_; }
    [[nodiscard]] ddprun::RankLine& line(std::uint32_t rank) const {
        return own_lines_ != nullptr ? own_lines_[rank] : segment_->line(members_[rank]);
    }
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

    /// The next `bytes` behind all earlier regions, mapped. Every rank must ask for the same.
    struct Piece {
        std::byte* address;
        std::uint64_t offset;
    };
    Piece take(std::uint64_t bytes);

  private:
    struct Layout;
    void lay_out(std::uint64_t base, std::uint64_t share_bytes, Lines lines);

    std::shared_ptr<SegmentMap> segment_;
    std::vector<std::uint32_t> members_;
    std::uint32_t rank_;
    std::optional<std::uint32_t> split_;  ///< the share of a sub-group
    std::uint64_t base_ = 0, channels_ = 0, next_ = 0, end_ = 0;
    Control* control_ = nullptr;
    Identity* identities_ = nullptr;
    ddprun::RankLine* own_lines_ = nullptr;
    MessageLine* message_lines_ = nullptr;
    Slot* slots_ = nullptr;
    std::byte *staging_ = nullptr, *results_ = nullptr;
};

/// A number that is equal for all builds that lay the arena out alike.
std::uint64_t layout_mark();

}  // namespace ddp::cpu
