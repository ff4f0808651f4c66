// The first story of job_state: a generation starts, is stopped and ends (GenerationEnd).
#include <fmt/core.h>
#include <signal.h>

#include <algorithm>

#include "env/text.h"
#include "launcher/head/job_steps.h"

namespace ddprun {
namespace {

/// True when the next generation cannot have all nodes of this one.
bool anybody_goes(const JobState& state) {
    return std::ranges::any_of(state.nodes,
                               [](const JobState::Node& node) { return node.lost || node.leaving; });
}

/// Forgets what was due in the generation that ends.
void forget_what_is_due(JobState& state) {
    state.recovery.in_place.reset();
    state.recovery.held_stop.reset();
    state.change.leave = state.recovery.let_go = {};
    state.change.grow_at = kNever;
}

}  // namespace

std::string describe_refusal(const std::string& why) {
    return why.empty() ? "" : fmt::format("not recovered in place: {}; ", why);
}

void GenerationSteps::set_timer(TimePoint when) {
    if (state.timer == when) return;
    state.timer = when;
    act(job_action::SetTimer{when});
}

void GenerationSteps::delay_timer(TimePoint until) {
    set_timer(state.timer == kNever ? until : std::max(state.timer, until));
}

void GenerationSteps::set_running_timer() {
    const std::optional<Recovery::InPlace>& recovery = state.recovery.in_place;
    if (state.phase == JobPhase::Suspended && recovery->losses_until != TimePoint{})
        return set_timer(recovery->losses_until);
    const TimePoint give_up = recovery ? recovery->give_up : kNever;
    set_timer(std::min({give_up, state.change.leave.at, state.recovery.let_go.at, state.change.grow_at}));
}

void GenerationSteps::start() {
    ++state.generation;
    state.nodes_there = static_cast<int>(state.nodes.size());
    state.unfinished = state.ranks();
    for (JobState::Node& node : state.nodes) node = {.workers = node.workers};
    state.phase = JobPhase::Running;
    state.generation_started = now;
    GenerationEnd& end = state.end;
    end.lost.restarts += now - end.idle_since.value_or(now);
    end.idle_since.reset();
    end.killing = end.is_free = end.hung = false;
    end.failure.clear();
    end.failure_decided.reset();
    end.stop.reset();
    end.outlived.reset();
    forget_what_is_due(state);
    state.change.waiting_nodes = 0;
    state.recovery.cannot_recover.clear();
    state.recovery.is_released = false;
    state.history.stuck_recoveries = 0;
    state.history.recovered_step = -1;
    set_timer(kNever);
    act(job_action::StartGeneration{state.generation, state.restarts_used});
}

void GenerationSteps::start_over() {
    if (state.end.after != After::Rejoin) return start();
    state.phase = JobPhase::Joining;
    set_timer(kNever);
    act(job_action::Rejoin{});
}

void GenerationSteps::continue_after_end() {
    if (state.nodes_there > 0) return;
    if (state.phase == JobPhase::Succeeded || state.end.after == After::Finish) return finish();
    if (state.timer != kNever && state.timer > now) {
        state.phase = JobPhase::BackingOff;
        return;
    }
    start_over();
}

void GenerationSteps::finish() {
    state.phase = JobPhase::Finished;
    set_timer(kNever);
    act(job_action::Finish{});
}

void GenerationSteps::finish_early(const std::string& why) {
    say(why + ": stopping before any worker runs");
    finish();
}

void GenerationSteps::stop(int signal, Duration grace, int failed_rank, std::string why) {
    state.phase = JobPhase::Stopping;
    const std::optional<Recovery::InPlace>& recovery = state.recovery.in_place;
    if (!state.end.idle_since) state.end.idle_since = recovery ? recovery->since : now;
    forget_what_is_due(state);
    state.end.stop.reset();
    state.end.has_ended_collectives = failed_rank >= 0;
    act(job_action::StopGeneration{signal, grace, failed_rank, std::move(why)});
    continue_after_end();
}

void GenerationSteps::stop_as_asked(GenerationEnd::Stop asked) {
    const Duration left = asked.grace - std::min(asked.grace, now - asked.since);
    if (asked.may_save) act(job_action::NotifyPreempt{asked.why, std::min(*asked.may_save, left)});
    stop(asked.signal, left, -1, asked.why);
    if (state.phase == JobPhase::Stopping) state.end.stop = std::move(asked);
}

bool GenerationSteps::stops_instead(const std::string& what) {
    const std::optional<GenerationEnd::Stop> held = state.recovery.held_stop;
    if (!held) return false;
    warn(what + "; the job is being stopped");
    stop_as_asked(*held);
    return true;
}

void GenerationSteps::kill_now() {
    if (std::exchange(state.end.killing, true)) return;
    say(fmt::format("killing {} now", state.describe_alive()));
    act(job_action::KillGeneration{});
}

void GenerationSteps::end_collectives(int rank) {
    if (!std::exchange(state.end.has_ended_collectives, true)) act(job_action::EndCollectives{rank});
}

void GenerationSteps::note_failure(const std::string& why) {
    state.end.failure = why;
    if (!state.end.failure_decided) state.end.failure_decided = now;
}

void GenerationSteps::note_progress(bool made_progress) {
    const bool progressed = made_progress || now - state.generation_started >= kProgressAge;
    state.history.without_progress = progressed ? 0 : state.history.without_progress + 1;
}

void GenerationSteps::use_up_restart() {
    ++state.restarts_used;
    state.history.restarts.push_back(now);
}

void GenerationSteps::fail(const FailureFacts& facts, int failed_rank, const std::string& what, After retry,
                           const std::string& not_in_place) {
    if (stops_instead(what)) return;
    note_progress(facts.made_progress);
    const JobSpec& spec = policy.spec;
    const RestartDecision decision =
        decide_restart(spec.restart, state.history, facts, now, policy.random, state.time_up);
    state.end.out_of_time = decision.out_of_time;
    const bool changes = state.change.waiting_nodes > 0 || anybody_goes(state);
    state.end.after = !decision.restart ? After::Finish : changes ? After::Rejoin : retry;
    if (decision.restart) use_up_restart();
    set_timer(decision.restart && decision.at > now ? decision.at : kNever);
    const std::string meaning = facts.meaning.empty() ? "" : fmt::format(" ({})", facts.meaning);
    warn(fmt::format("root cause: {}{}; {}{}", what, meaning, describe_refusal(not_in_place), decision.why));
    // Where one rank has saved and ends, the others do so too.
    const bool all_save = stopped_early(facts);
    stop(SIGTERM, all_save ? spec.shutdown_timeout : policy.failure_grace(), all_save ? -1 : failed_rank,
         what);
}

void GenerationSteps::outlive(const job_event::WorkerEnded& event) {
    warn(fmt::format("{}: {}", event.what, without_recovery(RecoverSpec::Mode::Program)));
    if (!state.end.outlived) state.end.outlived = {event.rank, event.facts, event.what};
}

void GenerationSteps::end_outlived() {
    if (state.anybody_succeeded()) return finish();
    const GenerationEnd::Failure first = *state.end.outlived;
    fail(first.facts, first.rank, first.what, After::Restart);
}

}  // namespace ddprun
