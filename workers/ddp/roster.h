#pragma once

#include "ddp/arena.h"
#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp::cpu {

/// What joining taught a rank about its group; the same on all ranks except the last member.
struct Roster {
    int cpus = 1;                    ///< CPUs that the group's ranks may use, all together
    bool ranks_share_cores = false;  ///< more ranks than CPUs: waiting must not spin
    bool pids_are_visible =
        false;  ///< every peer's pid can be signalled from here, so a death can be noticed
};

/// Lets everybody who waits in join() on this segment know that `rank` was started with another world size.
void leave_claim(SegmentMap& segment, int rank, int world_size);

/// Says who we are before the segment is divided: a claim that contradicts the segment is shown to the peers
/// too. Throws MismatchError with both sides.
void check_claim(SegmentMap& segment, const ddprun::WorkerEnv& env);

/// Writes our identity and waits for everybody's.
/// Throws MismatchError (both sides), TimeoutError (which ranks are missing), PeerLostError (generation
/// ended).
Roster join(Arena& arena, const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

}  // namespace ddp::cpu
