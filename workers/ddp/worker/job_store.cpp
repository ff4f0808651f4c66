#include "ddp/worker/job_store.h"

#include <fmt/core.h>

#include <cerrno>

#include "ddp/types.h"

namespace ddp {

using ddprun::Errc;
using ddprun::Result;
using ddprun::rdzv::StoreAddress;
using ddprun::rdzv::StoreClient;

std::string store_client_name(int rank) { return fmt::format("rank {}", rank); }

bool has_job_store(const ddprun::WorkerEnv& env) { return !env.store.empty(); }

std::shared_ptr<StoreClient> connect_to_job_store(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline) {
    if (!has_job_store(env)) {
        throw InvalidInput(fmt::format(
            "rank {}: there is no store of the job (DDPRUN_STORE is not set): start the program with ddprun",
            env.rank));
    }
    const Result<StoreAddress> where = ddprun::rdzv::parse_store_address(env.store);
    if (!where) throw InvalidInput(fmt::format("rank {}: DDPRUN_STORE: {}", env.rank, where.error().what));
    auto client = StoreClient::connect(*where,
                                       {.job_id = env.run_id,
                                        .token = env.token,
                                        .generation = env.generation,
                                        .name = store_client_name(env.rank)},
                                       deadline);
    if (!client && client.error().sys == ENOENT) {
        throw Error(fmt::format(
            "rank {}: the job's store: {}: the parent of this program closed the descriptors that it got from ddprun",
            env.rank, client.error().what));
    }
    if (!client) throw_store_error(env.rank, "the job's store", client.error());
    return *std::move(client);
}

void throw_store_error(int rank, std::string_view attempt, const ddprun::Error& error) {
    const std::string what = fmt::format("rank {}: {}: {}", rank, attempt, error.what);
    switch (error.code) {
        case Errc::StaleGeneration:
        case Errc::Closed: throw PeerLostError(what);
        case Errc::Timeout: throw TimeoutError(what);
        case Errc::InvalidArgument: throw InvalidInput(what);
        case Errc::Mismatch: throw MismatchError(what);
        default: throw Error(what);
    }
}

}  // namespace ddp
