#pragma once

#include <memory>

#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddp {

/// This node's segment: the launcher's, or one of our own that the ranks give each other. From now on the
/// launcher that gave it can ask for stacks. Throws what share_segment throws.
std::shared_ptr<SegmentMap> open_segment(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

/// Gets all ranks of one node the same segment when no launcher made one (torchrun, mpiexec): its first makes
/// it and hands it to the others over an abstract Unix socket, which leaves nothing in the file system. Only
/// processes of the same user are served and believed. The name comes from MASTER_ADDR, MASTER_PORT, the run
/// id, the generation and the node's number, so two jobs must differ in one of them, as they must for their
/// store.
///
/// Blocks until this rank has the segment and, on the node's first, until everybody has been served.
/// Throws TimeoutError naming the ranks that did not come, MismatchError when world sizes differ,
/// InvalidInput when the name is taken.
ddprun::UniqueFd share_segment(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

}  // namespace ddp
