#pragma once

#include <string>
#include <vector>

#include "ddp/shm/arena.h"
#include "env/clock.h"
#include "env/worker_env.h"

namespace ddp::cpu {

/// The ranks and CPUs of a node, equal on all its ranks. A sub-group uses its parent's: ranks outside of it
/// compute meanwhile.
struct NodeCpus {
    int ranks = 1;                   ///< on the node
    int cpus = 1;                    ///< available to all of them together
    bool ranks_share_cores = false;  ///< more ranks than CPUs: waiting must not spin
};

/// Throws MismatchError: the two ranks were started with worlds of these sizes.
[[noreturn]] void throw_world_sizes(int rank, std::uint32_t size, int other_rank, std::uint32_t other);

/// Tells all ranks that wait in join() on this segment that `rank` was started with another world size.
void post_claim(SegmentMap& segment, int rank, int world_size);

/// Checks this rank's sizes before the segment is divided; the peers learn of a contradiction too. Throws
/// MismatchError with both sides.
void check_claim(SegmentMap& segment, const ddprun::WorkerEnv& env);

/// Writes this rank's identity and waits for all others. Throws MismatchError (both sides), TimeoutError (the
/// missing ranks), PeerLostError (generation ended).
void join(Arena& arena, const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

/// For a node whose ranks have all joined `arena`.
NodeCpus read_node_cpus(const Arena& arena);

/// Writes into this rank's identity how other ranks can detect its end without a launcher. Called before the
/// identity is published.
///
/// A process id counts only in its PID namespace, and ranks may be in several (one per container). In the
/// same namespace the id is checked; a rank of another one holds a lock on the segment's file, which the
/// kernel releases with its last descriptor, however the process ends.
void set_presence_mark(Arena& arena);
/// True when the rank has joined and its process has ended. False also when that is unknown.
bool is_gone(const Arena& arena, std::uint32_t rank);

/// One clause per rank of the group, from its line, or about the message that it waits for.
std::string describe_activities(const Arena& arena, const std::vector<std::uint32_t>& ranks,
                                ddprun::TimePoint now);

/// Tells all ranks of the group of a failure, encoded by encode_failure (worker/encoded_failure.h); the first
/// one stays.
void post_failure(Control& control, const std::string& text);
/// Throws the posted failure with its type, "<attempt>: the group has failed: ...". Does nothing without one.
void throw_posted_failure(const Control& control, const std::string& attempt);
/// The text of the posted failure; "" without one.
std::string posted_failure(const Control& control);

}  // namespace ddp::cpu
