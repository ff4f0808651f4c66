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
#include "ddp/worker/bootstrap_store.h"
#include "ddp/worker/segment_map.h"
#include "env/clock.h"
#include "env/worker_env.h"

/// The exchange of a communicator's unique ids: through the launcher's store, under keys that contain the
/// generation, so that a survivor of the last world cannot meet the next one.
namespace ddp::nccl {

/// The number of ranks whose connections one root serves at start.
inline constexpr int kRanksPerRoot = 128;

/// The number of unique ids for a communicator of that size.
int root_count(int ranks, bool has_scalable_init);
/// The rank that makes the id of a root.
constexpr int root_rank(int root) { return root * kRanksPerRoot; }
/// "nccl/<generation>/<communicator>/<root>".
std::string id_key(std::uint64_t generation, int communicator, int root);

/// A collective over another channel: every rank's message, by rank.
using Gather = std::function<std::vector<std::string>(std::string_view mine)>;
/// Throws InvalidInput where there is no launcher with a store.
void require_store(const ddprun::WorkerEnv& env);
/// The launcher's store. Throws InvalidInput without one, TimeoutError, Error.
BootstrapStore id_store(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

struct Rendezvous {
    int rank = 0;
    int ranks = 1;
    std::uint64_t generation = 0;
    int communicator = 0;
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;  ///< called between waits
};
/// Makes this rank's ids and fetches the others, in the order of the roots. Throws TimeoutError naming the
/// rank whose id is missing, Error with NCCL's reason.
std::vector<UniqueId> exchange_ids(const Api& api, const BootstrapStore& bootstrap,
                                   const Rendezvous& rendezvous);
/// Exchanges ids without a store; collective. A rank whose NCCL fails tells all others.
std::vector<UniqueId> gather_ids(const Api& api, const Gather& gather, const Rendezvous& rendezvous);

}  // namespace ddp::nccl

namespace ddp {

/// The environment of the NCCL backend; tests have their own.
struct NcclParts {
    std::shared_ptr<const nccl::Api> nccl;
    std::shared_ptr<SegmentMap> segment;  ///< this node's: the launcher's abort word and the rank lines
    int device = 0;                       ///< device of this rank and of the calling thread
    BootstrapStore bootstrap;             ///< not used by a world of one
    nccl::Gather gather = {};             ///< replaces the store when set
    int communicator = 0;                 ///< number of this communicator in the generation
};

/// A process group of one CUDA device per rank over NCCL. Buffers are device memory. Blocks until every rank
/// has joined. Throws TimeoutError, PeerLostError, Error with NCCL's or CUDA's reason.
std::unique_ptr<ProcessGroup> make_nccl_group(NcclParts parts, const ddprun::WorkerEnv& env,
                                              const ProcessGroupOptions& options);

}  // namespace ddp
