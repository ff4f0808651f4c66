#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/result.h"
#include "env/worker_env.h"
#include "rendezvous/client/store_client.h"

/// The connection of a worker to the job's store, for libddp's own keys and for users' (store.h).
namespace ddp {

/// The name of a rank in the store's errors.
std::string store_client_name(int rank);
bool has_job_store(const ddprun::WorkerEnv& env);
/// Throws InvalidInput when there is no store, or its address is invalid, TimeoutError, Error.
std::shared_ptr<ddprun::rdzv::StoreClient> connect_to_job_store(const ddprun::WorkerEnv& env,
                                                                ddprun::TimePoint deadline);
/// Throws the exception that matches error.code: "rank 3: <attempt>: <error>".
[[noreturn]] void throw_store_error(int rank, std::string_view attempt, const ddprun::Error& error);

}  // namespace ddp
