#pragma once

#include <memory>
#include <string>

#include "ddp/cuda_api.h"
#include "ddp/process_group.h"
#include "ddp/segment_map.h"
#include "env/clock.h"

namespace ddp {

/// Whether several ranks may work on one device.
enum class Sharing : std::uint8_t { Never, Allowed };

/// The device of this rank: `wanted`, or with index -1 the one with the local rank's number; where ranks may
/// share and there are too few, they go round. The calling thread works on it from now on. Throws
/// InvalidInput: no device, or too few, with what was seen.
int choose_device(const cuda::Api& cuda, const ddprun::WorkerEnv& env, const Device& wanted, Sharing sharing);

/// This node's segment: the launcher's, or one of our own that the ranks give each other. Throws what
/// share_segment throws.
std::shared_ptr<SegmentMap> open_segment(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

/// A group that was made, and why so.
struct MadeGroup {
    std::unique_ptr<ProcessGroup> group;
    std::string choice;  ///< "nccl (auto: buffers are on a CUDA device)"
};
/// A group over device memory. The ranks of a node tell each other first which device they have, so that all
/// of them choose alike. Rank 0 says once per process what was chosen, on standard error.
MadeGroup create_on_devices(const ddprun::WorkerEnv& env, const ProcessGroupOptions& options);

}  // namespace ddp
