#pragma once

#include <memory>

#include "ddp/cuda_api.h"
#include "ddp/nccl_api.h"
#include "ddp/nccl_ids.h"
#include "ddp/process_group.h"
#include "ddp/segment_map.h"

namespace ddp {

/// What the NCCL backend needs from outside; tests bring their own.
struct NcclParts {
    std::shared_ptr<const nccl::Api> nccl;
    std::shared_ptr<const cuda::Api> cuda;
    std::shared_ptr<SegmentMap> segment;  ///< this node's: the launcher's abort word and the rank lines
    nccl::Board board;                    ///< not used by a world of one
    nccl::Gather gather = {};             ///< in place of the board, where it is set
    int communicator = 0;                 ///< the how many-th of this process
};

/// A process group of one CUDA device per rank over NCCL: `options.device`, or the device with the number of
/// the local rank. Buffers are device memory. Blocks until every rank has joined. Throws InvalidInput (no
/// such device), TimeoutError, PeerLostError, Error with NCCL's or CUDA's reason.
std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const ddprun::WorkerEnv& env,
                                              const ProcessGroupOptions& options);

}  // namespace ddp
