#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "ddp/shm/arena.h"
#include "ddp/shm/joining.h"
#include "ddp/shm/waiting.h"
#include "ddp/span.h"

namespace ddp::cpu {

/// The steps in which all ranks of a node meet, and the slots that they show there. A collective is begin(),
/// some steps, end(). One thread at a time.
///
/// A step costs one cache line per peer: it holds the flag, the call (which reveals a mismatch) and the first
/// bytes of the message. A waiting rank spins as long as that pays (SpinBudget), then sleeps on a futex, and
/// checks the abort word and the deadline every kSleepSlice. Where ranks share cores no rank spins: the last
/// to arrive wakes the others, one sleep per rank and step. A step is complete when all slots show it; the
/// words that save reading every slot do not count, because a rank can be killed between the two writes.
class Lockstep {
  public:
    /// Tests set `steps_so_far` to reach the overflow after 2^32 steps.
    Lockstep(Arena& arena, const NodeCpus& node_cpus, std::chrono::nanoseconds timeout,
             std::uint32_t steps_so_far = 0);

    /// Starts a collective: gives it its sequence number, writes this rank's line. Throws PeerLostError at
    /// once when the generation is over, and the first failure again when an earlier collective of this group
    /// failed.
    void begin(Call call);
    void end();

    /// This rank's slot of the next step, and the number of that step.
    [[nodiscard]] Slot& own_slot() const { return arena_.slot(rank_, next_step()); }
    [[nodiscard]] std::uint32_t next_step() const { return step_ + 1; }
    /// A rank's slot of the last completed step, and the number of that step.
    [[nodiscard]] const Slot& slot_of(std::uint32_t rank) const { return arena_.slot(rank, step_); }
    [[nodiscard]] std::uint32_t current_step() const { return step_; }

    /// Publishes this rank's slot, waits until all ranks have published theirs, compares the calls. Throws
    /// MismatchError, PeerLostError, TimeoutError; the group is unusable from then on.
    void meet();

    [[nodiscard]] double communication_seconds() const;
    /// The part of these seconds until the last rank had made the call: the first step of each collective.
    [[nodiscard]] double waiting_seconds() const {
        return static_cast<double>(waiting_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }
    /// Applies to later collectives.
    void set_timeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return timeout_; }
    [[nodiscard]] const Call& call() const { return call_; }
    /// Records the start time: the call waits for something other than a step.
    void note_start() { note_start(now_ns()); }
    /// Extends the deadline of the rest of this call by `longer`: other ranks must detect a missing rank
    /// first.
    void extend_deadline(std::chrono::nanoseconds longer) { extension_ = longer; }
    /// Fails this call and all later ones with a MismatchError; all ranks see the same disagreement.
    [[noreturn]] void fail_mismatch(const std::string& on_what);
    /// Makes every later collective fail with `why`, after an error outside of the steps.
    void mark_broken(std::exception_ptr why);
    [[nodiscard]] bool is_broken() const { return broken_ != nullptr; }
    /// Throws the first failure again.
    void throw_if_broken() const {
        if (broken_) std::rethrow_exception(broken_);
    }

  private:
    [[nodiscard]] bool may_wait_for_nodes() const { return extension_.count() > 0; }
    void arrive(Slot& slot);
    void wait_for_each();
    void wait_together();
    void note_start(std::int64_t now);
    void note_wait();
    void trace_begin();
    static bool spin_eagerly(const std::atomic<std::uint32_t>& word, std::uint32_t value);
    void sleep_until(std::atomic<std::uint32_t>& word, std::uint32_t value);
    void compare_calls();
    void throw_if_failed();
    void throw_if_failure_posted();
    [[noreturn]] void time_out();
    template <class Exception>
    [[noreturn]] void fail(const std::string& what);
    [[nodiscard]] std::vector<std::uint32_t> absent() const;
    [[nodiscard]] int global(std::uint32_t rank) const { return arena_.global_rank(rank); }

    Arena& arena_;
    const std::uint32_t rank_;
    const NodeCpus node_cpus_;
    std::chrono::nanoseconds timeout_, extension_{};
    SpinBudget spin_budget_;
    std::uint32_t step_;
    std::uint64_t seq_ = 0;
    Call call_;
    std::int64_t began_ns_ = 0;
    std::int64_t inside_ns_ = 0;
    bool all_called_ = false;         ///< the collective's first step is complete
    std::int64_t wait_began_ns_ = 0;  ///< in the first step; 0: no rank was late
    std::atomic<std::int64_t> waiting_ns_ = 0;
    std::exception_ptr broken_;
    const std::uint16_t traced_group_;  ///< trace::current_group(); 0 of a sub-group
    trace::Begun traced_;               ///< this collective in the trace; empty without one
    std::int64_t waited_before_ns_ = 0;
};

}  // namespace ddp::cpu
