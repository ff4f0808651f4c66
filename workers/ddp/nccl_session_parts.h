#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "ddp/arena.h"
#include "ddp/cuda_api.h"
#include "ddp/nccl_api.h"
#include "ddp/process_group.h"
#include "ddp/segment_map.h"

namespace ddp::nccl {

/// What one rank's collectives run on. All is borrowed by shared ownership: a thread that NCCL never lets go
/// may outlive the group.
struct SessionParts {
    std::shared_ptr<const cuda::Api> cuda;
    std::shared_ptr<SegmentMap> segment;
    ddprun::WorkerEnv env;
    int device = 0;
    cuda::Stream user_stream = nullptr;  ///< collectives follow it, waiting holds it back
    std::chrono::nanoseconds timeout{};
    std::string name;  ///< "NCCL communicator 0"
    /// Whether the launcher sees the collectives. Numbers of a sub-group would not fit those of the world.
    enum class Lines : std::uint8_t { OfTheNode, Private } lines = Lines::OfTheNode;
};

/// "rank 3: all_reduce #812 (...)", as messages begin.
std::string named(const SessionParts& parts, const cpu::Call& call);
/// "; rank 5 is in ...; rank 6 finished ...", of the other ranks of this node; "" where there are none.
std::string what_peers_do(const SessionParts& parts);
/// For a time-out: what the peers do, and NCCL's own view where it has one. That is long: it goes to standard
/// error and into the error report. Blocks for three seconds at most.
std::string why_it_hangs(const SessionParts& parts, const Api& api);

}  // namespace ddp::nccl
