#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/cuda/cuda_api.h"
#include "ddp/nccl/api.h"
#include "ddp/process_group.h"
#include "ddp/worker/board.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/worker_env.h"

/// How the ranks of a communicator get its unique ids: through the launcher's store, under names that hold
/// the generation, so that a survivor of the last world cannot meet the next.
namespace ddp::nccl {

/// One root serves that many ranks' connections at start.
inline constexpr int kRanksPerRoot = 128;

/// How many unique ids a communicator of that size is made with.
int root_count(int ranks, bool has_scalable_init);
/// The rank that makes the id of a root.
constexpr int maker_of(int root) { return root * kRanksPerRoot; }
/// "nccl/<generation>/<communicator>/<root>".
std::string id_key(std::uint64_t generation, int communicator, int root);

/// A collective of all ranks over something else: everyone's message, by rank.
using Gather = std::function<std::vector<std::string>(std::string_view mine)>;
/// Throws InvalidInput where there is no launcher with a store.
void require_store(const ddprun::WorkerEnv& env);
/// In the launcher's store. Throws InvalidInput when there is none, TimeoutError, Error.
Board id_board(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

struct Appointment {
    int rank = 0;
    int ranks = 1;
    std::uint64_t generation = 0;
    int communicator = 0;
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;  ///< called between waits
};
/// Makes the ids that are ours to make and fetches the others; in the order of the roots.
/// Throws TimeoutError naming the rank whose id did not come, Error with NCCL's reason.
std::vector<UniqueId> exchange_ids(const Api& api, const Board& board, const Appointment& appointment);
/// The same without a store: collective. A rank whose NCCL fails tells all others.
std::vector<UniqueId> gather_ids(const Api& api, const Gather& gather, const Appointment& appointment);

}  // namespace ddp::nccl

namespace ddp {

/// What the NCCL backend needs from outside; tests bring their own.
struct NcclParts {
    std::shared_ptr<const nccl::Api> nccl;
    std::shared_ptr<SegmentMap> segment;  ///< this node's: the launcher's abort word and the rank lines
    int device = 0;                       ///< of this rank, and the calling thread's
    Board board;                          ///< not used by a world of one
    nccl::Gather gather = {};             ///< in place of the board, where it is set
    int communicator = 0;                 ///< the how many-th of this generation
};

/// A process group of one CUDA device per rank over NCCL. Buffers are device memory. Blocks until every rank
/// has joined. Throws TimeoutError, PeerLostError, Error with NCCL's or CUDA's reason.
std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const ddprun::WorkerEnv& env,
                                              const ProcessGroupOptions& options);

}  // namespace ddp
