#include "ddp/shm/point_to_point.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "ddp/shm/roster.h"
#include "ddp/shm/waiting.h"
#include "ddp/worker/call.h"
#include "env/clock.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::MonotonicClock;
using ddprun::SegmentOp;

namespace {

std::size_t part_of(std::size_t bytes, std::size_t at) { return std::min(Channel::kPieceBytes, bytes - at); }

// The flag is out before we look for sleepers, as in Lockstep::arrive.
void publish(std::atomic<std::uint32_t>& word, const std::atomic<std::uint32_t>& sleepers,
             std::uint32_t value) {
    word.exchange(value);
    if (sleepers.load() != 0) futex_wake_all(word);
}

}  // namespace

PointToPoint::PointToPoint(Arena& arena, const Roster& roster, std::chrono::nanoseconds timeout,
                           const Kernels& kernels)
    : arena_(arena),
      roster_(roster),
      timeout_(timeout),
      kernels_(kernels),
      sent_(arena.ranks()),
      received_(arena.ranks()) {}

PointToPoint::End PointToPoint::begin(SegmentOp operation, const Buffer& buffer, std::uint32_t peer) {
    const bool sending = operation == SegmentOp::Send;
    Channel& channel = sending ? arena_.channel(arena_.rank(), peer) : arena_.channel(peer, arena_.rank());
    const Call call{.seq = sending ? ++sent_[peer] : ++received_[peer],
                    .bytes = buffer.bytes(),
                    .operation = operation,
                    .root = static_cast<std::int16_t>(peer),
                    .dtype = buffer.dtype};
    const End end{channel, peer, call, now_ns()};
    MessageLine& line = arena_.message_line(arena_.rank());
    line.peer.store(peer, std::memory_order_relaxed);
    line.seq.store(call.seq, std::memory_order_relaxed);
    line.bytes.store(call.bytes, std::memory_order_relaxed);
    line.since_ns.store(end.began_ns, std::memory_order_relaxed);
    line.operation.store(static_cast<std::uint32_t>(operation), std::memory_order_release);
    return end;
}

void PointToPoint::finish() {
    arena_.message_line(arena_.rank())
        .operation.store(static_cast<std::uint32_t>(SegmentOp::None), std::memory_order_relaxed);
}

void PointToPoint::send(const Buffer& buffer, std::uint32_t to) {
    const End end = begin(SegmentOp::Send, buffer, to);
    Channel& channel = end.channel;
    const auto* const from = static_cast<const std::byte*>(buffer.data);
    std::size_t at = 0;
    do {
        const std::uint32_t number = channel.written.load(std::memory_order_relaxed);
        const auto has_room = [&] {
            return channel.refused.load() != 0 ||
                   number - channel.read.load(std::memory_order_acquire) < Channel::kPieces;
        };
        wait_until(end, channel.read, channel.writers_asleep, has_room);
        if (channel.refused.load() != 0) {
            throw MismatchError(refusal(end));
        }
        Channel::Piece& piece = channel.pieces[number % Channel::kPieces];
        piece = {end.call, part_of(buffer.bytes(), at)};
        if (piece.bytes > 0) kernels_.stream(channel.data[number % Channel::kPieces], from + at, piece.bytes);
        kernels_.fence();
        at += piece.bytes;
        publish(channel.written, channel.readers_asleep, number + 1);
    } while (at < buffer.bytes());
    finish();
}

void PointToPoint::recv(const Buffer& buffer, std::uint32_t from) {
    const End end = begin(SegmentOp::Recv, buffer, from);
    Channel& channel = end.channel;
    auto* const to = static_cast<std::byte*>(buffer.data);
    std::size_t at = 0;
    do {
        const std::uint32_t number = channel.read.load(std::memory_order_relaxed);
        wait_until(end, channel.written, channel.readers_asleep,
                   [&] { return channel.written.load(std::memory_order_acquire) != number; });
        const Channel::Piece& piece = channel.pieces[number % Channel::kPieces];
        compare(end, piece.call);
        if (piece.bytes > 0) std::memcpy(to + at, channel.data[number % Channel::kPieces], piece.bytes);
        at += piece.bytes;
        publish(channel.read, channel.writers_asleep, number + 1);
    } while (at < buffer.bytes());
    finish();
}

void PointToPoint::compare(const End& end, const Call& sent) const {
    if (sent.seq == end.call.seq && sent.bytes == end.call.bytes && sent.dtype == end.call.dtype) return;
    const int own = arena_.global_rank(arena_.rank());
    const std::string what = fmt::format("rank {}: a message is not the one expected: {}", own,
                                         both_sides(own, end.call, arena_.global_rank(end.peer), sent));
    // A message that fitted the channel has left its sender, and only this rank knows what became of it.
    complain(arena_.control(), what);
    end.channel.refused.store(1);
    futex_wake_all(end.channel.read);
    throw MismatchError(what);
}

std::string PointToPoint::refusal(const End& end) const {
    const std::string complaint = complaint_in(arena_.control());
    return fmt::format("rank {}: {}: rank {} expected another message{}{}", arena_.global_rank(arena_.rank()),
                       to_string(end.call), arena_.global_rank(end.peer), complaint.empty() ? "" : ": ",
                       complaint);
}

/// What to do about it, where the two wait for each other.
std::string PointToPoint::deadlock(const End& end) const {
    const MessageLine& other = arena_.message_line(end.peer);
    const auto doing = static_cast<SegmentOp>(other.operation.load(std::memory_order_acquire));
    if (doing != end.call.operation || other.peer.load(std::memory_order_relaxed) != arena_.rank()) return "";
    return doing == SegmentOp::Send ? "; both send first: let one of them receive first"
                                    : "; both receive first: let one of them send first";
}

void PointToPoint::wait_until(const End& end, std::atomic<std::uint32_t>& word,
                              std::atomic<std::uint32_t>& sleepers,
                              const std::function<bool()>& ready) {
    if (roster_.ranks_share_cores ? look_for(attention_, ready, Yields{})
                                  : look_for(attention_, ready, Spins{}))
        return;
    const Sleeper sleeper(sleepers);
    for (;;) {
        const std::uint32_t seen = word.load();
        if (ready()) return;
        futex_wait(word, seen, kSleepSlice);
        if (ready()) return;
        throw_if_hopeless(end, ready);
    }
}

void PointToPoint::throw_if_hopeless(const End& end, const std::function<bool()>& ready) const {
    const int own = arena_.global_rank(arena_.rank()), other = arena_.global_rank(end.peer);
    throw_if_lost(arena_.segment().header(), fmt::format("rank {}: {}", own, to_string(end.call)));
    if (const std::string complaint = complaint_in(arena_.control()); !complaint.empty() && !ready()) {
        throw MismatchError(
            fmt::format("rank {}: {}: the group has failed: {}", own, to_string(end.call), complaint));
    }
    // It may have done its part between our look and its end.
    if (is_gone(arena_, end.peer) && !ready()) {
        throw PeerLostError(fmt::format("rank {}: {}: rank {} (pid {}) ended without taking part", own,
                                        to_string(end.call), other, arena_.identity(end.peer).pid));
    }
    if (now_ns() - end.began_ns < timeout_.count()) return;
    throw TimeoutError(fmt::format("rank {}: {} did not finish within {}: {}{}", own, to_string(end.call),
                                   ddprun::format_duration(timeout_),
                                   what_ranks_do(arena_, {end.peer}, MonotonicClock::now()), deadlock(end)));
}

}  // namespace ddp::cpu
