#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

/// The kept memory of one node: a memfd that the agent makes once and the workers of every generation inherit
/// (DDPRUN_KEPT_FD). It outlives workers and generations, so that recovery in place (docs/recovery.md) finds
/// in it what only a dead worker knew. This header is its layout; both sides are built from the same source,
/// and `version` guards against two releases.
///
///   0              KeptHeader
///   4096           KeptLine[workers]                          by local rank; the launcher reads it at any
///   time slots_offset   workers x kKeptSlots x slot_bytes          copies of a rank's own state, sparse
///
/// A worker writes its own line and slots only; a worker that replaces another continues them.
namespace ddprun {

inline constexpr std::uint64_t kKeptMagic = 0x3154504b50524444;  // "DDRPKPT1"
inline constexpr std::uint32_t kKeptVersion = 2;
inline constexpr std::uint64_t kKeptLinesOffset = 4096;
/// A rank that has committed c units may need the copy for c-1, c or c+1.
inline constexpr std::uint64_t kKeptSlots = 3;
/// The limit on one rank's own state, in address space, not memory.
inline constexpr std::uint64_t kKeptSlotBytes = std::uint64_t{16} << 20;
/// The others wait for a rank that computes for so many times its slowest unit before it is killed.
inline constexpr int kSlowestUnits = 3;

struct alignas(64) KeptHeader {
    std::atomic<std::uint64_t> magic;
    std::uint32_t version;
    std::uint32_t workers;
    std::int64_t wait_ns;  ///< how long a worker that has left its generation waits for the next one
    std::uint64_t slots_offset;
    std::uint64_t slot_bytes;  ///< less than kKeptSlotBytes where file sizes are limited; 0: no room
};

/// What one rank keeps. Slot number c % kKeptSlots holds the copy for c commits.
struct alignas(128) KeptLine {
    std::atomic<std::uint64_t> commits;      ///< units that this rank has committed
    std::atomic<std::uint64_t> generation;   ///< of the latest commit; 0: none yet
    std::atomic<std::int64_t> useful_ns;     ///< total time of the attempts that were committed
    std::atomic<std::int64_t> slowest_ns;    ///< of these, the longest; 0: none yet
    std::atomic<std::uint64_t> transferred;  ///< tensors given or received in recoveries
    /// 1 + the commits that the slot's copy belongs to, stored after the copy; 0: nothing, or half written.
    std::atomic<std::uint64_t> slot_of[kKeptSlots];
    std::atomic<std::uint64_t> slot_bytes[kKeptSlots];  ///< length of each copy
};
static_assert(sizeof(KeptLine) == 128);

constexpr std::uint64_t kept_slots_offset(std::uint32_t workers) {
    constexpr std::uint64_t kPage = 65536;  // the largest page size
    const std::uint64_t lines = kKeptLinesOffset + sizeof(KeptLine) * std::uint64_t{workers};
    return (lines + kPage - 1) / kPage * kPage;
}
constexpr std::uint64_t kept_slot_offset(const KeptHeader& header, std::uint32_t local_rank,
                                         std::uint64_t commits) {
    return header.slots_offset + (local_rank * kKeptSlots + commits % kKeptSlots) * header.slot_bytes;
}

}  // namespace ddprun
