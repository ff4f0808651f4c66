#include "ddp/testing.h"

#include <fcntl.h>
#include <fmt/core.h>

#include <mutex>
#include <thread>

#include "ddp/shm/cpu_backend.h"

namespace ddp::testing {

namespace {

using Mapping = RankOptions::Mapping;

bool maps_once(Mapping mapping) {
#ifdef __SANITIZE_THREAD__
    return mapping != Mapping::OnePerRank;
#else
    return mapping == Mapping::Shared;
#endif
}

int checked(int ranks) {
    if (ranks > 0) return ranks;
    throw InvalidInput(fmt::format("testing: a world of {} ranks", ranks));
}

/// One segment, and the ranks of a test on it.
class World {
  public:
    World(int ranks, const RankOptions& options)
        : ranks_(checked(ranks)),
          options_(options),
          fd_(make_segment({.local_world_size = static_cast<std::uint32_t>(ranks),
                            .world_size = static_cast<std::uint32_t>(ranks),
                            .cpus = options.cpus})),
          map_(another_map()) {}

    /// Runs fn on all ranks; when it throws, calls `failed` on that rank's thread.
    void run(const std::function<void(ProcessGroup&)>& fn,
             const std::function<void(int, std::exception_ptr)>& failed) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks_; ++rank) {
            threads.emplace_back([this, rank, &fn, &failed] {
                try {
                    auto map = maps_once(options_.mapping) ? map_ : another_map();
                    const auto group =
                        cpu::make_group(std::move(map), environment_of(rank, ranks_), options_.group);
                    fn(*group);
                } catch (...) {
                    failed(rank, std::current_exception());
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
    }

    void end_generation(int because_of_rank) {
        map_->header().aborted.store(static_cast<std::uint32_t>(because_of_rank) + 1);
    }

  private:
    std::shared_ptr<SegmentMap> another_map() const {
        return std::make_shared<SegmentMap>(ddprun::UniqueFd(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0)));
    }

    int ranks_;
    RankOptions options_;
    ddprun::UniqueFd fd_;
    std::shared_ptr<SegmentMap> map_;
};

}  // namespace

ddprun::WorkerEnv environment_of(int rank, int ranks) {
    ddprun::WorkerEnv env;
    env.rank = env.local_rank = env.role_rank = rank;
    env.world_size = env.local_world_size = env.role_world_size = ranks;
    return env;
}

void run_ranks(int ranks, const std::function<void(ProcessGroup&)>& fn, const RankOptions& options) {
    World world(ranks, options);
    std::mutex mutex;
    std::exception_ptr first;
    world.run(fn, [&](int rank, const std::exception_ptr& failure) {
        const std::lock_guard lock(mutex);
        if (!first) first = failure;
        world.end_generation(rank);
    });
    if (first) std::rethrow_exception(first);
}

std::vector<std::exception_ptr> failures_of_ranks(int ranks, const std::function<void(ProcessGroup&)>& fn,
                                                  const RankOptions& options) {
    World world(ranks, options);
    std::vector<std::exception_ptr> failures(
        static_cast<std::size_t>(ranks));  // positive: the world checked it
    world.run(fn, [&](int rank, std::exception_ptr failure) {
        failures[static_cast<std::size_t>(rank)] = std::move(failure);
    });
    return failures;
}

}  // namespace ddp::testing
