#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"
#include "env/worker_env.h"
#include "rendezvous/client.h"

/// The way from a worker to the job's store, for libddp's own keys and for users' (store.h).
namespace ddp {

/// How the store knows a rank.
std::string store_client_name(int rank);
/// Whether a launcher with a store has started us.
bool has_job_store(const ddprun::WorkerEnv& env);
/// Throws InvalidInput when there is none, or its address is none, TimeoutError, Error.
std::shared_ptr<ddprun::rdzv::StoreClient> connect_to_job_store(const ddprun::WorkerEnv& env,
                                                                ddprun::TimePoint deadline);
/// As the exception of its kind: "rank 3: <attempt>: <error>".
[[noreturn]] void throw_store_error(int rank, std::string_view attempt, const ddprun::Error& error);

}  // namespace ddp
