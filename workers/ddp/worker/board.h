#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp {

/// Where ranks leave words for each other before they have a group. All calls may throw; `get` returns ""
/// when `until` passes first. Boards of tests may have no `erase`.
struct Board {
    std::function<void(const std::string& key, const std::string& value)> put;
    std::function<std::string(const std::string& key, ddprun::TimePoint until)> get;
    std::function<void(const std::string& key)> erase = {};
};

/// In the store of the launcher that started us; errors begin with `attempt`. Throws InvalidInput when there
/// is none, TimeoutError, Error.
Board store_board(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline, std::string_view attempt);

}  // namespace ddp
