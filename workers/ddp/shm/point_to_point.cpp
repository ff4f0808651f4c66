#include "ddp/shm/point_to_point.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "ddp/worker/call.h"
#include "ddp/worker/encoded_failure.h"
#include "env/clock.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;

namespace {

constexpr std::chrono::milliseconds kBetweenLooks{
    1};  // polling interval for data that moves only when it is polled

std::size_t part_of(std::size_t bytes, std::size_t at) { return std::min(Channel::kPieceBytes, bytes - at); }

}  // namespace

PointToPoint::PointToPoint(Arena& arena, const NodeCpus& node_cpus, std::chrono::nanoseconds timeout,
                           const Kernels& kernels)
    : arena_(arena),
      node_cpus_(node_cpus),
      timeout_(timeout),
      kernels_(kernels),
      sent_(arena.ranks()),
      received_(arena.ranks()) {}

void PointToPoint::move(std::span<const Message> messages, const std::function<bool()>& meanwhile) {
    std::vector<End> ends;
    ends.reserve(messages.size());
    for (const Message& message : messages) ends.push_back(begin(message));
    for (;;) {
        // Messages of one channel move one after the other.
        std::vector<End*> heads;
        bool has_moved = false;
        for (End& end : ends) {
            const auto same = [&](const End* head) { return &head->channel == &end.channel; };
            if (!end.is_open || std::any_of(heads.begin(), heads.end(), same)) continue;
            while (end.is_open && can_move(end)) {
                end.call.operation == SegmentOp::Send ? put(end) : take(end);
                has_moved = true;
            }
            if (end.is_open) heads.push_back(&end);
        }
        if (heads.empty()) break;
        if (!has_moved) wait_for_any(heads, meanwhile);
    }
    arena_.message_line(arena_.rank())
        .operation.store(static_cast<std::uint32_t>(SegmentOp::None), std::memory_order_relaxed);
}

PointToPoint::End PointToPoint::begin(const Message& message) {
    const bool sending = message.direction == Message::Direction::Send;
    const auto peer = static_cast<std::uint32_t>(message.peer);
    Channel& channel = sending ? arena_.channel(arena_.rank(), peer) : arena_.channel(peer, arena_.rank());
    Call call =
        call_of(sending ? SegmentOp::Send : SegmentOp::Recv, message.buffer, ReduceOp::Sum, message.peer);
    call.seq = sending ? ++sent_[peer] : ++received_[peer];
    return {channel, peer, call, now_ns(), static_cast<std::byte*>(message.buffer.data)};
}

bool PointToPoint::can_move(const End& end) {
    const Channel& channel = end.channel;
    if (end.call.operation == SegmentOp::Recv)
        return channel.written.load(std::memory_order_acquire) !=
               channel.read.load(std::memory_order_relaxed);
    return channel.refused.load() != 0 ||
           channel.written.load(std::memory_order_relaxed) - channel.read.load(std::memory_order_acquire) <
               Channel::kPieces;
}

void PointToPoint::put(End& end) {
    Channel& channel = end.channel;
    if (channel.refused.load() != 0) throw MismatchError(refusal(end));
    const std::uint32_t number = channel.written.load(std::memory_order_relaxed);
    Channel::Piece& piece = channel.pieces[number % Channel::kPieces];
    piece = {end.call, part_of(end.call.bytes, end.done)};
    if (piece.bytes > 0)
        kernels_.stream(channel.data[number % Channel::kPieces], end.data + end.done, piece.bytes);
    kernels_.fence();
    end.done += piece.bytes;
    end.is_open = end.done < end.call.bytes;
    channel.written.exchange(number + 1);
    wake(end.peer);
}

void PointToPoint::take(End& end) {
    Channel& channel = end.channel;
    const std::uint32_t number = channel.read.load(std::memory_order_relaxed);
    const Channel::Piece& piece = channel.pieces[number % Channel::kPieces];
    compare(end, piece.call);
    if (piece.bytes > 0)
        std::memcpy(end.data + end.done, channel.data[number % Channel::kPieces], piece.bytes);
    end.done += piece.bytes;
    end.is_open = end.done < end.call.bytes;
    channel.read.exchange(number + 1);
    wake(end.peer);
}

// The flag is visible before the check for a sleeper, as in Lockstep::arrive.
void PointToPoint::wake(std::uint32_t peer) {
    MessageLine& line = arena_.message_line(peer);
    if (line.sleepers.load() == 0) return;
    line.wakeups.fetch_add(1);
    futex_wake_all(line.wakeups);
}

void PointToPoint::compare(const End& end, const Call& sent) {
    if (sent.seq == end.call.seq && sent.bytes == end.call.bytes && sent.dtype == end.call.dtype) return;
    const int own = arena_.global_rank(arena_.rank());
    const std::string what = fmt::format("rank {}: a message is not the one expected: {}", own,
                                         both_sides(own, end.call, arena_.global_rank(end.peer), sent));
    // A message that fitted the channel has left its sender, and only this rank knows that it was wrong.
    post_failure(arena_.control(), encode_failure(std::make_exception_ptr(MismatchError(what))));
    end.channel.refused.store(1);
    wake(end.peer);
    throw MismatchError(what);
}

std::string PointToPoint::refusal(const End& end) const {
    const std::string failure_text = posted_failure(arena_.control());
    return fmt::format("rank {}: {}: rank {} expected another message{}{}", arena_.global_rank(arena_.rank()),
                       to_string(end.call), arena_.global_rank(end.peer), failure_text.empty() ? "" : ": ",
                       failure_text);
}

/// The remedy, when the two ranks wait for each other.
std::string PointToPoint::deadlock(const End& end) const {
    const MessageLine& other = arena_.message_line(end.peer);
    const auto doing = static_cast<SegmentOp>(other.operation.load(std::memory_order_acquire));
    if (doing != end.call.operation || other.peer.load(std::memory_order_relaxed) != arena_.rank()) return "";
    return doing == SegmentOp::Send ? "; both send first: let one of them receive first"
                                    : "; both receive first: let one of them send first";
}

void PointToPoint::wait_for_any(const std::vector<End*>& heads, const std::function<bool()>& meanwhile) {
    const auto ready = [&] {
        return std::any_of(heads.begin(), heads.end(), [](const End* end) { return can_move(*end); }) ||
               (meanwhile && meanwhile());
    };
    if (node_cpus_.ranks_share_cores ? spin_until(spin_budget_, ready, Yields{})
                                     : spin_until(spin_budget_, ready, Spins{}))
        return;
    MessageLine& line = arena_.message_line(arena_.rank());
    show(*heads.front());
    const Sleeper sleeper(line.sleepers);
    for (;;) {
        const std::uint32_t seen = line.wakeups.load();
        if (ready()) return;
        futex_wait(line.wakeups, seen, meanwhile ? kBetweenLooks : kSleepSlice);
        if (ready()) return;
        throw_if_failed(heads);
    }
}

void PointToPoint::show(const End& end) {
    MessageLine& line = arena_.message_line(arena_.rank());
    line.peer.store(end.peer, std::memory_order_relaxed);
    line.seq.store(end.call.seq, std::memory_order_relaxed);
    line.bytes.store(end.call.bytes, std::memory_order_relaxed);
    line.since_ns.store(end.began_ns, std::memory_order_relaxed);
    line.operation.store(static_cast<std::uint32_t>(end.call.operation), std::memory_order_release);
}

void PointToPoint::throw_if_failed(const std::vector<End*>& heads) const {
    const End& first = *heads.front();
    const std::string attempt =
        fmt::format("rank {}: {}", arena_.global_rank(arena_.rank()), to_string(first.call));
    throw_if_lost(arena_.segment().header(), attempt);
    if (!can_move(first)) throw_posted_failure(arena_.control(), attempt);
    for (const End* end : heads) throw_if_gone(*end);
    if (now_ns() - first.began_ns < timeout_.count()) return;
    const std::string what =
        fmt::format("{} did not finish within {}: {}{}", attempt, ddprun::format_duration(timeout_),
                    describe_activities(arena_, {first.peer}, MonotonicClock::now()), deadlock(first));
    // This rank calls no more: the others would wait for it until their own time-outs.
    post_failure(arena_.control(), encode_failure(std::make_exception_ptr(TimeoutError(what))));
    throw TimeoutError(what);
}

void PointToPoint::throw_if_gone(const End& end) const {
    // The peer may have done its part between the check and its end.
    if (!is_gone(arena_, end.peer) || can_move(end)) return;
    throw PeerLostError(fmt::format("rank {}: {}: rank {} (pid {}) ended without taking part",
                                    arena_.global_rank(arena_.rank()), to_string(end.call),
                                    arena_.global_rank(end.peer), arena_.identity(end.peer).pid));
}

}  // namespace ddp::cpu
