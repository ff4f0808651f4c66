#pragma once

#include <string>
#include <vector>

#include "ddp/shm/arena.h"
#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp::cpu {

/// What joining taught the ranks of a node about it, the same on all. A sub-group goes by its parent's: the
/// ranks that are not in it compute meanwhile.
struct Roster {
    int ranks = 1;                   ///< of the node
    int cpus = 1;                    ///< that they may use, all together
    bool ranks_share_cores = false;  ///< more ranks than CPUs: waiting must not spin
};

/// MismatchError: the two were started with worlds of these sizes.
[[noreturn]] void throw_world_sizes(int rank, std::uint32_t size, int other_rank, std::uint32_t other);

/// Lets everybody who waits in join() on this segment know that `rank` was started with another world size.
void leave_claim(SegmentMap& segment, int rank, int world_size);

/// Says who we are before the segment is divided: a claim that contradicts the segment is shown to the peers
/// too. Throws MismatchError with both sides.
void check_claim(SegmentMap& segment, const ddprun::WorkerEnv& env);

/// Writes our identity and waits for everybody's.
/// Throws MismatchError (both sides), TimeoutError (which ranks are missing), PeerLostError (generation
/// ended).
void join(Arena& arena, const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

/// Of the node whose ranks have all joined `arena`.
Roster read_roster(const Arena& arena);

/// Writes into our identity how others find out that we are no more, without a launcher that would tell:
/// before it is shown to them.
///
/// The id of a process counts in its PID namespace only, and ranks may be in several (a container each).
/// Within ours the id is asked for; a rank of another one holds a mark on the segment's file, which the
/// kernel takes off with its last descriptor, however the process ends.
void leave_mark(Arena& arena);
/// The rank has joined, and is no more. False also where that cannot be known.
bool is_gone(const Arena& arena, std::uint32_t rank);

/// One clause per rank of the group, from its line, or of the message that it is in.
std::string describe_activities(const Arena& arena, const std::vector<std::uint32_t>& ranks,
                                ddprun::TimePoint now);

/// Tells everybody in the group of a failure, as told() gives it (worker/told_failure.h); what was said first
/// stays.
void complain(Control& control, const std::string& words);
/// Throws it with the type that it had, "<attempt>: the group has failed: ...". Nothing when nobody has
/// complained.
void throw_complaint(const Control& control, const std::string& attempt);
/// "" when nobody has complained; else what it says.
std::string complaint_in(const Control& control);

}  // namespace ddp::cpu
