#pragma once

#include <cstdint>
#include <memory>

#include "ddp/process_group.h"
#include "ddp/worker/segment_map.h"
#include "env/worker_env.h"

/// The parts of ProcessGroup::create for devices, also for tests.
namespace ddp {

/// Whether several ranks may work on one device.
enum class Sharing : std::uint8_t { Never, Allowed };

/// Chooses the device of this rank: `wanted`, or with index -1 the one with the local rank's number; where
/// ranks may share and there are too few, round robin. The calling thread uses it from now on. Throws
/// InvalidInput naming the visible devices when there is none, or too few.
int choose_device(const ddprun::WorkerEnv& env, const Device& wanted, Sharing sharing);

struct StagedParts {
    std::shared_ptr<SegmentMap> segment;  ///< this node's segment, which covers the world
    int device = 0;
};

/// A process group over buffers on a CUDA device for any number of ranks per device: every collective goes
/// through page-locked host memory and the CPU backend. Slow: for tests of the whole path and for machines
/// with fewer devices than ranks. Buffers from allocate_shared need no extra copy on the host. Blocks until
/// every rank has joined. Throws the CPU backend's errors, and Error with CUDA's reason.
std::unique_ptr<ProcessGroup> make_staged_group(StagedParts parts, const ddprun::WorkerEnv& env,
                                                const ProcessGroupOptions& options);

}  // namespace ddp
