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

/// The bounds of a wait: `deadline`, and an exception when the launcher has ended the generation.
struct WaitBounds {
    ddprun::TimePoint deadline;
    std::function<void()> throw_if_lost;
    int ranks = 0;  ///< that wait for each other
};

/// After an error of NCCL, which another rank's end may have caused: waits for the launcher's word of it,
/// half a second at most, and throws the exception of throw_if_lost. Returns at once with one rank.
void throw_late_loss(const WaitBounds& bounds);

/// Runs `task` on its own thread and waits at most `limit` for it. False: it did not return, and its thread
/// stays behind (the task must own everything it uses).
bool returns_within(std::chrono::nanoseconds limit, std::function<void()> task);

/// True once no ncclCommAbort of this process is running, false after the limit. Blocking.
bool aborts_return_within(std::chrono::nanoseconds limit);

/// One non-blocking NCCL communicator: no call into it waits for a peer; every wait is in this code and has a
/// limit. Thread-safe: one thread at a time is inside NCCL.
class Communicator : public std::enable_shared_from_this<Communicator> {
  public:
    /// Joins. Throws TimeoutError, Error with NCCL's reason, and the exceptions of `throw_if_lost`; each
    /// begins with `attempt`.
    static std::shared_ptr<Communicator> join(std::shared_ptr<const Api> api, std::vector<UniqueId> ids,
                                              int rank, int ranks, const WaitBounds& bounds,
                                              const std::string& attempt);
    explicit Communicator(std::shared_ptr<const Api> api) : api_(std::move(api)) {}
    ~Communicator();
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    /// Collective: splits off a communicator of the ranks of equal `color`, ordered by `key`; null for
    /// kNoColor. Nothing may be in flight. Requires comm_split; throws the errors of join, after which this
    /// communicator must be stopped: peers may be waiting in the split.
    std::shared_ptr<Communicator> split(int color, int key, const WaitBounds& bounds,
                                        const std::string& attempt);

    [[nodiscard]] const Api& api() const { return *api_; }
    /// The result of `call`, or InProgress while it has only begun; nullopt once the communicator was
    /// stopped.
    std::optional<Code> call(const std::function<Code(Handle)>& call);
    /// ncclCommGetAsyncError: InProgress while the last call is in progress. nullopt once stopped, or while
    /// another thread is inside NCCL.
    std::optional<Code> state();
    /// NCCL's text for a failure of this communicator, which also goes into the error report.
    std::string explain(Code code);

    /// Ends the work in flight on the device. False: NCCL did not return within `limit`, as happens while a
    /// CUDA graph with collectives of this communicator exists; the device was told nevertheless.
    /// ncclCommRevoke is no alternative: an abort after it frees memory that such a graph still uses (2.28 to
    /// 2.30).
    bool stop(std::chrono::nanoseconds limit);
    /// Frees `memory` with this communicator, whose last owner may be the thread of an abort or a finalize
    /// that has not returned: until then kernels may use it.
    void free_at_end(std::shared_ptr<void> memory);
    /// Finalizes and destroys; ends by the deadline and a few seconds more, also when NCCL does not return.
    /// "" on success, else the reason; then the communicator was stopped.
    std::string finish(const WaitBounds& bounds);

  private:
    void wait_until_joined(Code code, const WaitBounds& bounds, const std::string& attempt);
    void abort();
    class Finalizing;
    std::string finalize(const WaitBounds& bounds);
    Code start_joining(std::vector<UniqueId>& ids, int rank, int ranks);

    std::shared_ptr<const Api> api_;
    std::mutex mutex_;
    Handle handle_ = nullptr;
    /// The communicator of a split in progress: NCCL writes into it from its own thread, also after a
    /// time-out here.
    std::shared_ptr<Communicator> splitting_;
    std::vector<std::shared_ptr<void>> memory_;
};

/// The backoff between two polls of a communicator or an event in progress: NCCL and CUDA have no descriptor
/// or condition to wait on. Short at first, because NCCL starts a collective on its own thread, which takes
/// tens of microseconds, and a training step waits for it; later long enough to cost nothing.
class Backoff {
  public:
    void next();

  private:
    ddprun::TimePoint begin_ = ddprun::MonotonicClock::now();
};

}  // namespace ddp::nccl
