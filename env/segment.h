#pragma once

#include <atomic>
#include <cstdint>

/// The nameless shared-memory segment of one node and one generation (a memfd the agent makes and the workers
/// inherit). This header is its layout. Both sides are built from the same source; `version` guards against a
/// launcher and a worker of two releases.
///
///   0       SegmentHeader
///   4096    RankLine[local_world_size]                                  read by the launcher at any time
///   arena_offset ... arena_offset + arena_bytes                         libddp's collectives
///
/// The file is sparse: pages exist once touched.
namespace ddprun {

inline constexpr std::uint64_t kSegmentMagic = 0x3147455352504444;  // "DDPRSEG1"
inline constexpr std::uint32_t kSegmentVersion = 1;
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
};

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
};
static_assert(sizeof(RankLine) == 128);

enum class SegmentOp : std::uint32_t {
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

/// Offset of the arena for a node with that many workers (page aligned, after the rank lines).
constexpr std::uint64_t segment_arena_offset(std::uint32_t local_world_size) {
    const std::uint64_t lines = kRankLinesOffset + sizeof(RankLine) * std::uint64_t{local_world_size};
    return (lines + 4095) / 4096 * 4096;
}

}  // namespace ddprun
