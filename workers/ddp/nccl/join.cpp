#include "ddp/nccl/join.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>

#include "ddp/nccl/group.h"
#include "ddp/worker/call.h"
#include "ddp/worker/device_error.h"
#include "ddp/worker/job_store.h"
#include "env/io/library.h"

namespace ddp::nccl {

using ddprun::MonotonicClock;
using ddprun::TimePoint;
using ddprun::WorkerEnv;

namespace {

constexpr std::chrono::milliseconds kStorePoll{
    200};  ///< longest wait for a key between two checks of the launcher's abort word

constexpr std::string_view kAttempt = "exchanging NCCL's unique ids";

UniqueId wait_for_id(const BootstrapStore& bootstrap, const Rendezvous& rendezvous, int root) {
    const std::string key = id_key(rendezvous.generation, rendezvous.communicator, root);
    for (;;) {
        rendezvous.throw_if_lost();
        const TimePoint now = MonotonicClock::now();
        const std::string value =
            bootstrap.get(key, std::min(rendezvous.deadline, ddprun::deadline_after(now, kStorePoll)));
        UniqueId id;
        if (value.size() == sizeof id.internal) {
            std::memcpy(id.internal, value.data(), sizeof id.internal);
            return id;
        }
        if (!value.empty()) {
            throw MismatchError(fmt::format("rank {}: the unique id {} has {} bytes, NCCL's have {}",
                                            rendezvous.rank, key, value.size(), sizeof id.internal));
        }
        if (MonotonicClock::now() >= rendezvous.deadline) {
            throw TimeoutError(
                fmt::format("rank {}: joining a world of {}: rank {} did not publish its NCCL "
                            "unique id ({}) within the time-out",
                            rendezvous.rank, rendezvous.ranks, root_rank(root), key));
        }
    }
}

UniqueId make_id(const Api& api, int rank) {
    UniqueId id;
    if (const Code code = api.get_unique_id(&id); code != Code::Success) {
        const std::string reason = api.explain(code, nullptr);
        note_device_error(DeviceLibrary::Nccl, reason);
        throw Error(fmt::format("rank {}: ncclGetUniqueId: {}; NCCL_DEBUG=INFO shows more", rank, reason));
    }
    return id;
}

UniqueId make_and_publish_id(const Api& api, const BootstrapStore& bootstrap, const Rendezvous& rendezvous,
                             int root) {
    const UniqueId id = make_id(api, rendezvous.rank);
    if (rendezvous.ranks > 1) {
        bootstrap.put(id_key(rendezvous.generation, rendezvous.communicator, root),
                      std::string(id.internal, sizeof id.internal));
    }
    return id;
}

}  // namespace

void require_store(const WorkerEnv& env) {
    if (has_job_store(env)) return;
    throw InvalidInput(fmt::format(
        "rank {}: the nccl backend of {} ranks, {} of them on this node, exchanges its unique ids "
        "through ddprun's store, and there is none: start the program with ddprun",
        env.rank, env.world_size, env.local_world_size));
}

int root_count(int ranks, bool has_scalable_init) {
    return has_scalable_init ? (ranks + kRanksPerRoot - 1) / kRanksPerRoot : 1;
}

std::string id_key(std::uint64_t generation, int communicator, int root) {
    return fmt::format("nccl/{}/{}/{}", generation, communicator, root);
}

BootstrapStore id_store(const WorkerEnv& env, TimePoint deadline) {
    require_store(env);
    return job_bootstrap_store(env, deadline, kAttempt);
}

std::vector<UniqueId> exchange_ids(const Api& api, const BootstrapStore& bootstrap,
                                   const Rendezvous& rendezvous) {
    const int roots = root_count(rendezvous.ranks, api.comm_init_rank_scalable != nullptr);
    std::vector<UniqueId> ids(static_cast<std::size_t>(roots));
    // This rank's ids come first: others wait for them.
    for (int root = 0; root < roots; ++root) {
        if (root_rank(root) != rendezvous.rank) continue;
        ids[static_cast<std::size_t>(root)] = make_and_publish_id(api, bootstrap, rendezvous, root);
    }
    for (int root = 0; root < roots; ++root) {
        if (root_rank(root) == rendezvous.rank) continue;
        ids[static_cast<std::size_t>(root)] = wait_for_id(bootstrap, rendezvous, root);
    }
    return ids;
}

std::vector<UniqueId> gather_ids(const Api& api, const Gather& gather, const Rendezvous& rendezvous) {
    const int roots = root_count(rendezvous.ranks, api.comm_init_rank_scalable != nullptr);
    std::string mine;
    std::exception_ptr failure;
    if (rendezvous.rank % kRanksPerRoot == 0 && rendezvous.rank / kRanksPerRoot < roots) {
        try {
            const UniqueId id = make_id(api, rendezvous.rank);
            mine.assign(id.internal, sizeof id.internal);
        } catch (const Error&) {
            failure = std::current_exception();
        }
    }
    const std::vector<std::string> all = gather(mine);
    if (failure) std::rethrow_exception(failure);
    std::vector<UniqueId> ids(static_cast<std::size_t>(roots));
    for (int root = 0; root < roots; ++root) {
        const std::string& theirs = all[static_cast<std::size_t>(root_rank(root))];
        UniqueId& id = ids[static_cast<std::size_t>(root)];
        if (theirs.size() != sizeof id.internal) {
            throw Error(fmt::format("rank {}: rank {} could not make an NCCL unique id", rendezvous.rank,
                                    root_rank(root)));
        }
        std::copy(theirs.begin(), theirs.end(), id.internal);
    }
    return ids;
}

}  // namespace ddp::nccl

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::WorkerEnv;

std::vector<nccl::UniqueId> ids_for(const NcclParts& parts, const nccl::Rendezvous& rendezvous) {
    if (!parts.gather) return nccl::exchange_ids(*parts.nccl, parts.bootstrap, rendezvous);
    return nccl::gather_ids(*parts.nccl, parts.gather, rendezvous);
}

/// NCCL's environment variables override the configuration in the call.
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
    const nccl::WaitBounds bounds{ddprun::deadline_after(MonotonicClock::now(), session.timeout),
                                  [&] { throw_if_lost(session.segment->header(), attempt); }, env.world_size};
    ddprun::RankLine& line = parts.segment->line(static_cast<std::uint32_t>(env.local_rank));
    line.pid.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_relaxed);
    line.joined.store(1, std::memory_order_relaxed);
    const ddprun::KeptSignals kept;  // NCCL loads network plug-ins, and with them libfabric
    auto ids = ids_for(parts, {.rank = env.rank,
                               .ranks = env.world_size,
                               .generation = env.generation,
                               .communicator = parts.communicator,
                               .deadline = bounds.deadline,
                               .throw_if_lost = bounds.throw_if_lost});
    return nccl::Communicator::join(parts.nccl, std::move(ids), env.rank, env.world_size, bounds, attempt);
}

}  // namespace

std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const WorkerEnv& env,
                                              const ProcessGroupOptions& options) {
    refuse_blocking();
    nccl::SessionParts session{.segment = parts.segment,
                               .env = env,
                               .device = parts.device,
                               .user_stream = static_cast<cuda::Stream>(options.stream),
                               .timeout = options.timeout,
                               .name = fmt::format("NCCL communicator {}", parts.communicator),
                               .latest = std::make_shared<nccl::LatestWork>()};
    auto communicator = join(parts, session);
    return std::make_unique<nccl::Group>(std::move(parts.nccl), env.rank, env.world_size, std::move(session),
                                         std::move(communicator));
}

}  // namespace ddp
