#include "ddp/nccl/ledger.h"

#include <fmt/core.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <string_view>
#include <vector>

#include "ddp/trace/trace.h"
#include "ddp/worker/device_error.h"
#include "env/io/ras_dialogue.h"
#include "env/print.h"

namespace ddp::nccl {

using ddprun::MonotonicClock;
using ddprun::Result;
using ddprun::TimePoint;

namespace {

/// A message involves only two ranks: its number says nothing about the others.
bool is_message(const Call& call) {
    return call.operation == ddprun::SegmentOp::Send || call.operation == ddprun::SegmentOp::Recv;
}

constexpr std::chrono::seconds kRasLimit{3};
constexpr int kRasVersion = 22400;
constexpr std::size_t kLongestAnswer = 16 * 1024;

bool send_line(int socket, std::string_view line) {
    return ::send(socket, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
}

}  // namespace

Ledger::Ledger(const SessionParts& parts)
    : line_(parts.lines == SessionParts::Lines::Private
                ? private_line_
                : parts.segment->line(static_cast<std::uint32_t>(parts.env.local_rank))),
      traced_group_(&line_ == &private_line_ ? std::uint16_t{0} : trace::current_group()) {}

std::uint64_t Ledger::next_number(const Call& call) {
    return is_message(call) ? ++messages_[{call.operation, call.root}] : ++seq_;
}

trace::Begun Ledger::begin(const Call& call, ddprun::TimePoint now) {
    trace::Begun traced;
    if (trace::is_on())
        traced = trace::begin_collective(call, is_message(call) ? std::uint16_t{0} : traced_group_,
                                         now.time_since_epoch().count());
    if (is_message(call)) return traced;
    line_.bytes.store(call.bytes, std::memory_order_relaxed);
    line_.operation.store(static_cast<std::uint32_t>(call.operation), std::memory_order_relaxed);
    line_.started_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    line_.started_seq.store(call.seq, std::memory_order_release);
    return traced;
}

void Ledger::end(const Call& call, ddprun::TimePoint begun, ddprun::TimePoint now,
                 const trace::Begun& traced) {
    trace::end_at(traced, now.time_since_epoch().count());
    // Collectives overlap: time with several in flight counts once.
    const ddprun::TimePoint counted_from = std::max(begun, counted_until_);
    if (now > counted_from) inside_ns_.fetch_add((now - counted_from).count(), std::memory_order_relaxed);
    counted_until_ = std::max(now, counted_until_);
    line_.comm_ns.store(inside_ns_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    if (is_message(call)) return;
    line_.finished_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    line_.finished_seq.store(call.seq, std::memory_order_release);
}

std::string named(const SessionParts& parts, const Call& call) {
    if (call.seq == 0) return fmt::format("rank {}: before the first collective", parts.env.rank);
    return fmt::format("rank {}: {}", parts.env.rank, ddp::to_string(call));
}

std::string describe_peers(const SessionParts& parts) {
    std::vector<std::uint32_t> peers;
    for (std::uint32_t local = 0; local < parts.segment->header().local_world_size; ++local) {
        if (local != static_cast<std::uint32_t>(parts.env.local_rank)) peers.push_back(local);
    }
    if (peers.empty()) return "";
    return "; " + describe_activities(*parts.segment, peers, MonotonicClock::now());
}

std::string explain_hang(const SessionParts& parts, const Api& api) {
    const std::string peers = describe_peers(parts);
    const auto where = ras_address();
    if (!where || api.version < kRasVersion) return peers;
    const std::string answer = query_ras(*where, ddprun::deadline_after(MonotonicClock::now(), kRasLimit));
    if (answer.empty()) return peers;
    note_device_error(DeviceLibrary::Nccl, answer);
    ddprun::print(stderr, "ddp: rank {}: NCCL's RAS says:\n{}\n", parts.env.rank, answer);
    return peers + "; NCCL's own view (RAS) is on standard error";
}

std::optional<ddprun::Endpoint> ras_address() {
    return ddprun::ras_endpoint(ddprun::process_environment("NCCL_RAS_ENABLE"),
                                ddprun::process_environment("NCCL_RAS_ADDR"));
}

std::string query_ras(const ddprun::Endpoint& where, TimePoint deadline) {
    const Result<ddprun::UniqueFd> connection = ddprun::connect_tcp(where, deadline);
    if (!connection) return "";
    const int socket = connection->get();
    ddprun::RasDialogue dialogue;
    if (!send_line(socket, ddprun::RasDialogue::greeting())) return "";
    while (dialogue.status().size() < kLongestAnswer) {
        const Result<bool> ready = ddprun::wait_readable(socket, deadline);
        if (!ready || !*ready) break;
        char piece[4096];
        const ssize_t got = ::recv(socket, piece, sizeof piece, MSG_DONTWAIT);
        if (got <= 0) break;
        const Result<std::string> reply = dialogue.take({piece, static_cast<std::size_t>(got)});
        if (!reply || (!reply->empty() && !send_line(socket, *reply))) return "";
    }
    return dialogue.status().substr(0, kLongestAnswer);
}

}  // namespace ddp::nccl
