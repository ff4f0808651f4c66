#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ddp/nccl/api.h"
#include "env/clock.h"

namespace ddp::nccl {

/// A wait of ours: ends by `deadline`, and by an exception when the launcher has ended the generation.
struct Patience {
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;
};

/// Runs `task` on a thread of its own and waits at most `limit` for it. False: it did not come back, and its
/// thread is left behind (what it uses must be held by what it captures).
bool returns_within(std::chrono::nanoseconds limit, std::function<void()> task);

/// One non-blocking NCCL communicator: no call into it waits for a peer, all waiting is ours and has an end.
/// Thread-safe: one thread at a time is inside NCCL.
class Communicator : public std::enable_shared_from_this<Communicator> {
  public:
    /// Joins. Throws TimeoutError, Error with NCCL's reason, and what `throw_if_lost` throws; each begins
    /// with `attempt`.
    static std::shared_ptr<Communicator> join(std::shared_ptr<const Api> api, std::vector<UniqueId> ids,
                                              int rank, int ranks, const Patience& patience,
                                              const std::string& attempt);
    explicit Communicator(std::shared_ptr<const Api> api) : api_(std::move(api)) {}
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    /// Collective: the ranks of equal `color`, ordered by `key`, as a communicator of their own; null for
    /// kNoColor. Nothing may be in flight. Needs comm_split; throws what join throws, and this communicator
    /// must be stopped then: peers may be waiting in the split.
    std::shared_ptr<Communicator> split(int color, int key, const Patience& patience,
                                        const std::string& attempt);

    [[nodiscard]] const Api& api() const { return *api_; }
    /// What `call` returns, or InProgress while it has only begun; nullopt once the communicator was stopped.
    std::optional<Code> call(const std::function<Code(Handle)>& call);
    /// ncclCommGetAsyncError: InProgress while the last call is going on. nullopt once stopped, or while
    /// another thread is inside NCCL.
    std::optional<Code> state();
    /// NCCL's words for a failure of this communicator; the error report will have them too.
    std::string explain(Code code);

    /// Ends what is in flight on the device. False: NCCL did not come back within `limit`, which it does not
    /// as long as a CUDA graph with collectives of this communicator exists; the device was told all the
    /// same. Not by ncclCommRevoke: an abort after it frees what such a graph still uses (2.28 to 2.30).
    bool stop(std::chrono::nanoseconds limit);
    /// Frees `memory` with this communicator, whose last owner may be the thread of an abort or a finalize
    /// that has not come back: until then kernels may use it.
    void free_at_end(std::shared_ptr<void> memory);
    /// Finalize and destroy; by the deadline and a few seconds more, also where NCCL does not come back from
    /// one of them. "" when all went well, else why not; then it has been stopped.
    std::string finish(const Patience& patience);

  private:
    void wait_until_joined(Code code, const Patience& patience, const std::string& attempt);
    class Finalizing;
    std::string finalize(const Patience& patience);
    Code start_joining(std::vector<UniqueId>& ids, int rank, int ranks);

    std::shared_ptr<const Api> api_;
    std::mutex mutex_;
    Handle handle_ = nullptr;
    /// What a split is making: NCCL writes into it from a thread of its own, also after we gave up.
    std::shared_ptr<Communicator> coming_;
    std::vector<std::shared_ptr<void>> memory_;
};

/// Between two looks at a communicator or an event that is in progress: NCCL and CUDA have no descriptor or
/// condition to wait on. Short at first, because NCCL starts a collective on a thread of its own, which takes
/// tens of microseconds, and a training step waits for it; later long enough to cost nothing.
class Pauses {
  public:
    void next();

  private:
    ddprun::TimePoint begin_ = ddprun::MonotonicClock::now();
};

}  // namespace ddp::nccl
