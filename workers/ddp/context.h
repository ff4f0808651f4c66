#pragma once

#include <memory>

#include "env/worker_env.h"

namespace ddprun::rdzv {
class StoreClient;
}

namespace ddp {

/// Who this process is in its world: rank, sizes, and how to reach the launcher. A value; cheap to copy.
///
/// Blocking: `from_env` only reads the environment. Thread-safe once made.
class Context {
  public:
    /// Reads the environment ddprun (or torchrun) made; with no such variables, a world of one.
    /// Throws InvalidInput naming the variable and its value.
    static Context from_env();
    explicit Context(ddprun::WorkerEnv env) : env_(std::move(env)) {}

    [[nodiscard]] int rank() const { return env_.rank; }
    [[nodiscard]] int local_rank() const { return env_.local_rank; }
    [[nodiscard]] int world_size() const { return env_.world_size; }
    [[nodiscard]] int local_world_size() const { return env_.local_world_size; }
    [[nodiscard]] int restart_count() const { return env_.restart_count; }
    [[nodiscard]] std::uint64_t generation() const { return env_.generation; }
    [[nodiscard]] const ddprun::WorkerEnv& env() const { return env_; }

  private:
    ddprun::WorkerEnv env_;
};

}  // namespace ddp
