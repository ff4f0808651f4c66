#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <vector>

#include "ddp/process_group.h"

/// Ranks as threads over the staged backend and the fake CUDA.
namespace ddp::testing {

struct StagedWorld {
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);
    bool own_streams = false;  ///< each rank has its own user stream
};

/// Every rank's exception, by rank; null for none. All of them use device 0.
std::vector<std::exception_ptr> staged_failures_of(int ranks, const std::function<void(ProcessGroup&)>& fn,
                                                   const StagedWorld& options = {});

}  // namespace ddp::testing
