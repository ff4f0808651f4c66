#include "ddp/nccl_session_parts.h"

#include <fmt/core.h>

#include <cstdio>
#include <vector>

#include "ddp/device_error.h"
#include "ddp/diagnose.h"
#include "ddp/nccl_ras.h"
#include "env/print.h"

namespace ddp::nccl {
namespace {

using ddprun::MonotonicClock;

constexpr std::chrono::seconds kRasLimit{3};
constexpr int kRasVersion = 22400;

}  // namespace

std::string named(const SessionParts& parts, const cpu::Call& call) {
    if (call.seq == 0) return fmt::format("rank {}: before the first collective", parts.env.rank);
    return fmt::format("rank {}: {}", parts.env.rank, cpu::to_string(call));
}

std::string what_peers_do(const SessionParts& parts) {
    std::vector<std::uint32_t> peers;
    for (std::uint32_t local = 0; local < parts.segment->header().local_world_size; ++local) {
        if (local != static_cast<std::uint32_t>(parts.env.local_rank)) peers.push_back(local);
    }
    if (peers.empty()) return "";
    return "; " + cpu::what_ranks_do(*parts.segment, peers, MonotonicClock::now());
}

std::string why_it_hangs(const SessionParts& parts, const Api& api) {
    const std::string peers = what_peers_do(parts);
    const auto where = ras_address();
    if (!where || api.version < kRasVersion) return peers;
    const std::string answer = ask_ras(*where, ddprun::deadline_after(MonotonicClock::now(), kRasLimit));
    if (answer.empty()) return peers;
    note_device_error(DeviceLibrary::Nccl, answer);
    ddprun::print(stderr, "ddp: rank {}: NCCL's RAS says:\n{}\n", parts.env.rank, answer);
    return peers + "; NCCL's own view (RAS) is on standard error";
}

}  // namespace ddp::nccl
