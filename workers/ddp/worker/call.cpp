#include "ddp/worker/call.h"

#include <fmt/core.h>

#include "env/text.h"

namespace ddp {

using ddprun::RankLine;
using ddprun::SegmentOp;

namespace {

bool reduces(SegmentOp operation) {
    return operation == SegmentOp::AllReduce || operation == SegmentOp::ReduceScatter ||
           operation == SegmentOp::Reduce;
}

}  // namespace

std::string name_of(const Call& call) {
    switch (call.root) {
        case kAllocateMark: return "allocate_shared";
        case kBytesMark: return "all_gather_bytes";
        case kSplitMark: return "split";
        case kBatchMark: return "batch_send_recv";
        case kCoalescedMark: return "coalesced";
        case kUnevenMark: return std::string(segment_op_name(call.operation)) + "_v";
        default: return segment_op_name(call.operation);
    }
}

std::string to_string(const Call& call) {
    std::string text = fmt::format("{} #{}", name_of(call), call.seq);
    if (call.root == kAllocateMark) return text + fmt::format(" ({} bytes)", call.bytes);
    if (call.root == kBytesMark || call.root == kSplitMark) return text;
    if (call.root == kBatchMark || call.root == kCoalescedMark)
        return text + fmt::format(" ({})", ddprun::format_bytes(call.bytes));
    if (call.operation == SegmentOp::Barrier || call.operation == SegmentOp::GraphLaunch) return text;
    text += fmt::format(" ({} {}, {}", call.bytes / size_of(call.dtype), name_of(call.dtype),
                        ddprun::format_bytes(call.bytes));
    if (reduces(call.operation)) text += fmt::format(", {}", name_of(call.op));
    if (call.operation == SegmentOp::Send) return text + fmt::format(", to {})", call.root);
    if (call.operation == SegmentOp::Recv) return text + fmt::format(", from {})", call.root);
    if (call.root >= 0) text += fmt::format(", root {}", call.root);
    return text + ")";
}

std::string both_sides(int rank, const Call& call, int other_rank, const Call& other) {
    return fmt::format("rank {} called {}, rank {} called {}", rank, to_string(call), other_rank,
                       to_string(other));
}

std::string age(std::int64_t since_ns, ddprun::TimePoint now) {
    const std::int64_t span = now.time_since_epoch().count() - since_ns;
    return ddprun::format_duration(ddprun::Duration(span > 0 ? span : 0));
}

std::string describe_activity(const RankLine& line, int rank, ddprun::TimePoint now) {
    const std::uint64_t started = line.started_seq.load(std::memory_order_relaxed);
    const std::uint64_t finished = line.finished_seq.load(std::memory_order_relaxed);
    const char* name =
        segment_op_name(static_cast<SegmentOp>(line.operation.load(std::memory_order_relaxed)));
    if (started == 0) return fmt::format("rank {} has called no collective yet", rank);
    if (started > finished) {
        return fmt::format("rank {} is in {} #{} ({}) since {}", rank, name, started,
                           ddprun::format_bytes(line.bytes.load(std::memory_order_relaxed)),
                           age(line.started_ns.load(std::memory_order_relaxed), now));
    }
    return fmt::format("rank {} finished #{} ({}) {} ago and has not called the next", rank, finished, name,
                       age(line.finished_ns.load(std::memory_order_relaxed), now));
}

std::string describe_activities(const SegmentMap& segment, const std::vector<std::uint32_t>& local_ranks,
                                ddprun::TimePoint now) {
    std::vector<std::string> clauses;
    for (const std::uint32_t rank : local_ranks) {
        clauses.push_back(
            describe_activity(segment.line(rank), static_cast<int>(segment.header().first_rank + rank), now));
    }
    return ddprun::join(clauses, "; ");
}

void report_progress(RankLine& line, std::uint64_t step, std::uint64_t samples) {
    line.step.store(step, std::memory_order_relaxed);
    line.samples.store(samples, std::memory_order_relaxed);
    line.progress_ns.store(now_ns(), std::memory_order_relaxed);
}

void throw_if_lost(const ddprun::SegmentHeader& header, const std::string& attempt) {
    const std::uint32_t aborted = header.aborted.load(std::memory_order_relaxed);
    if (aborted == 0) return;
    throw PeerLostError(fmt::format("{}: rank {} was lost, the launcher ended generation {}", attempt,
                                    aborted - 1, header.generation));
}

}  // namespace ddp
