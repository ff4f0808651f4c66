#pragma once

#include <memory>

#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/unique_fd.h"
#include "env/worker_env.h"

namespace ddp {

/// Opens this node's segment: the launcher's, or one that the ranks share among themselves. After this the
/// launcher can request stacks. Throws the errors of share_segment.
std::shared_ptr<SegmentMap> open_segment(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

/// Gives all ranks of one node the same segment when no launcher made one (torchrun, mpiexec): the first rank
/// makes it and passes it to the others over an abstract Unix socket, which leaves nothing in the file
/// system. Only processes of the same user are served and trusted. The name is derived from MASTER_ADDR,
/// MASTER_PORT, the run id, the generation and the node's number, so two jobs must differ in one of them, as
/// they must for their store.
///
/// Blocks until this rank has the segment; the node's first rank blocks until all others have it. Throws
/// TimeoutError naming the missing ranks, MismatchError when world sizes differ, InvalidInput when the name
/// is taken.
ddprun::UniqueFd share_segment(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

}  // namespace ddp
