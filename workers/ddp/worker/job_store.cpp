#include "ddp/worker/job_store.h"

#include <fmt/core.h>

#include "ddp/types.h"

namespace ddp {

using ddprun::Errc;
using ddprun::Result;
using ddprun::rdzv::StoreClient;

namespace {
constexpr std::string_view kTcp = "tcp:", kTls = "tls:";
}

bool has_job_store(const ddprun::WorkerEnv& env) { return env.store.starts_with(kTcp) || env.store.starts_with(kTls); }

std::shared_ptr<StoreClient> connect_to_job_store(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline) {
    if (!has_job_store(env)) {
        throw InvalidInput(fmt::format("rank {}: there is no store of the job ({}): start the program with ddprun", env.rank,
                                       env.store.empty() ? "DDPRUN_STORE is not set" : "DDPRUN_STORE=" + env.store));
    }
    const Result<ddprun::Endpoint> where = ddprun::parse_endpoint(env.store.substr(kTcp.size()), 0);
    if (!where) throw InvalidInput(fmt::format("DDPRUN_STORE={}: {}", env.store, where.error().what));
    auto client = StoreClient::connect(*where,
                                       {.job_id = env.run_id, .token = env.token, .generation = env.generation,
                                        .name = fmt::format("rank {}", env.rank), .tls = env.store.starts_with(kTls)},
                                       deadline);
    if (!client) throw_store_error(env.rank, "the job's store", client.error());
    return *std::move(client);
}

void throw_store_error(int rank, std::string_view attempt, const ddprun::Error& error) {
    const std::string what = fmt::format("rank {}: {}: {}", rank, attempt, error.what);
    switch (error.code) {
        case Errc::StaleGeneration: case Errc::Closed: throw PeerLostError(what);
        case Errc::Timeout: throw TimeoutError(what);
        case Errc::InvalidArgument: throw InvalidInput(what);
        case Errc::Mismatch: throw MismatchError(what);
        default: throw Error(what);
    }
}

}  // namespace ddp
