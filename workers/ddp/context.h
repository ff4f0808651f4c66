#pragma once

#include <string>
#include <utility>

#include "env/worker_env.h"

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
    explicit Context(ddprun::WorkerEnv env, std::string origin = {})
        : env_(std::move(env)), origin_(std::move(origin)) {}

    [[nodiscard]] int rank() const { return env_.rank; }
    [[nodiscard]] int local_rank() const { return env_.local_rank; }
    [[nodiscard]] int world_size() const { return env_.world_size; }
    [[nodiscard]] int local_world_size() const { return env_.local_world_size; }
    [[nodiscard]] int restart_count() const { return env_.restart_count; }
    [[nodiscard]] std::uint64_t generation() const { return env_.generation; }
    [[nodiscard]] const ddprun::WorkerEnv& env() const { return env_; }
    /// The source of the rank, in one line: "launcher=openmpi rank 3/4 local 3/4 node 0/1"; "" when the
    /// constructor got none.
    [[nodiscard]] const std::string& origin() const { return origin_; }

  private:
    ddprun::WorkerEnv env_;
    std::string origin_;
};

}  // namespace ddp
