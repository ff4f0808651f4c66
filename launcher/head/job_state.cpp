// What each event means for the job. The stories that follow from it are told in generation.cpp, recovery.cpp
// and world_change.cpp.
#include "launcher/head/job_state.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <numeric>

#include "env/text.h"
#include "launcher/head/job_steps.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

enum class Asked : std::uint8_t { First, Echo, Again };

/// Tells whether this source's request is its first, another one, or the first come by another way (Echo).
Asked note_stop_source(JobState& state, const job_event::StopAsked& event, const JobPolicy& policy,
                       TimePoint now) {
    std::vector<GenerationEnd::StopSource>& sources = state.end.stop_sources;
    const auto known = std::ranges::find(sources, event.source, &GenerationEnd::StopSource::source);
    if (known == sources.end()) {
        sources.push_back({event.source, now});
        return Asked::First;
    }
    return event.signal == SIGTERM && now - known->since < policy.one_stop ? Asked::Echo : Asked::Again;
}

/// One call of step().
struct EventStep : WorldSteps {
    using WorldSteps::WorldSteps;

    JobState::Node& node(int number) { return state.nodes[static_cast<std::size_t>(number)]; }

    void on(const job_event::WorldFormed& event) {
        if (state.phase == JobPhase::Suspended) return reform(event);
        if (state.phase != JobPhase::Joining) return;
        state.nodes.clear();
        for (const int workers : event.workers) state.nodes.push_back({.workers = workers});
        start();
    }
    void on(const job_event::NodesMissing&) {
        if (state.phase == JobPhase::Suspended)
            fail_recovery(InPlace(*state.recovery.in_place), "too few nodes are left", After::Rejoin);
    }
    void on(const job_event::JoinFailed& event) {
        if (state.phase != JobPhase::Joining) return;
        note_failure(event.why);
        finish();
    }
    void on(const job_event::WorkerEnded& event);
    void on(const job_event::NodeReady& event);
    void on(const job_event::NodeEnded& event);
    void on(const job_event::NodeLost& event);
    void on(const job_event::NodesWaiting& event);
    void on(const job_event::Outnumbered& event);
    void on(const job_event::StopAsked& event);
    void on(const job_event::PreemptAsked& event);
    void on(const job_event::HangFound& event);
    void on(const job_event::WalltimeKnown& event) { state.time_up = event.time_up; }
    void on(const job_event::RehearsalDue&);
    void on(const job_event::TimerFired&);

    void succeed(const job_event::WorkerEnded& event);
    void note_stage(const job_event::NodeReady& event);
    void reach_stage(const job_event::NodeReady& event);
};

// ---- what nodes and their workers do

void EventStep::on(const job_event::WorkerEnded& told) {
    job_event::WorkerEnded event = told;
    event.facts.ran_before = state.has_run;
    if (event.steps > state.history.furthest_step) {
        state.history.furthest_step = event.steps;
        if (state.phase == JobPhase::Stopping) state.history.without_progress = 0;
    }
    const bool is_running = state.phase == JobPhase::Running;
    if (event.is_late && (!event.failed || !state.recovery.in_place)) return;
    if (!event.is_late) node(event.node).knows = true;
    // The workers of a node that leaves may have had the signal from the scheduler, too.
    const bool is_failure = is_running && state.recovery.in_place && event.failed && !event.by_us;
    if (node(event.node).leaving && state.is_under_way() && !state.recovery.is_released && !is_failure) {
        if (is_running) go_on_without_leaving();
        return;
    }
    if (!event.failed) return succeed(event);
    if (state.phase == JobPhase::Stopping) lose_while_stopping(event);
    if (!state.is_under_way() || event.by_us) return;
    const bool others_go_on =
        policy.spec.recover.mode == RecoverSpec::Mode::Program && !event.facts.never_ran;
    others_go_on ? outlive(event) : lose_rank(event);
}

void EventStep::succeed(const job_event::WorkerEnded& event) {
    ++node(event.node).succeeded;
    --state.unfinished;
    if (event.never_joined && state.is_under_way()) {
        lose_before_joining(event.rank);
        if (!state.is_under_way()) return;
    }
    if (state.can_recover_somewhere()) release();
    if (state.phase == JobPhase::Running && state.unfinished == 0) state.phase = JobPhase::Succeeded;
    // It has saved before it knew that the others save in another generation.
    const std::optional<GenerationEnd::Stop>& asked = state.end.stop;
    if (state.phase == JobPhase::Stopping && asked && asked->saves_in_place) end_collectives(event.rank);
}

void EventStep::on(const job_event::NodeReady& event) {
    using enum job_event::NodeReady::Stage;
    if (state.phase == JobPhase::Stopping) hear_while_stopping(event);
    if (!state.is_under_way()) return;
    node(event.node).knows = true;
    note_stage(event);
    if (state.phase != JobPhase::Suspended) return reach_stage(event);
    std::int64_t& steps = state.recovery.in_place->steps;
    if (event.stage == Suspended) steps = std::max(steps, event.steps);
    reform_when_due();
}

void EventStep::note_stage(const job_event::NodeReady& event) {
    using enum job_event::NodeReady::Stage;
    switch (event.stage) {
        case Started: break;
        case Announced: node(event.node).can_recover = true; break;
        case Refused:
            node(event.node).can_recover = false;
            if (policy.spec.recover.rehearse > 0 && state.recovery.cannot_recover.empty())
                warn("there are no rehearsals (--rehearse): " + event.why);
            if (state.recovery.cannot_recover.empty()) state.recovery.cannot_recover = event.why;
            release();  // no failure is recovered any more, so nobody has to wait
            break;
        case Joined: node(event.node).joined = true; break;
        case Finished: node(event.node).finished = true; break;
        case Suspended: node(event.node).suspended = true; break;
        case LetGo: note_let_go(kEndReportTimeout, event.why); break;
        case Failing: note_let_go(policy.failure_grace() + kEndReportTimeout, event.why); break;
        case Slow:
            if (state.phase == JobPhase::Running && state.recovery.in_place) await_nodes();
            break;
    }
}

/// Acts when all nodes have come to this stage.
void EventStep::reach_stage(const job_event::NodeReady& event) {
    using enum job_event::NodeReady::Stage;
    const auto all = [&](bool JobState::Node::*has_come) {
        return std::ranges::all_of(state.nodes, has_come);
    };
    if (event.stage == Started && all(&JobState::Node::knows)) state.has_run = true;
    if (event.stage == Joined && state.recovery.in_place) note_begin(event.steps);
    if (event.stage == Joined && all(&JobState::Node::joined)) {
        Duration& longest = state.recovery.longest_start;
        if (state.recovery.in_place) end_recovery();
        else longest = std::max(longest, now - state.generation_started);
    }
    if (event.stage == Finished && all(&JobState::Node::finished)) release();
}

void EventStep::on(const job_event::NodeEnded& event) {
    if (state.nobody_runs() || state.phase == JobPhase::Finished) return;
    JobState::Node& ended = node(event.node);
    state.nodes_there -= ended.is_there() ? 1 : 0;
    ended.ended = true;
    if (ended.leaving) act(job_action::Dismiss{*ended.leaving});
    if (state.phase == JobPhase::Stopping && state.end.stop && state.end.stop->saves_in_place)
        end_collectives(state.first_rank_of(event.node));
    if (state.phase == JobPhase::Suspended) reform_when_due();
    else if (state.phase != JobPhase::Running) continue_after_end();
    else if (state.end.outlived && state.nodes_there == 0) end_outlived();
}

void EventStep::on(const job_event::NodeLost& event) {
    JobState::Node* const lost = state.phase == JobPhase::Finished ? nullptr : &node(event.node);
    if (lost == nullptr || lost->lost) return;
    const bool had_workers = !lost->ended;
    const bool is_first = std::ranges::none_of(state.nodes, &JobState::Node::lost);
    state.nodes_there -= lost->is_there() ? 1 : 0;
    lost->lost = true;
    if (state.is_under_way() && !lost->has_finished()) lose_node(event);
    else lose_idle_node(event, had_workers, is_first);
}

void EventStep::on(const job_event::NodesWaiting& event) {
    state.change.waiting_nodes = event.nodes;
    if (event.nodes == 0) return;
    const bool is_over = state.phase == JobPhase::Stopping || state.phase == JobPhase::BackingOff;
    if (is_over && state.end.after == After::Restart) state.end.after = After::Rejoin;
    const bool grows =
        state.phase == JobPhase::Running && policy.spec.grow == Grow::Now && !state.anybody_succeeded();
    if (!grows || state.recovery.in_place || state.change.grow_at != kNever) return;
    state.change.grow_at = deadline_after(now, kOneChange);
    set_running_timer();
}

// ---- what is asked from outside

void EventStep::on(const job_event::Outnumbered& event) {
    if (state.is_over()) return;
    note_failure(event.why);
    state.end.after = After::Finish;
    warn(event.why);
    if (state.nobody_runs()) return finish();
    stop(SIGTERM, Duration::zero(), -1, event.why);
    if (state.phase != JobPhase::Stopping) return;
    // A generation that was already stopping may have a long grace; the others' next one does not wait for
    // it.
    state.end.killing = true;
    act(job_action::KillGeneration{});
}

void EventStep::on(const job_event::StopAsked& event) {
    if (state.is_over()) return;  // too late to stop when all workers have succeeded
    const Asked asked = note_stop_source(state, event, policy, now);
    if (asked == Asked::Again) {
        const bool is_leaving = event.node >= 0 && node(event.node).leaving;
        if (is_leaving && !state.end.stopped_by) {  // its workers have had their notice already
            if (!node(event.node).ended) act(job_action::KillNode{event.node});
            return;
        }
        if (state.phase == JobPhase::Suspended) {
            state.end.after = After::Finish;
            stop(event.signal, Duration::zero(), -1, signal_name(event.signal));
        }
        return kill_now();
    }
    if (asked == Asked::Echo || state.end.stopped_by)
        return;  // the same stop by another way or at another node
    if (event.others_go_on && !state.end.preempted) return leave(event);
    // A request to leave is not yet a request to stop.
    state.end.stop_sources = {{event.source, now}};
    state.end.stopped_by = event.signal;
    state.end.after = After::Finish;
    set_timer(kNever);
    const std::string name = signal_name(event.signal);
    const std::string why =
        event.host.empty() ? name : fmt::format("{} at the ddprun of {}", name, event.host);
    if (state.nobody_runs()) return finish_early(why);
    if (state.phase == JobPhase::Stopping)  // a failure's restart becomes the end; its grace runs on
        return say(why + ": no restart; the generation is already stopping");
    const Duration grace = policy.spec.shutdown_timeout;
    say(fmt::format("{}: stopping {}, SIGKILL in {} (again: kill now)", why, state.describe_alive(),
                    format_duration(grace)));
    // Workers that listen stop by agreement. Ctrl-C reaches them at once.
    const std::optional<Duration> may_save = event.signal == SIGINT ? std::nullopt : std::optional(grace);
    stop_when_possible({event.signal, grace, why, now, may_save});
}

void EventStep::on(const job_event::PreemptAsked& event) {
    if (state.is_over() || state.end.preempted) return;
    state.end.preempted = true;
    state.end.after = After::Finish;
    set_timer(kNever);
    if (state.nobody_runs()) return finish_early(event.why);
    if (!state.is_under_way()) return;
    const Duration grace = policy.spec.preempt_grace;
    const Duration span = std::min(grace, event.left.value_or(grace));
    say(fmt::format("{}: {} may save for {}", event.why, state.describe_alive(), format_duration(span)));
    stop_when_possible({event.signal, grace, event.why, now, span});
}

void EventStep::on(const job_event::HangFound& event) {
    if (state.phase != JobPhase::Running) return;
    InPlaceDecision decision = decide_on_hang(state, policy, now);
    if (decision.in_place && event.culprit >= 0) {  // its end is recovered as any other
        state.recovery.hang_ended = state.generation;
        return act(job_action::KillRank{event.culprit, event.what});
    }
    if (decision.in_place) decision.why = "the hanging rank is not known";
    if (!event.was_asked)
        return say(fmt::format("the hang is reported only (--hang-timeout is not set): {}", decision.why));
    note_failure(event.what);
    state.end.hung = true;
    fail({}, event.culprit, event.what, After::Restart, decision.why);
}

void EventStep::on(const job_event::RehearsalDue&) {
    if (state.phase != JobPhase::Running || state.recovery.in_place || state.change.leave.at != kNever)
        return;
    const InPlace rehearsal{.since = now, .ranks = state.ranks()};
    if (!decide_with_all({}, rehearsal).in_place) return;
    state.recovery.in_place = rehearsal;
    begin_in_place(-1);
}

void EventStep::on(const job_event::TimerFired&) {
    if (now < state.timer) return;
    state.timer = kNever;
    const std::optional<InPlace>& recovery = state.recovery.in_place;
    if (state.phase == JobPhase::BackingOff) start_over();
    else if (!state.is_under_way()) return;
    else if (state.change.leave.at <= now) go_on_without_leaving();
    else if (state.recovery.let_go.at <= now) form_again();
    else if (recovery && recovery->give_up <= now) give_up_recovery();
    else if (state.phase == JobPhase::Suspended) expect_no_more_losses();
    else if (state.change.grow_at <= now) grow_when_due();
    else set_running_timer();
}

}  // namespace

bool JobState::anybody_succeeded() const {
    return std::ranges::any_of(nodes, [](const Node& node) { return node.succeeded > 0; });
}

bool JobState::all_can_recover() const { return std::ranges::all_of(nodes, &Node::can_recover); }

bool JobState::can_recover_somewhere() const { return std::ranges::any_of(nodes, &Node::can_recover); }

int JobState::ranks() const { return first_rank_of(static_cast<int>(nodes.size())); }

int JobState::first_rank_of(int node) const {
    return std::accumulate(nodes.begin(), nodes.begin() + node, 0,
                           [](int first, const Node& one) { return first + one.workers; });
}

std::vector<int> JobState::ranks_of(std::size_t node) const {
    std::vector<int> ranks(static_cast<std::size_t>(nodes[node].workers));
    std::iota(ranks.begin(), ranks.end(), first_rank_of(static_cast<int>(node)));
    return ranks;
}

std::string JobState::describe_alive() const {
    int workers = 0;
    for (const Node& node : nodes) workers += node.is_there() ? node.workers - node.succeeded : 0;
    return fmt::format("{} worker{}", workers, workers == 1 ? "" : "s");
}

std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now) {
    EventStep one(state, policy, now);
    std::visit([&](const auto& what) { one.on(what); }, event);
    return std::move(one.actions);
}

}  // namespace ddprun
