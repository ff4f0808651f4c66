#pragma once

#include <memory>

#include "ddp/process_group.h"
#include "ddp/segment_map.h"

namespace ddp {

/// A process group over the CPU backend on this segment. Joins, so it blocks; throws what
/// ProcessGroup::create throws. Progress::Auto becomes Inline when this rank has less than two CPUs.
std::unique_ptr<ProcessGroup> make_cpu_group(std::shared_ptr<SegmentMap> segment,
                                             const ddprun::WorkerEnv& env,
                                             const ProcessGroupOptions& options);

}  // namespace ddp
