#pragma once

#include <memory>

#include "ddp/cuda_api.h"
#include "ddp/process_group.h"
#include "ddp/segment_map.h"

namespace ddp {

/// What the staged backend needs from outside; tests bring their own.
struct StagedParts {
    std::shared_ptr<const cuda::Api> cuda;
    std::shared_ptr<SegmentMap> segment;  ///< this node's, which is the whole world
    int device = 0;
};

/// A process group over buffers on a CUDA device that works with any number of ranks per device: every
/// collective goes through page-locked host memory and the CPU backend. Not fast: for tests of the whole path
/// and for machines with fewer devices than ranks. Buffers from allocate_shared need no extra copy on the
/// host. Blocks until every rank has joined. Throws what the CPU backend throws, and Error with CUDA's
/// reason.
std::unique_ptr<ProcessGroup> make_staged_group(StagedParts parts, const ddprun::WorkerEnv& env,
                                                const ProcessGroupOptions& options);

}  // namespace ddp
