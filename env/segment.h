#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

/// The nameless shared-memory segment of one node and one generation (a memfd the agent makes and the workers
/// inherit). This header is its layout. Both sides are built from the same source; `version` guards against a
/// launcher and a worker of two releases.
///
///   0       SegmentHeader
///   4096    RankLine[local_world_size]                                  read by the launcher at any time
///   scalars_offset ScalarRing[local_world_size]                         scalars that workers tell
///   arena_offset ... arena_offset + arena_bytes                         libddp's collectives
///
/// The file is sparse: pages exist once touched. A mapping begins at a page, which has up to 64 KiB: only the
/// header, the rings and the arena begin one everywhere. A worker has it as DDPRUN_SEGMENT_FD, and by the
/// path DDPRUN_SEGMENT, which also serves a process whose starter has closed the descriptor
/// (workers/python/ddprun/__init__.py). The worker's index is RANK - first_rank.
namespace ddprun {

inline constexpr std::uint64_t kSegmentMagic = 0x3147455352504444;  // "DDPRSEG1"
inline constexpr std::uint32_t kSegmentVersion = 2;
inline constexpr std::uint64_t kRankLinesOffset = 4096;
/// The limit on one node's collectives, in address space, not memory.
inline constexpr std::uint64_t kArenaBytes = std::uint64_t{1} << 41;

struct alignas(64) SegmentHeader {
    std::atomic<std::uint64_t> magic;
    std::uint32_t version;
    std::uint32_t local_world_size;
    std::uint32_t world_size;
    std::uint32_t first_rank;  ///< global rank of local rank 0
    std::uint64_t generation;
    std::uint64_t arena_offset;
    std::uint64_t arena_bytes;
    /// 0 while the generation lives; 1 + the rank whose end ended it. Waiting ranks poll it and stop.
    std::atomic<std::uint32_t> aborted;
    /// CPUs this node's workers may use, for choosing between spinning and sleeping. 0: not known.
    std::uint32_t cpus;
    std::uint64_t scalars_offset;  ///< 0: there are no rings (no launcher, or a small limit on file sizes)
    /// Why the workers are to stop, as text that ends with a zero byte; written before any RankLine::stop.
    char stop_reason[256];
};
static_assert(offsetof(SegmentHeader, stop_reason) == 64);

/// The state of one rank in its world's group (not in sub-groups), which the rank writes with plain atomic
/// stores and the launcher reads at any time. started_seq > finished_seq: inside collective number
/// started_seq. Times are CLOCK_MONOTONIC nanoseconds.
struct alignas(128) RankLine {
    std::atomic<std::uint64_t> started_seq;
    std::atomic<std::uint64_t> finished_seq;
    std::atomic<std::uint64_t> bytes;
    std::atomic<std::uint32_t> operation;  ///< SegmentOp
    std::atomic<std::uint32_t> group;      ///< 0, the world
    std::atomic<std::int64_t> started_ns;
    std::atomic<std::int64_t> finished_ns;
    std::atomic<std::int64_t> comm_ns;      ///< total time inside collectives
    std::atomic<std::int64_t> progress_ns;  ///< last heartbeat
    std::atomic<std::uint64_t> step;        ///< training steps done
    std::atomic<std::uint64_t> samples;     ///< samples done; 0: not reported
    std::atomic<std::uint32_t> pid;
    std::atomic<std::uint32_t> joined;  ///< 1 once libddp has mapped the segment
    /// The signal that makes a thread of this process send its stack through the lifeline; 0: none does.
    std::atomic<std::uint32_t> stack_signal;
    std::atomic<std::uint32_t> stacks_sent;  ///< number of stacks sent
    /// Until this time the other ranks must wait for this one, which writes a checkpoint, say; 0: they need
    /// not.
    std::atomic<std::int64_t> awaited_until_ns;
    /// The step after which all ranks stop, written by the agent: 0 none, else a stop_word(). A rank whose
    /// step is reached while the stop is only proposed waits for the decision.
    std::atomic<std::uint64_t> stop;
    /// 1 + the step of this rank's last should_stop(step), which stores it before it reads `stop`; 0: the
    /// rank does not ask, so no stop is proposed.
    std::atomic<std::uint64_t> asked;
    /// 1: SIGTERM does not end this process, which waits for the agreed stop instead, and has no other
    /// handler.
    std::atomic<std::uint64_t> outlives_term;
};
static_assert(sizeof(RankLine) == 128 && offsetof(RankLine, stop) == 104);

constexpr std::uint64_t stop_word(std::uint64_t step, bool agreed) { return 2 * step + (agreed ? 1 : 0); }
constexpr std::uint64_t step_of_stop(std::uint64_t word) { return word / 2; }
constexpr bool stop_is_agreed(std::uint64_t word) { return word % 2 != 0; }

/// One value that a worker told: `ddprun.step(step, loss=value)`.
struct ScalarRecord {
    std::uint64_t step;
    double time;  ///< seconds since 1970
    double value;
    std::uint64_t tag;  ///< index into ScalarRing::tags
};

inline constexpr std::uint32_t kScalarTags = 256;
inline constexpr std::size_t kScalarTagBytes = 128;
inline constexpr std::uint64_t kScalarRecords = 16384;

/// The scalars of one rank, from the worker (the only writer) to the agent (the only reader). Record number n
/// lies in records[n % kScalarRecords]; those from `taken` to `written` have not been read. The worker stores
/// `written` after the record, and `tag_count` after the name. It never waits: it drops what finds the ring
/// full or comes after the last tag, and counts it in `lost`. The page of the counters, the names and the
/// records each exist once used.
struct ScalarRing {
    std::atomic<std::uint64_t> written;
    std::atomic<std::uint64_t> taken;  ///< written by the agent, when it has read the records before it
    std::atomic<std::uint64_t> lost;
    std::atomic<std::uint64_t> tag_count;
    std::atomic<std::uint64_t> is_read;  ///< 1, set by the agent before the start; 0: workers write nothing
    alignas(4096) char tags[kScalarTags][kScalarTagBytes];  ///< UTF-8, cut, each ends with a zero byte
    alignas(65536) ScalarRecord records[kScalarRecords];
};
static_assert(sizeof(ScalarRecord) == 32 && offsetof(ScalarRing, tags) == 4096 &&
              offsetof(ScalarRing, records) == 65536 && sizeof(ScalarRing) == 589824);

enum class SegmentOp : std::uint8_t {
    None,
    Barrier,
    AllReduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Send,
    Recv,
    GraphLaunch  ///< of a CUDA graph with collectives in it
};

/// "all_reduce" and so on; "none" for None and unknown values.
constexpr const char* segment_op_name(SegmentOp op) {
    switch (op) {
        case SegmentOp::None: return "none";
        case SegmentOp::Barrier: return "barrier";
        case SegmentOp::AllReduce: return "all_reduce";
        case SegmentOp::Broadcast: return "broadcast";
        case SegmentOp::AllGather: return "all_gather";
        case SegmentOp::ReduceScatter: return "reduce_scatter";
        case SegmentOp::Reduce: return "reduce";
        case SegmentOp::Gather: return "gather";
        case SegmentOp::Scatter: return "scatter";
        case SegmentOp::AllToAll: return "all_to_all";
        case SegmentOp::Send: return "send";
        case SegmentOp::Recv: return "recv";
        case SegmentOp::GraphLaunch: return "graph_launch";
    }
    return "none";
}

/// Offset of the scalars for a node with that many workers: after the rank lines, at a multiple of the
/// largest page size, so that a worker can map its ring alone.
constexpr std::uint64_t segment_scalars_offset(std::uint32_t local_world_size) {
    const std::uint64_t lines = kRankLinesOffset + sizeof(RankLine) * std::uint64_t{local_world_size};
    return (lines + alignof(ScalarRing) - 1) / alignof(ScalarRing) * alignof(ScalarRing);
}
constexpr std::uint64_t segment_arena_offset(std::uint32_t local_world_size) {
    return segment_scalars_offset(local_world_size) + sizeof(ScalarRing) * std::uint64_t{local_world_size};
}

}  // namespace ddprun
