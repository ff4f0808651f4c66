#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/worker/bootstrap_store.h"
#include "env/clock.h"
#include "env/worker_env.h"

/// The rendezvous of the nodes of a world, before they are connected: through the job's store, under keys
/// that contain the generation, so that a survivor of the last world cannot meet the next one.
namespace ddp::net {

struct Rendezvous {
    int rank = 0;  ///< lowest rank of this node, its leader
    int world_size = 1;
    std::uint64_t generation = 0;
    int group = 0;  ///< number of this group in the generation
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;  ///< called between waits
};

/// "net/<generation>/<group>/<first rank of the node>".
std::string key_of(const Rendezvous& rendezvous, int first_rank);

/// The text of a rank, and its node: the leader's rank.
struct RankText {
    int node = 0;
    std::string text;
};

/// Every rank's text, by rank in the world; `ours` are the texts of this node's ranks, which need not be
/// consecutive. Throws TimeoutError naming a rank whose node is missing (our texts are withdrawn then, and
/// may be sent again), MismatchError when nodes disagree about the size of the world or a rank exists twice.
std::vector<RankText> gather_from_nodes(const BootstrapStore& bootstrap, const Rendezvous& rendezvous,
                                        const std::map<int, std::string>& ours);

/// Joins texts of any bytes into one, and splits it. Throws MismatchError when pack() of this release did not
/// make it.
std::string pack(const std::vector<std::string>& texts);
std::vector<std::string> unpack(std::string_view packed);

/// The address of this node's interface towards the job: the source address of packets to MASTER_ADDR, where
/// other hosts take part. Throws InvalidInput, TimeoutError naming MASTER_ADDR (no answer of the resolver by
/// the deadline).
std::string own_address(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

}  // namespace ddp::net
