#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/types.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"

/// One call of a collective or message, and its descriptions for errors; the same for all backends.
namespace ddp {

// Values of Call::root for calls that have no operation of their own in the rank lines.
inline constexpr std::int16_t kAllocateMark = -2;
inline constexpr std::int16_t kBytesMark = -3;
inline constexpr std::int16_t kSplitMark = -4;
inline constexpr std::int16_t kUnevenMark = -5;     ///< all_gather_v and other uneven collectives
inline constexpr std::int16_t kBatchMark = -6;      ///< messages of a batch, which share one sequence number
inline constexpr std::int16_t kCoalescedMark = -7;  ///< coalesced collectives, likewise

/// The call of a rank, as its peers see it. It must be equal on all ranks; otherwise all throw MismatchError.
struct Call {
    std::uint64_t seq = 0;
    std::uint64_t bytes = 0;
    std::int32_t root = -1;
    ddprun::SegmentOp operation = ddprun::SegmentOp::None;
    DType dtype = DType::U8;
    ReduceOp op = ReduceOp::Sum;
    bool operator==(const Call&) const = default;
};
static_assert(sizeof(Call) == 24);

/// The call of a collective or message on `buffer`, without its sequence number.
inline Call call_of(ddprun::SegmentOp operation, const ConstBuffer& buffer, ReduceOp op = ReduceOp::Sum,
                    int root = -1) {
    return {.bytes = buffer.bytes(), .root = root, .operation = operation, .dtype = buffer.dtype, .op = op};
}

/// The operation of partial sums that are divided only once, at the end.
constexpr ReduceOp without_division(ReduceOp op) { return op == ReduceOp::Avg ? ReduceOp::Sum : op; }

/// "all_reduce", "all_gather_v", "split".
std::string name_of(const Call& call);
/// "all_reduce #812 (6553600 float32, 25 MiB, sum)".
std::string to_string(const Call& call);
/// "rank 3 called broadcast #7 (...), rank 0 called all_reduce #7 (...)".
std::string both_sides(int rank, const Call& call, int other_rank, const Call& other);

/// The current time in nanoseconds, as rank lines store it.
inline std::int64_t now_ns() { return ddprun::MonotonicClock::now().time_since_epoch().count(); }
/// "12 s": the time from `since_ns`, of a rank line, until `now`.
std::string age(std::int64_t since_ns, ddprun::TimePoint now);
/// "rank 5 is in all_reduce #812 (25 MiB) since 12 s"; "rank 2 finished #811 (all_reduce) 3 s ago and has not
/// called the next".
std::string describe_activity(const ddprun::RankLine& line, int rank, ddprun::TimePoint now);
/// One such clause per listed rank of the node, whatever group the rank is in.
std::string describe_activities(const SegmentMap& segment, const std::vector<std::uint32_t>& local_ranks,
                                ddprun::TimePoint now);

/// Reports training progress to the launcher.
void report_progress(ddprun::RankLine& line, std::uint64_t step, std::uint64_t samples);

/// Throws PeerLostError "<attempt>: rank 2 was lost, the launcher ended generation 4" once the launcher has
/// ended it.
void throw_if_lost(const ddprun::SegmentHeader& header, const std::string& attempt);

}  // namespace ddp
