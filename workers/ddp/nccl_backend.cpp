#include "ddp/nccl_backend.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <utility>

#include "ddp/device_groups.h"
#include "ddp/diagnose.h"
#include "ddp/nccl_group.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::WorkerEnv;

std::vector<nccl::UniqueId> ids_for(const NcclParts& parts, const nccl::Appointment& appointment) {
    if (!parts.gather) return nccl::exchange_ids(*parts.nccl, parts.board, appointment);
    return nccl::gather_ids(*parts.nccl, parts.gather, appointment);
}

/// NCCL lets its environment overrule what we ask for.
void refuse_blocking() {
    const char* const set = std::getenv("NCCL_COMM_BLOCKING");
    if (set == nullptr || std::string_view(set) == "0") return;
    throw InvalidInput(fmt::format(
        "NCCL_COMM_BLOCKING={}: calls that block inside NCCL would have no time-out: unset it", set));
}

std::shared_ptr<nccl::Communicator> join(const NcclParts& parts, const nccl::SessionParts& session) {
    const WorkerEnv& env = session.env;
    const std::string attempt =
        fmt::format("rank {}: joining {} of {} ranks", env.rank, session.name, env.world_size);
    const nccl::Patience patience{ddprun::deadline_after(MonotonicClock::now(), session.timeout),
                                  [&] { cpu::throw_if_lost(session.segment->header(), attempt); }};
    ddprun::RankLine& line = parts.segment->line(static_cast<std::uint32_t>(env.local_rank));
    line.pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
    line.joined.store(1, std::memory_order_relaxed);
    auto ids = ids_for(parts, {.rank = env.rank,
                               .ranks = env.world_size,
                               .generation = env.generation,
                               .communicator = parts.communicator,
                               .deadline = patience.deadline,
                               .throw_if_lost = patience.throw_if_lost});
    return nccl::Communicator::join(parts.nccl, std::move(ids), env.rank, env.world_size, patience, attempt);
}

}  // namespace

std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const WorkerEnv& env,
                                              const ProcessGroupOptions& options) {
    refuse_blocking();
    const nccl::Membership world{.rank = env.rank,
                                 .size = env.world_size,
                                 .name = fmt::format("NCCL communicator {}", parts.communicator)};
    nccl::SessionParts session{.cuda = parts.cuda,
                               .segment = parts.segment,
                               .env = env,
                               .device = choose_device(*parts.cuda, env, options.device, Sharing::Never),
                               .user_stream = static_cast<cuda::Stream>(options.stream),
                               .timeout = options.timeout,
                               .name = world.name};
    auto communicator = join(parts, session);
    parts.gather = nullptr;  // has done its duty, and what it holds is no longer needed
    return std::make_unique<nccl::Group>(std::move(parts), world, std::move(session),
                                         std::move(communicator));
}

}  // namespace ddp
