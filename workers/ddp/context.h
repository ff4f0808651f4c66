#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace ddprun {
struct WorkerEnv;
}

namespace ddp {

/// The identity of this process in its world: rank, sizes, and the way to reach the launcher. A value; cheap
/// to copy.
///
/// Blocking: `from_env` only reads the environment; it asks a PMIx server (at most 10 s) where a launcher
/// gives the rank but not the sizes. On several hosts without ddprun it is collective: all ranks rendezvous
/// (120 s at most, or DDPRUN_EXCHANGE_TIMEOUT), and rank 0's process serves the job's store from then on.
/// Thread-safe once made.
class Context {
  public:
    /// Reads the environment of ddprun (or torchrun); without ddprun, that of mpirun, mpiexec, srun or flux,
    /// the innermost launcher first; with no such variables, a world of one. DDPRUN_LAUNCHER=<launcher> or
    /// none overrides this. Throws InvalidInput naming the variable and its value, or both sides of a
    /// contradiction.
    static Context from_env();
    /// For libddp itself: programs use from_env().
    explicit Context(const ddprun::WorkerEnv& env, std::string origin = {});

    [[nodiscard]] int rank() const;
    [[nodiscard]] int local_rank() const;
    [[nodiscard]] int world_size() const;
    [[nodiscard]] int local_world_size() const;
    [[nodiscard]] int restart_count() const;
    [[nodiscard]] std::uint64_t generation() const;
    /// True where the launcher has a key-value store for the job: Store can be made.
    [[nodiscard]] bool has_store() const;
    /// The source of the rank, in one line: "launcher=openmpi rank 3/4 local 3/4 node 0/1"; "" when the
    /// constructor got none.
    [[nodiscard]] const std::string& origin() const { return origin_; }
    /// All that the launcher told, for libddp itself (env/worker_env.h, which is not installed).
    [[nodiscard]] const ddprun::WorkerEnv& env() const { return *env_; }

  private:
    std::shared_ptr<const ddprun::WorkerEnv> env_;
    std::string origin_;
};

}  // namespace ddp
