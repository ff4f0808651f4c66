#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

/// The layout of a trace file, which libddp writes and `ddprun trace` reads. One process of a job has one
/// file:
///
///   0       TraceHeader
///   4096    TraceRecord[kTraceRecords], a ring: record number n lies at n % kTraceRecords
///
/// The process maps the file shared, so what it has written survives its death of any kind. A reader may read
/// at any time. Times are CLOCK_MONOTONIC nanoseconds.
namespace ddprun {

inline constexpr std::uint64_t kTraceMagic = 0x3143415254504444;  // "DDPTRAC1"
inline constexpr std::uint64_t kTraceRecords = 32768;
inline constexpr std::uint64_t kTraceRecordsOffset = 4096;
inline constexpr const char* kTraceSuffix = ".trace";         ///< of these files
inline constexpr const char* kTraceEventsSuffix = ".events";  ///< of the files of a ddprun's events

struct TraceHeader {
    std::atomic<std::uint64_t> magic;  ///< written last
    std::uint64_t records;             ///< kTraceRecords
    std::atomic<std::uint64_t> begun;  ///< number of records that have begun
    std::int64_t wall_ns;              ///< nanoseconds from 1970 to the monotonic clock's zero, at the start
    std::uint32_t pid;
    char host[256];
    char clock[64];  ///< the kernel's boot id: equal for processes whose monotonic clocks are the same one
};

enum class TraceKind : std::uint8_t { None, Step, Collective, Loader, Checkpoint, Recovery, Span };

/// A span of time of one thread. The writer stores `number` last; 0: the record is being written.
struct alignas(128) TraceRecord {
    std::atomic<std::uint64_t> number;  ///< counted from 1
    std::int64_t begin_ns;
    std::atomic<std::int64_t> end_ns;      ///< 0: has not ended
    std::atomic<std::int64_t> waiting_ns;  ///< of a collective, from its begin: other ranks had not called it
    std::uint64_t seq;                     ///< of a collective; of a step its number from 1
    std::uint64_t bytes;                   ///< of a collective
    std::uint64_t world;                   ///< equal on the ranks of one generation
    std::uint32_t rank;
    std::uint32_t generation;
    std::uint32_t thread;  ///< the kernel's number
    /// Of a collective of the whole world: the number of its group from 1, in the order in which ranks make
    /// them. 0: of a part of the ranks.
    std::uint16_t group;
    TraceKind kind;
    std::uint8_t operation;  ///< SegmentOp of a collective
    char name[48];           ///< UTF-8, cut, ends with a zero byte; "" of a collective
};
static_assert(sizeof(TraceRecord) == 128 && sizeof(TraceHeader) <= kTraceRecordsOffset);

inline constexpr std::uint64_t kTraceBytes = kTraceRecordsOffset + kTraceRecords * sizeof(TraceRecord);

}  // namespace ddprun
