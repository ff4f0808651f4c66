#include "ddp/shm/lockstep.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "ddp/trace/trace.h"
#include "ddp/worker/call.h"
#include "ddp/worker/encoded_failure.h"
#include "env/text.h"

namespace ddp::cpu {

using ddprun::MonotonicClock;
using ddprun::RankLine;

namespace {

constexpr int kEagerTurns =
    200;  // without a pause, which would cost more than a hand-over between running ranks

// A small collective whose peers are present costs about as much as two readings of the clock, so it gets no
// start time and counts as this duration.
constexpr std::chrono::nanoseconds kQuick{100};

}  // namespace

Lockstep::Lockstep(Arena& arena, const NodeCpus& node_cpus, std::chrono::nanoseconds timeout,
                   std::uint32_t steps_so_far)
    : arena_(arena),
      rank_(arena.rank()),
      node_cpus_(node_cpus),
      timeout_(timeout),
      step_(steps_so_far),
      traced_group_(arena.has_lines_of_the_node() ? trace::current_group() : std::uint16_t{0}) {}

void Lockstep::mark_broken(std::exception_ptr why) {
    if (!broken_) broken_ = std::move(why);
}

void Lockstep::begin(Call call) {
    throw_if_broken();
    call_ = call;
    call_.seq = ++seq_;
    began_ns_ = wait_began_ns_ = 0;
    all_called_ = false;
    extension_ = {};
    RankLine& line = arena_.line(rank_);
    line.operation.store(static_cast<std::uint32_t>(call.operation), std::memory_order_relaxed);
    line.bytes.store(call.bytes, std::memory_order_relaxed);
    if (call.bytes > kTinyBytes) note_start(now_ns());
    if (trace::is_on()) trace_begin();
    line.started_seq.store(seq_, std::memory_order_relaxed);
    if (arena_.segment().header().aborted.load(std::memory_order_relaxed) != 0) throw_if_failed();
}

// A call that has to wait gets its start time then, at most a microsecond late.
void Lockstep::note_start(std::int64_t now) {
    if (began_ns_ != 0) return;
    began_ns_ = now;
    arena_.line(rank_).started_ns.store(began_ns_, std::memory_order_relaxed);
}

void Lockstep::note_wait() {
    if (began_ns_ != 0 && all_called_) return;
    const std::int64_t now = now_ns();
    note_start(now);
    if (wait_began_ns_ == 0) wait_began_ns_ = now;
}

void Lockstep::end() {
    const std::int64_t now = now_ns();
    if (began_ns_ == 0) arena_.line(rank_).started_ns.store(now, std::memory_order_relaxed);
    inside_ns_ += began_ns_ != 0 ? now - began_ns_ : std::chrono::nanoseconds(kQuick).count();
    RankLine& line = arena_.line(rank_);
    line.finished_ns.store(now, std::memory_order_relaxed);
    line.comm_ns.store(inside_ns_, std::memory_order_relaxed);
    line.finished_seq.store(seq_, std::memory_order_relaxed);
    if (traced_.record != nullptr)
        trace::end_at(std::exchange(traced_, {}), now, waiting_ns_ - waited_before_ns_);
}

void Lockstep::trace_begin() {
    note_start(now_ns());
    traced_ = trace::begin_collective(call_, traced_group_, began_ns_);
    waited_before_ns_ = waiting_ns_;
}

double Lockstep::communication_seconds() const {
    return static_cast<double>(arena_.line(rank_).comm_ns.load(std::memory_order_relaxed)) * 1e-9;
}

void Lockstep::meet() {
    Slot& slot = own_slot();
    slot.call = call_;
    ++step_;
    arrive(slot);
    if (node_cpus_.ranks_share_cores) {
        wait_together();
    } else {
        wait_for_each();
    }
    if (!all_called_ && wait_began_ns_ != 0)
        waiting_ns_.store(waiting_ns_.load(std::memory_order_relaxed) + now_ns() - wait_began_ns_,
                          std::memory_order_relaxed);
    all_called_ = true;
    compare_calls();
    // A rank that failed this step has published its slot, but will not continue.
    throw_if_failure_posted();
}

void Lockstep::arrive(Slot& slot) {
    // exchange, not store: the flag must be visible before the check for sleepers, or a sleeper and this rank
    // could miss each other. Both sides are sequentially consistent.
    slot.step.exchange(step_);
    if (slot.sleepers.load() != 0) futex_wake_all(slot.step);
}

void Lockstep::wait_for_each() {
    for (std::uint32_t peer = 0; peer < arena_.ranks(); ++peer) {
        Slot& slot = arena_.slot(peer, step_);
        if (spin_eagerly(slot.step, step_)) continue;
        note_wait();
        const auto shown = [&] { return slot.step.load(std::memory_order_acquire) == step_; };
        if (may_wait_for_nodes() ? spin_until(spin_budget_, shown, Yields{})
                                 : spin_until(spin_budget_, shown, Spins{}))
            continue;
        const Sleeper sleeper(slot.sleepers);
        sleep_until(slot.step, step_);
    }
}

void Lockstep::wait_together() {
    Control& control = arena_.control();
    if (control.arrived.fetch_add(1) + 1 == step_ * arena_.ranks()) {
        control.released.store(step_);
        futex_wake_all(control.released);
        return;
    }
    note_wait();
    const auto released = [&] { return control.released.load(std::memory_order_acquire) == step_; };
    if (spin_until(spin_budget_, released, Yields{})) return;
    sleep_until(control.released, step_);
}

bool Lockstep::spin_eagerly(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
    for (int turn = 0; turn < kEagerTurns; ++turn) {
        if (word.load(std::memory_order_acquire) == value) return true;
    }
    return false;
}

void Lockstep::sleep_until(std::atomic<std::uint32_t>& word, std::uint32_t value) {
    for (;;) {
        const std::uint32_t seen = word.load();
        if (seen == value) return;
        futex_wait(word, seen, kSleepSlice);
        if (word.load(std::memory_order_acquire) == value) return;
        // The slots decide: the rank that had to count itself, or to release this one, may just have died.
        if (absent().empty()) return;
        throw_if_failed();
    }
}

void Lockstep::compare_calls() {
    for (std::uint32_t peer = 0; peer < arena_.ranks(); ++peer) {
        const Call& other = arena_.slot(peer, step_).call;
        if (other == call_) continue;
        fail<MismatchError>(fmt::format("rank {}: ranks called different collectives: {}", global(rank_),
                                        both_sides(global(rank_), call_, global(peer), other)));
    }
}

void Lockstep::fail_mismatch(const std::string& on_what) {
    fail<MismatchError>(fmt::format("rank {}: {}: {}", global(rank_), to_string(call_), on_what));
}

std::vector<std::uint32_t> Lockstep::absent() const {
    std::vector<std::uint32_t> ranks;
    for (std::uint32_t peer = 0; peer < arena_.ranks(); ++peer) {
        if (arena_.slot(peer, step_).step.load(std::memory_order_acquire) != step_) ranks.push_back(peer);
    }
    return ranks;
}

void Lockstep::throw_if_failed() {
    const ddprun::SegmentHeader& header = arena_.segment().header();
    if (const std::uint32_t aborted = header.aborted.load(std::memory_order_relaxed)) {
        fail<PeerLostError>(fmt::format("rank {}: {}: rank {} was lost, the launcher ended generation {}",
                                        global(rank_), to_string(call_), aborted - 1, header.generation));
    }
    // A rank at its own time-out reports what it saw itself.
    const bool is_late = now_ns() - began_ns_ >= (timeout_ + extension_).count();
    if (!is_late) throw_if_failure_posted();
    for (const std::uint32_t peer : absent()) {
        if (!is_gone(arena_, peer)) continue;
        // It may have arrived between the check of its flag and its end.
        if (arena_.slot(peer, step_).step.load() == step_) continue;
        fail<PeerLostError>(fmt::format("rank {}: {}: rank {} (pid {}) ended without taking part",
                                        global(rank_), to_string(call_), global(peer),
                                        arena_.identity(peer).pid));
    }
    if (is_late) time_out();
}

void Lockstep::throw_if_failure_posted() {
    if (arena_.control().failure_state.load(std::memory_order_relaxed) == 0) return;
    try {
        throw_posted_failure(arena_.control(), fmt::format("rank {}: {}", global(rank_), to_string(call_)));
    } catch (...) {
        mark_broken(std::current_exception());
        throw;
    }
}

void Lockstep::time_out() {
    std::vector<int> missing;
    for (const std::uint32_t peer : absent()) missing.push_back(global(peer));
    std::sort(missing.begin(), missing.end());  // a sub-group orders its members in any way
    std::vector<std::uint32_t> peers;
    for (std::uint32_t peer = 0; peer < arena_.ranks(); ++peer) {
        if (peer != rank_) peers.push_back(peer);
    }
    const std::string what = fmt::format("rank {}: {} did not finish within {}: rank{} {} missing: {}",
                                         global(rank_), to_string(call_), ddprun::format_duration(timeout_),
                                         missing.size() == 1 ? "" : "s", ddprun::format_ranges(missing),
                                         describe_activities(arena_, peers, MonotonicClock::now()));
    // A rank that arrives later would find all slots, and continue alone.
    post_failure(arena_.control(), encode_failure(std::make_exception_ptr(TimeoutError(what))));
    fail<TimeoutError>(what);
}

template <class Exception>
void Lockstep::fail(const std::string& what) {
    broken_ = std::make_exception_ptr(Exception(what));
    std::rethrow_exception(broken_);
}

}  // namespace ddp::cpu
