#pragma once

#include <cstdint>
#include <memory>

#include "ddp/process_group.h"
#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"

/// What ProcessGroup::create is put together from, for devices; tests take the parts.
namespace ddp {

/// Whether several ranks may work on one device.
enum class Sharing : std::uint8_t { Never, Allowed };

/// The device of this rank: `wanted`, or with index -1 the one with the local rank's number; where ranks may
/// share and there are too few, they go round. The calling thread works on it from now on. Throws
/// InvalidInput: no device, or too few, with what was seen.
int choose_device(const ddprun::WorkerEnv& env, const Device& wanted, Sharing sharing);

/// What the staged backend needs from outside.
struct StagedParts {
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
