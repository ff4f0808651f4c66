#include "ddp/nccl_ledger.h"

namespace ddp::nccl {
namespace {

/// A message is a matter of two: its number says nothing about the others.
bool is_message(const cpu::Call& call) {
    return call.operation == ddprun::SegmentOp::Send || call.operation == ddprun::SegmentOp::Recv;
}

}  // namespace

Ledger::Ledger(const SessionParts& parts)
    : line_(parts.lines == SessionParts::Lines::Private
                ? private_line_
                : parts.segment->line(static_cast<std::uint32_t>(parts.env.local_rank))) {}

std::uint64_t Ledger::next_number(const cpu::Call& call) {
    return is_message(call) ? ++messages_[{call.operation, call.root}] : ++seq_;
}

void Ledger::begin(const cpu::Call& call, ddprun::TimePoint now) {
    if (is_message(call)) return;
    line_.bytes.store(call.bytes, std::memory_order_relaxed);
    line_.operation.store(static_cast<std::uint32_t>(call.operation), std::memory_order_relaxed);
    line_.started_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    line_.started_seq.store(call.seq, std::memory_order_release);
}

void Ledger::end(const cpu::Call& call, ddprun::TimePoint begun, ddprun::TimePoint now) {
    inside_ns_.fetch_add((now - begun).count(), std::memory_order_relaxed);
    line_.comm_ns.store(inside_ns_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    if (is_message(call)) return;
    line_.finished_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    line_.finished_seq.store(call.seq, std::memory_order_release);
}

}  // namespace ddp::nccl
