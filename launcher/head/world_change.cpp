// The third story of job_state: the nodes of the world change (WorldChange).
#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <limits>

#include "env/text.h"
#include "launcher/head/job_steps.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// The ranks of the next world that start: those of new nodes, and those that had failed in the world before.
std::vector<int> starting_ranks(const JobState& next, const JobState& before,
                                const std::vector<int>& origins) {
    const std::vector<int>& had_failed = before.recovery.in_place->failed;
    std::vector<int> starting;
    for (std::size_t node = 0; node < origins.size(); ++node) {
        const std::vector<int> ranks = next.ranks_of(node);
        const std::vector<int> old =
            origins[node] < 0 ? ranks : before.ranks_of(static_cast<std::size_t>(origins[node]));
        for (std::size_t n = 0; n < old.size(); ++n) {
            if (origins[node] < 0 || std::ranges::count(had_failed, old[n]) > 0) starting.push_back(ranks[n]);
        }
    }
    return starting;
}

std::string where_they_start(std::ptrdiff_t new_nodes) {
    return new_nodes == 0 ? "again" : new_nodes == 1 ? "on another node" : "on other nodes";
}

}  // namespace

void WorldSteps::reform(const job_event::WorldFormed& event) {
    const JobState before = state;
    state.nodes.clear();
    // A new node's workers are taken to recover as the others, until one refuses.
    for (const int workers : event.workers) state.nodes.push_back({.workers = workers, .can_recover = true});
    state.unfinished = state.ranks();
    state.nodes_there = static_cast<int>(state.nodes.size());
    state.change.waiting_nodes = 0;
    state.phase = JobPhase::Running;
    const std::vector<int> starting = starting_ranks(state, before, event.before);
    state.recovery.in_place->failed = starting;
    begin_in_place(state.recovery.in_place->first_failed());
    std::string line = describe_going_on(state.ranks() - static_cast<int>(starting.size())) + " on in place";
    const auto new_nodes = std::ranges::count_if(event.before, [](int origin) { return origin < 0; });
    if (!starting.empty())
        line += fmt::format(", {} {}", describe_starting(starting), where_they_start(new_nodes));
    if (state.nodes.size() != before.nodes.size())
        line += fmt::format("; {} instead of {} nodes", state.nodes.size(), before.nodes.size());
    say(line);
    if (before.recovery.held_stop) stop_as_asked(*before.recovery.held_stop);
}

/// Decides whether another generation can begin that uses up no restart.
RestartDecision WorldSteps::decide_change() const {
    RestartSpec unlimited;
    unlimited.max_restarts = std::numeric_limits<int>::max();
    return decide_restart(unlimited, {}, {}, now, 0, state.time_up);
}

/// Ends the generation for one with other nodes, which begins at `when` or later. All workers may save.
void WorldSteps::change_world(const std::string& why, Duration grace, TimePoint when) {
    note_progress(false);
    state.end.after = After::Rejoin;
    state.end.is_free = true;
    set_timer(when);
    say(fmt::format("{}: {} may save for {}; then another generation, which uses up no restart", why,
                    state.describe_alive(), format_duration(grace)));
    act(job_action::NotifyPreempt{why, grace});
    stop(SIGTERM, grace, -1, why);
}

// ---- nodes that leave

void WorldSteps::go_on_without_leaving() {
    const std::string why = state.change.leave.why;
    InPlace recovery = recovery_of(why, false);
    const InPlaceDecision decision = decide_without_leaving({}, recovery);
    // The ranks that have failed need the state of those that leave.
    if (!decision.in_place && state.recovery.in_place) {
        state.change.leave.at = deadline_after(now, kOneChange);
        return set_running_timer();
    }
    if (!decision.in_place) return change_world(why, policy.spec.shutdown_timeout, kNever);
    suspend(std::move(recovery), Duration::zero(), why);
}

void WorldSteps::leave(const job_event::StopAsked& event) {
    const std::string why =
        fmt::format("{} at the ddprun of {}, which leaves", signal_name(event.signal), event.host);
    act(job_action::NodeLeaves{event.source});
    const bool has_world = event.node >= 0 && state.phase != JobPhase::Joining;
    JobState::Node* const node = has_world ? &state.nodes[static_cast<std::size_t>(event.node)] : nullptr;
    if (node != nullptr) node->leaving = event.source;
    if (node == nullptr || node->ended) act(job_action::Dismiss{event.source});
    const TimePoint at = deadline_after(now, kOneChange);
    if (node != nullptr && state.is_under_way() && !node->has_finished()) {
        if (!leave_in_place(event, why)) change_world(why, policy.spec.shutdown_timeout, at);
        return;
    }
    say(why);
    if (node == nullptr || state.is_under_way()) return;
    if (state.end.after == After::Restart) state.end.after = After::Rejoin;
    if (state.end.after == After::Rejoin) delay_timer(at);
}

/// False: the others cannot go on in place.
bool WorldSteps::leave_in_place(const job_event::StopAsked& event, const std::string& why) {
    const InPlace recovery = recovery_of(why, false);
    const bool is_running = state.phase == JobPhase::Running;
    const InPlaceDecision decision =
        is_running ? decide_with_all({}, recovery) : decide_without_leaving({}, recovery);
    if (!decision.in_place) return false;
    say(why + ": the others go on in place");
    // All workers go on for now: if every node has got the signal, all are to stop, and may save.
    if (is_running) {
        state.change.leave = {deadline_after(now, kOneChange), why};
        set_running_timer();
    } else if (!state.nodes[static_cast<std::size_t>(event.node)].ended) {
        act(job_action::StopNode{event.node, policy.spec.shutdown_timeout, why});
        reform_when_due();
    }
    return true;
}

// ---- nodes that come

void WorldSteps::grow_when_due() {
    state.change.grow_at = kNever;
    const bool changes =
        state.recovery.in_place || state.change.leave.at != kNever || state.recovery.let_go.at != kNever;
    if (changes) return set_running_timer();
    if (state.change.waiting_nodes == 0 || state.anybody_succeeded()) return;
    const TimePoint progress = state.generation_started + kProgressAge;
    if (state.history.without_progress >= kStuckGenerations && now < progress) {
        state.change.grow_at = progress;
        set_running_timer();
        return say(
            fmt::format("{} generations in a row made no progress: the nodes that wait are taken in "
                        "when this one has run for {}",
                        state.history.without_progress, format_duration(kProgressAge)));
    }
    if (const RestartDecision decision = decide_change(); !decision.restart)
        return say(fmt::format("the nodes that wait are not taken in: {}", decision.why));
    const std::size_t nodes = state.nodes.size();
    const std::string why = fmt::format("growing from {} to {} nodes", nodes,
                                        nodes + static_cast<std::size_t>(state.change.waiting_nodes));
    InPlace recovery = recovery_of(why, false);
    recovery.is_growth = true;
    if (!decide_without_leaving({}, recovery).in_place)
        return change_world(why, policy.spec.preempt_grace, kNever);
    say(why + ": all workers go on in place");
    suspend(std::move(recovery), Duration::zero(), why);
}

// ---- lost nodes

void WorldSteps::lose_node(const job_event::NodeLost& event) {
    if (event.others_go_on) {
        const InPlaceDecision decision = lose_in_place(event);
        if (!decision.in_place) go_on_elsewhere(event, decision.why);
        return;
    }
    note_failure(event.why);
    fail({}, state.first_rank_of(event.node), event.why, After::Rejoin);
}

/// Lets the others go on in place, if they can. Returns why not.
InPlaceDecision WorldSteps::lose_in_place(const job_event::NodeLost& event) {
    InPlace recovery = recovery_of(event.why, false);
    const auto node = static_cast<std::size_t>(event.node);
    const std::vector<int> ranks = state.ranks_of(node);
    if (!state.nodes[node].leaving) recovery.add_failed(ranks);
    const InPlaceDecision decision = decide_without_leaving({}, recovery);
    if (!decision.in_place) return decision;
    warn(fmt::format("{}: {}, {} wait to go on in place", event.why, describe_lost(ranks),
                     state.describe_alive()));
    if (state.phase == JobPhase::Running) {
        suspend(std::move(recovery), event.others_may_follow, event.why);
        return decision;
    }
    if (event.others_may_follow > Duration::zero())
        recovery.losses_until = std::max(recovery.losses_until, deadline_after(now, event.others_may_follow));
    state.recovery.in_place = std::move(recovery);
    set_running_timer();
    reform_when_due();
    return decision;
}

/// Stops a generation that has lost a node without which the others are enough. Their collectives end at
/// once, and they get the short grace: they have nothing to save.
void WorldSteps::go_on_elsewhere(const job_event::NodeLost& event, const std::string& not_in_place) {
    if (stops_instead(event.why)) return;
    note_failure(event.why);
    note_progress(false);
    const RestartDecision decision = decide_change();
    state.end.out_of_time = decision.out_of_time;
    state.end.after = decision.restart ? After::Rejoin : After::Finish;
    state.end.is_free = decision.restart;
    const bool waits = decision.restart && event.others_may_follow > Duration::zero();
    set_timer(waits ? deadline_after(now, event.others_may_follow) : kNever);
    warn(fmt::format("{}; {}{}", event.why, describe_refusal(not_in_place),
                     decision.restart ? "going on without it, which uses up no restart" : decision.why));
    stop(SIGTERM, policy.failure_grace(), state.first_rank_of(event.node), event.why);
}

/// Makes a free change of the world a restart, because another loss has left too few nodes. The workers have
/// ended or are stopping already.
void WorldSteps::charge_restart(const job_event::NodeLost& event) {
    note_failure(event.why);
    const RestartDecision decision =
        decide_restart(policy.spec.restart, state.history, {}, now, policy.random, state.time_up);
    state.end.out_of_time = decision.out_of_time;
    state.end.after = decision.restart ? After::Rejoin : After::Finish;
    state.end.is_free = false;
    warn(fmt::format("{}; too few nodes are left: {}", event.why, decision.why));
    if (!decision.restart) return;
    use_up_restart();
    if (decision.at > now) delay_timer(decision.at);
}

void WorldSteps::lose_idle_node(const job_event::NodeLost& event, bool had_workers, bool is_first) {
    const bool is_free_change =
        state.phase != JobPhase::Joining && state.end.after == After::Rejoin && state.end.is_free;
    if (is_free_change && !event.others_go_on) charge_restart(event);
    else warn(event.why + (had_workers ? "; its workers are not waited for" : ""));
    // The others would wait for its ranks in a collective until their grace is over.
    if (state.phase == JobPhase::Stopping && had_workers)
        act(job_action::EndCollectives{state.first_rank_of(event.node)});
    if (state.phase == JobPhase::Joining) return;
    if (state.end.after == After::Restart) state.end.after = After::Rejoin;
    // The next generation waits while more nodes may be noticed as lost.
    if (state.end.after == After::Rejoin && is_first && event.others_may_follow > Duration::zero())
        delay_timer(deadline_after(now, event.others_may_follow));
    if (state.phase != JobPhase::BackingOff) continue_after_end();
    else if (state.end.after == After::Finish) finish();
}

}  // namespace ddprun
