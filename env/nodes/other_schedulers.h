#pragma once

#include <functional>
#include <string>

#include "env/result.h"
#include "env/worker_env.h"

namespace ddprun {

/// A line about a job of several hosts of a scheduler whose jobs ddprun does not read (Grid Engine, Cobalt,
/// OAR, PJM), and the remedy; "" there is none. Pure but for `read_file`.
std::string remark_on_other_scheduler(
    const EnvironmentLookup& variable,
    const std::function<Result<std::string>(const std::string& path)>& read_file);

}  // namespace ddprun
