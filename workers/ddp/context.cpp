#include "ddp/context.h"

#include "ddp/types.h"

namespace ddp {

Context Context::from_env() {
    ddprun::Result<ddprun::WorkerEnv> env = ddprun::worker_env_from(ddprun::process_environment);
    if (!env) throw InvalidInput("reading the worker's environment: " + env.error().what);
    return Context(*std::move(env));
}

}  // namespace ddp
