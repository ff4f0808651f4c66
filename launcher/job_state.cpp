#include "launcher/job_state.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>

#include "env/text.h"
#include "launcher/report.h"

namespace ddprun {

namespace {

using Phase = JobState::Phase;
using After = JobState::After;
using Actions = std::vector<JobAction>;

void say(Actions& actions, std::string text) { actions.emplace_back(job_action::Say{std::move(text), false}); }
void warn(Actions& actions, std::string text) { actions.emplace_back(job_action::Say{std::move(text), true}); }

void set_timer(JobState& state, TimePoint when, Actions& actions) {
    if (state.timer == when) return;
    state.timer = when;
    actions.emplace_back(job_action::SetTimer{when});
}

int alive_elsewhere(const JobState& state) {
    int workers = 0;
    for (const JobState::Node& node : state.nodes) {
        if (!node.lost && !node.drained) workers += node.workers - node.succeeded;
    }
    return workers;
}

bool all_drained(const JobState& state) {
    return std::all_of(state.nodes.begin(), state.nodes.end(),
                       [](const JobState::Node& node) { return node.drained || node.lost; });
}

bool all_succeeded(const JobState& state) {
    return std::all_of(state.nodes.begin(), state.nodes.end(), [](const JobState::Node& node) {
        return !node.lost && node.succeeded == node.workers;
    });
}

void finish(JobState& state, Actions& actions) {
    state.phase = Phase::Finished;
    set_timer(state, kNever, actions);
    actions.emplace_back(job_action::Finish{});
}

void start_generation(JobState& state, TimePoint now, Actions& actions) {
    ++state.generation;
    for (JobState::Node& node : state.nodes) node = {node.workers, 0, false, false};
    state.phase = Phase::Running;
    state.generation_started = now;
    state.killing = false;
    state.hung = false;
    state.failure.clear();
    set_timer(state, kNever, actions);
    actions.emplace_back(job_action::StartGeneration{state.generation, state.restarts_used});
}

/// All that is left of a generation is gone: what now?
void continue_after_drain(JobState& state, TimePoint now, Actions& actions) {
    if (!all_drained(state)) return;
    if (state.phase == Phase::Draining || state.after == After::Finish) return finish(state, actions);
    if (state.after == After::Rejoin) {
        state.phase = Phase::Joining;
        actions.emplace_back(job_action::Rejoin{});
        return;
    }
    if (state.timer == kNever || state.timer <= now) return start_generation(state, now, actions);
    state.phase = Phase::BackingOff;
}

void stop_generation(JobState& state, int signal, Duration grace, int failed_rank, std::string why,
                     TimePoint now, Actions& actions) {
    state.phase = Phase::Stopping;
    actions.emplace_back(job_action::StopGeneration{signal, grace, failed_rank, std::move(why)});
    continue_after_drain(state, now, actions);
}

/// A failure of the running generation: restart or end, and stop what still runs.
void fail(JobState& state, const FailureFacts& facts, int failed_rank, const std::string& what, After retry,
          const JobPolicy& policy, TimePoint now, Actions& actions) {
    const bool progressed = facts.made_progress || now - state.generation_started >= kProgressAge;
    state.history.without_progress = progressed ? 0 : state.history.without_progress + 1;
    const RestartDecision decision = decide_restart(policy.restart, state.history, facts, now, policy.random);
    state.after = decision.restart ? retry : After::Finish;
    if (decision.restart) {
        ++state.restarts_used;
        state.history.restarts.push_back(now);
        if (decision.at > now) set_timer(state, decision.at, actions);
    }
    warn(actions, fmt::format("root cause: {}; {}", what, decision.why));
    stop_generation(state, SIGTERM, policy.failure_grace, failed_rank, what, now, actions);
}

Actions on(JobState& state, const job_event::WorldFormed& event, const JobPolicy&, TimePoint now) {
    if (state.phase != Phase::Joining) return {};
    Actions actions;
    state.nodes.clear();
    for (const int workers : event.workers) state.nodes.push_back({workers, 0, false, false});
    start_generation(state, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::JoinFailed& event, const JobPolicy&, TimePoint) {
    if (state.phase != Phase::Joining) return {};
    Actions actions;
    state.failure = event.why;
    finish(state, actions);
    return actions;
}

Actions on(JobState& state, const job_event::WorkerEnded& event, const JobPolicy& policy, TimePoint now) {
    Actions actions;
    if (!event.failed) {
        ++state.nodes[static_cast<std::size_t>(event.node)].succeeded;
        if (state.phase == Phase::Running && all_succeeded(state)) state.phase = Phase::Draining;
        return actions;
    }
    if (state.phase != Phase::Running || event.by_us) return actions;
    fail(state, event.facts, event.rank, event.what, After::Restart, policy, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::NodeDrained& event, const JobPolicy&, TimePoint now) {
    Actions actions;
    if (state.phase == Phase::Joining || state.phase == Phase::Finished || state.phase == Phase::BackingOff) {
        return actions;
    }
    state.nodes[static_cast<std::size_t>(event.node)].drained = true;
    if (state.phase != Phase::Running) continue_after_drain(state, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::NodeLost& event, const JobPolicy& policy, TimePoint now) {
    Actions actions;
    if (state.phase == Phase::Joining || state.phase == Phase::Finished) return actions;
    JobState::Node& node = state.nodes[static_cast<std::size_t>(event.node)];
    if (node.lost) return actions;
    const bool was_done = node.drained && node.succeeded == node.workers;
    node.lost = true;
    if (state.phase == Phase::Running && !was_done) {
        state.failure = event.why;
        fail(state, FailureFacts{}, -1, event.why, After::Rejoin, policy, now, actions);
        return actions;
    }
    if (state.after == After::Restart) state.after = After::Rejoin;
    if (state.phase == Phase::BackingOff) {
        state.phase = Phase::Joining;
        set_timer(state, kNever, actions);
        actions.emplace_back(job_action::Rejoin{});
        return actions;
    }
    continue_after_drain(state, now, actions);
    return actions;
}

Actions kill_now(JobState& state, Actions actions) {
    if (!state.killing) {
        state.killing = true;
        say(actions, fmt::format("killing {} workers now", alive_elsewhere(state)));
        actions.emplace_back(job_action::KillGeneration{});
    }
    return actions;
}

bool nobody_runs(const JobState& state) {
    return state.phase == Phase::Joining || state.phase == Phase::BackingOff;
}

Actions finish_early(JobState& state, const std::string& why, Actions actions) {
    say(actions, fmt::format("{}: stopping before any worker runs", why));
    finish(state, actions);
    return actions;
}

Actions on(JobState& state, const job_event::StopAsked& event, const JobPolicy& policy, TimePoint now) {
    Actions actions;
    if (state.phase == Phase::Finished) return actions;
    if (event.again && state.stopped_by) return kill_now(state, std::move(actions));
    if (state.phase == Phase::Draining) return actions;  // all workers have succeeded: too late to stop
    state.stopped_by = event.signal;
    state.after = After::Finish;
    const std::string why = signal_name(event.signal);
    if (nobody_runs(state)) return finish_early(state, why, std::move(actions));
    if (state.phase == Phase::Stopping) {  // a failure's restart becomes the end; its grace runs on
        say(actions, fmt::format("{}: no restart; the generation is already stopping", why));
        return actions;
    }
    say(actions, fmt::format("{}: stopping {} workers, SIGKILL in {} (again: kill now)", why,
                             alive_elsewhere(state), format_duration(policy.shutdown_timeout)));
    stop_generation(state, event.signal, policy.shutdown_timeout, -1, why, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::PreemptAsked& event, const JobPolicy& policy, TimePoint now) {
    Actions actions;
    if (state.phase == Phase::Finished || state.preempted) return actions;
    state.preempted = true;
    state.after = After::Finish;
    if (nobody_runs(state)) return finish_early(state, event.why, std::move(actions));
    if (state.phase != Phase::Running) return actions;
    say(actions, fmt::format("{}: {} workers may save for {}", event.why, alive_elsewhere(state),
                             format_duration(policy.preempt_grace)));
    actions.emplace_back(job_action::NotifyPreempt{event.why});
    stop_generation(state, event.signal, policy.preempt_grace, -1, event.why, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::HangFound& event, const JobPolicy& policy, TimePoint now) {
    Actions actions;
    if (state.phase != Phase::Running) return actions;
    state.failure = event.what;
    state.hung = true;
    fail(state, FailureFacts{}, event.culprit, event.what, After::Restart, policy, now, actions);
    return actions;
}

Actions on(JobState& state, const job_event::TimerFired&, const JobPolicy&, TimePoint now) {
    Actions actions;
    if (now < state.timer) return actions;
    state.timer = kNever;
    if (state.phase == Phase::BackingOff) start_generation(state, now, actions);
    return actions;
}

}  // namespace

std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now) {
    return std::visit([&](const auto& e) { return on(state, e, policy, now); }, event);
}

}  // namespace ddprun
