#include "launcher/head/generation_stop.h"

#include <algorithm>

namespace ddprun {
namespace {

/// The next announcement of a countdown: 1, 2, 3, 5, 10 and every 30 s before the end; 0: none is left.
std::chrono::seconds countdown_mark_below(std::chrono::seconds left) {
    if (left.count() > 30) return std::chrono::seconds((left.count() - 1) / 30 * 30);
    std::chrono::seconds best(0);
    for (const int mark : {1, 2, 3, 5, 10}) {
        if (left.count() > mark) best = std::chrono::seconds(mark);
    }
    return best;
}

}  // namespace

GenerationStop::~GenerationStop() {
    loop_.cancel(agreement_timer_);
    loop_.cancel(countdown_);
}

void GenerationStop::begin_generation() {
    agreement_ = {};
    agreed_step_ = 0;
    held_.reset();
}

void GenerationStop::perform(const job_action::NotifyPreempt& action) {
    std::vector<int> with_workers;
    for (std::size_t i = 0; i < state_.nodes.size(); ++i) {
        if (state_.nodes[i].is_there()) with_workers.push_back(static_cast<int>(i));
    }
    why_ = action.why;
    agreed_step_ = 0;
    feed(stop_event::Noticed{std::move(with_workers), action.time});
}

void GenerationStop::perform(const job_action::StopGeneration& action) {
    if (agreement_.phase != StopAgreement::Phase::Closed && !held_) {
        held_.emplace(action, MonotonicClock::now());
        return;
    }
    feed(stop_event::Broken{action.why});
    // Workers that begin another generation in place, to save, have agreed already.
    send(action, action.failed_rank < 0 ? agreed_step_ : 0);
}

void GenerationStop::feed(const StopEvent& event) {
    const StopActions actions = step(agreement_, event, MonotonicClock::now());
    loop_.cancel(agreement_timer_);
    agreement_timer_ = 0;
    if (agreement_.deadline != kNever)
        agreement_timer_ = loop_.call_at(agreement_.deadline, [this] { feed(stop_event::TimerFired{}); });
    if (actions.propose) world_.broadcast(rdzv::StopProposal{state_.generation, *actions.propose, why_});
    if (actions.decide) decide(*actions.decide);
}

void GenerationStop::decide(const StopActions::Decision& decision) {
    if (!decision.why.empty())
        log_.warning("the workers have not agreed on the step after which they stop: {}", decision.why);
    agreed_step_ = decision.step;
    if (decision.step > 0) log_.info("all workers stop after step {}", decision.step);
    else world_.broadcast(rdzv::Preempt{why_});
    const auto held = std::exchange(held_, std::nullopt);
    if (!held) return;
    job_action::StopGeneration action = held->first;
    action.grace -= std::min(action.grace, MonotonicClock::now() - held->second);
    send(action, decision.step);
}

/// `stop_at`: the agreed step, after which the workers stop without a signal.
void GenerationStop::send(const job_action::StopGeneration& action, std::uint64_t stop_at) {
    world_.broadcast(rdzv::StopGeneration{state_.generation, stop_at > 0 ? 0 : action.signal,
                                          action.grace.count(), action.failed_rank, action.why, stop_at});
    // The operator waits after a signal, not after a failure.
    if (action.failed_rank < 0 && state_.end.stopped_by)
        count_down(deadline_after(MonotonicClock::now(), action.grace));
}

/// Logs the time that is left of a grace at the moments of countdown_mark_below().
void GenerationStop::count_down(TimePoint end) {
    loop_.cancel(countdown_);
    const auto left = std::chrono::round<std::chrono::seconds>(end - MonotonicClock::now());
    const std::chrono::seconds mark = countdown_mark_below(left);
    if (mark <= std::chrono::seconds(0)) return;
    countdown_ = loop_.call_at(end - mark, [this, end, mark] {
        if (state_.phase != JobState::Phase::Stopping || state_.end.killing) return;
        log_.info("{} workers are still running; SIGKILL in {} s", running_(), mark.count());
        count_down(end);
    });
}

}  // namespace ddprun
