#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp {

/// A key-value store for ranks that have no group yet. All calls may throw; `get` returns "" when `until`
/// passes first. `erase` may be empty in tests.
struct BootstrapStore {
    std::function<void(const std::string& key, const std::string& value)> put;
    std::function<std::string(const std::string& key, ddprun::TimePoint until)> get;
    std::function<void(const std::string& key)> erase = {};
};

/// The store of the launcher that started this process; errors begin with `attempt`. Throws InvalidInput
/// without one, TimeoutError, Error.
BootstrapStore job_bootstrap_store(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline,
                                   std::string_view attempt);

}  // namespace ddp
