#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "ddp/optimizer.h"

namespace ddp {

/// Why a failure restarts all ranks where a rank has a part of the state.
inline constexpr const char* kShardedRefusal =
    "optimizer state is sharded: a failure restarts from the last checkpoint";

/// Gives zeroed host memory, aligned for vectors, for one state of all parameters. Where training is sharded
/// it is collective.
using StateMemory = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;

// The optimizers of optimizer.h, with their state in host memory from `memory`.
std::unique_ptr<Optimizer> make_optimizer(std::vector<Tensor> parameters, SgdOptions options,
                                          const StateMemory& memory);
std::unique_ptr<Optimizer> make_optimizer(std::vector<Tensor> parameters, AdamWOptions options,
                                          const StateMemory& memory);

}  // namespace ddp
