#pragma once

#include "ddp/span.h"
#include "ddp/worker/call.h"
#include "env/trace_file.h"
#include "env/worker_env.h"

/// The trace of this process: DDP_TRACE names the directory of its file (env/trace_file.h). Any thread; a
/// forked child writes nothing.
namespace ddp::trace {

using ddprun::TraceKind;

inline bool is_on() { return ring.load(std::memory_order_relaxed) != nullptr; }

/// Called before each group of the world. The first call makes the file, if DDP_TRACE is set; later records
/// belong to the rank and generation of `env`. Throws FileError when there cannot be one.
void enter(const ddprun::WorkerEnv& env);
/// The number of the latest group of the world in this generation, from 1; 0: there was none, or no trace.
std::uint16_t current_group();

/// `group` is current_group(), or 0 for a group of some of the ranks.
Begun begin_collective(const Call& call, std::uint16_t group, std::int64_t begin_ns) noexcept;
/// Ends a span; nothing when `begun` is empty, or so old that its record has been reused.
void end_at(const Begun& begun, std::int64_t end_ns, std::int64_t waiting_ns = 0) noexcept;
/// A training step that has ended.
void add_step(std::uint64_t number, std::int64_t begin_ns, std::int64_t end_ns) noexcept;

/// A span of libddp itself, from construction to destruction.
class Scope {
  public:
    Scope(TraceKind kind, std::string_view name) noexcept {
        if (is_on()) begun_ = begin(kind, name);
    }
    ~Scope() {
        if (begun_.record != nullptr) end(begun_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

  private:
    static Begun begin(TraceKind kind, std::string_view name) noexcept;
    Begun begun_;
};

}  // namespace ddp::trace
