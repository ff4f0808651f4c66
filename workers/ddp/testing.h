#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <vector>

#include "ddp/process_group.h"

/// Ranks as threads of one process, for tests of libddp and of programs on top of it.
namespace ddp::testing {

struct RankOptions {
    ProcessGroupOptions group = {.timeout = std::chrono::seconds(60)};
    /// One mapping for all ranks lets ThreadSanitizer see their races; one per rank is what processes have.
    enum class Mapping : std::uint8_t { Auto, OnePerRank, Shared } mapping = Mapping::Auto;
    /// The number of CPUs for the ranks, as a launcher reports it; 0: it does not.
    std::uint32_t cpus = 0;
};

/// Runs fn on `ranks` threads, each with its own process group of one world. When one throws, the generation
/// ends (the others get PeerLostError), and the first exception is rethrown once all threads have ended.
/// Throws InvalidInput for less than one rank.
void run_ranks(int ranks, const std::function<void(ProcessGroup&)>& fn, const RankOptions& options = {});

/// Runs fn likewise, but returns every rank's exception (null without one), by rank, and does not end the
/// generation.
[[nodiscard]] std::vector<std::exception_ptr> failures_of_ranks(int ranks,
                                                                const std::function<void(ProcessGroup&)>& fn,
                                                                const RankOptions& options = {});

struct RecoveringOptions {
    /// A rank as a process can be killed; its program must not use threads of the test.
    enum class Workers : std::uint8_t { Threads, Processes } workers = Workers::Threads;
    /// Called with the number of each generation before its workers go on.
    std::function<void(std::uint64_t generation)> on_generation = {};
    int most_generations = 100;
    std::chrono::nanoseconds limit = std::chrono::seconds(30);  ///< of each wait of a recovery
    /// The number of ranks on each node; empty: all on one. Several nodes need processes, and libfabric.
    std::vector<int> nodes = {};
    /// A rank that SIGPWR kills takes its node along, with its kept memory. These nodes take the places of
    /// lost ones; without one the world goes on with fewer ranks.
    int spares = 0;
    /// So many lost nodes without a spare come back, each in the recovery after the next loss of a rank.
    int returning = 0;
};

/// Runs `program`, which makes a Recovery, for each rank of a world, under an agent that recovers in place as
/// ddprun does: a rank whose program throws, or whose process is killed, is started again in a new
/// generation, and the others go on. Returns the number of generations once all have finished. Throws Error
/// where ddprun would restart all ranks: more than half of them failed at once, or one had said that it
/// cannot recover.
int run_recovering(int ranks, const std::function<void(const Context&)>& program,
                   const RecoveringOptions& options = {});

/// The environment of one rank of a one-node world.
ddprun::WorkerEnv environment_of(int rank, int ranks);

}  // namespace ddp::testing
