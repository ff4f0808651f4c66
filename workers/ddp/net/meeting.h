#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/worker/board.h"
#include "env/clock.h"
#include "env/worker_env.h"

/// How the nodes of a world tell each other what their ranks say, before they can speak to each other:
/// through the job's store, under names that hold the generation, so that a survivor of the last world cannot
/// meet the next.
namespace ddp::net {

struct Appointment {
    int rank = 0;  ///< of the node's first rank, which speaks for it: its lowest
    int world_size = 1;
    std::uint64_t generation = 0;
    int group = 0;  ///< the how many-th of this generation
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;  ///< called between waits
};

/// "net/<generation>/<group>/<first rank of the node>".
std::string key_of(const Appointment& appointment, int first_rank);

/// What a rank says, and its node: the rank that speaks for it.
struct Word {
    int node = 0;
    std::string text;
};

/// Everyone's words, by rank in the world; `ours` are those of this node's ranks, which need not follow each
/// other. Throws TimeoutError naming a rank whose node did not come (ours is withdrawn then, and may be said
/// again), MismatchError where nodes disagree about the size of the world or a rank is there twice.
std::vector<Word> gather_nodes(const Board& board, const Appointment& appointment,
                               const std::map<int, std::string>& ours);

/// Words of any bytes as one, and back. Throws MismatchError where it is none of pack()'s: another release.
std::string pack(const std::vector<std::string>& words);
std::vector<std::string> unpack(std::string_view packed);

/// The address of this node's interface towards the job: by which it reaches MASTER_ADDR, where the others
/// are on other hosts. Throws InvalidInput, TimeoutError naming MASTER_ADDR (the resolver has not answered by
/// the deadline).
std::string own_address(const ddprun::WorkerEnv& env, ddprun::TimePoint deadline);

}  // namespace ddp::net
