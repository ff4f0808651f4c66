#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "ddp/shm/arena.h"
#include "ddp/shm/roster.h"
#include "ddp/shm/waiting.h"

namespace ddp::cpu {

/// The steps in which all ranks of a node meet, and what each of them shows there. A collective is begin(),
/// some steps, end(). One thread at a time.
///
/// A step costs one cache line per peer: it carries the flag, the call (so that a mismatch is seen on the
/// way) and the first bytes of the message. Waiting spins as long as that pays (Attention), then sleeps on a
/// futex, and looks at the abort word and the deadline every kSleepSlice. Where ranks share cores nobody
/// spins: the last to arrive wakes the others, one sleep per rank and step. A step is met when all slots show
/// it, whatever the words say that only spare looking at every slot: a rank can be killed between the two.
class Lockstep {
  public:
    /// `steps_so_far`: in tests of what comes after 2^32 of them.
    Lockstep(Arena& arena, const Roster& roster, std::chrono::nanoseconds timeout,
             std::uint32_t steps_so_far = 0);

    /// Starts a collective: gives it its number, writes our line. Throws PeerLostError at once when the
    /// generation is over, and the first failure again when an earlier collective of this group failed.
    void begin(Call call);
    void end();

    /// What we shall show at the coming step, and the number of that step.
    [[nodiscard]] Slot& mine() const { return arena_.slot(rank_, coming()); }
    [[nodiscard]] std::uint32_t coming() const { return step_ + 1; }
    /// What a rank showed at the step that we met last, and its number.
    [[nodiscard]] const Slot& shown_by(std::uint32_t rank) const { return arena_.slot(rank, step_); }
    [[nodiscard]] std::uint32_t met() const { return step_; }

    /// Shows our slot, waits until everybody has shown theirs, compares the calls.
    /// Throws MismatchError, PeerLostError, TimeoutError; the group is unusable from then on.
    void meet();

    [[nodiscard]] double communication_seconds() const;
    /// Of these, until the last rank had made the call too: of a collective's first step.
    [[nodiscard]] double waiting_seconds() const {
        return static_cast<double>(waiting_ns_.load(std::memory_order_relaxed)) * 1e-9;
    }
    /// Of the collectives that follow.
    void set_timeout(std::chrono::nanoseconds timeout) { timeout_ = timeout; }
    [[nodiscard]] std::chrono::nanoseconds timeout() const { return timeout_; }
    /// That we are in, with its number.
    [[nodiscard]] const Call& call() const { return call_; }
    /// The call has to wait for something outside of the steps.
    void note_start() { note_start(now_ns()); }
    /// The rest of this call may take so much longer than the time-out: others find out first who does not
    /// come.
    void be_patient(std::chrono::nanoseconds longer) { patience_ = longer; }
    /// Fails this call and all later ones with a MismatchError that says so: all ranks know what they
    /// disagree on.
    [[noreturn]] void disagree(const std::string& on_what);
    /// Every later collective fails with `why`: something outside of the steps went wrong.
    void give_up(std::exception_ptr why);
    /// Throws the first failure again.
    void throw_if_broken() const {
        if (broken_) std::rethrow_exception(broken_);
    }

  private:
    void arrive(Slot& slot);
    void wait_for_each();
    void wait_together();
    void note_start(std::int64_t now);
    void note_wait();
    static bool spin_eagerly(const std::atomic<std::uint32_t>& word, std::uint32_t value);
    void sleep_until(std::atomic<std::uint32_t>& word, std::uint32_t value);
    void compare_calls();
    void throw_if_hopeless();
    void throw_if_told();
    [[noreturn]] void time_out();
    template <class Exception>
    [[noreturn]] void fail(const std::string& what);
    [[nodiscard]] std::vector<std::uint32_t> absent() const;
    [[nodiscard]] int global(std::uint32_t rank) const { return arena_.global_rank(rank); }

    Arena& arena_;
    const std::uint32_t rank_;
    const Roster roster_;
    std::chrono::nanoseconds timeout_, patience_{};
    Attention attention_;
    std::uint32_t step_;
    std::uint64_t seq_ = 0;
    Call call_;
    std::int64_t began_ns_ = 0;
    std::int64_t inside_ns_ = 0;
    bool all_called_ = false;         ///< the collective's first step is met
    std::int64_t wait_began_ns_ = 0;  ///< in it; 0: nobody had to be waited for
    std::atomic<std::int64_t> waiting_ns_ = 0;
    std::exception_ptr broken_;
};

}  // namespace ddp::cpu
