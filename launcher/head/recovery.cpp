// The second story of job_state: a failure is recovered in place (Recovery).
#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <numeric>

#include "env/text.h"
#include "launcher/head/job_steps.h"

namespace ddprun {
namespace {

/// "rank 5", "ranks 5, 6".
std::string named(std::vector<int> ranks) {
    std::sort(ranks.begin(), ranks.end());
    return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks",
                       join(ranks, ", ", [](int rank) { return std::to_string(rank); }));
}

/// Decides whether a failure is recovered in place: the failed ranks start again, the others go on.
/// `recovery`: what was lost since all ranks were last in one world, with this failure. Pure.
InPlaceDecision decide_in_place(const JobState& state, const JobPolicy& policy, const FailureFacts& failure,
                                const Recovery::InPlace& recovery, TimePoint now) {
    if (policy.spec.recover.mode != RecoverSpec::Mode::Auto) return {};
    if (!permanent_failure(failure).empty()) return {};
    if (stopped_early(failure)) return {false, "exit code 75 means that the ranks have stopped"};
    if (!state.recovery.cannot_recover.empty()) return {false, state.recovery.cannot_recover};
    if (!state.can_recover_somewhere()) return {};
    if (!state.all_can_recover()) return {false, "not all ranks were ready for it"};
    if (state.anybody_succeeded()) return {false, "a rank has ended"};
    if (state.recovery.is_released) return {false, "all ranks had finished"};
    if (2 * recovery.lost > recovery.ranks)
        return {false, fmt::format("{} of {} ranks failed", recovery.lost, recovery.ranks)};
    // Half of a world that has become smaller meanwhile may be all of it.
    if (recovery.failed.size() >= static_cast<std::size_t>(state.ranks()))
        return {false, "no rank is left that has the state"};
    if (state.history.stuck_recoveries > kStuckGenerations)
        return {false, fmt::format("{} recoveries in a row came no step further", kStuckGenerations)};
    if (state.time_up <= now) return {false, "the walltime is over"};
    return {true, ""};
}

}  // namespace

void Recovery::InPlace::add_failed(const std::vector<int>& more) {
    for (const int rank : more) {
        if (std::ranges::find(failed, rank) != failed.end()) continue;
        failed.push_back(rank);
        ++lost;
    }
}

InPlaceDecision decide_on_hang(const JobState& state, const JobPolicy& policy, TimePoint now) {
    if (state.recovery.hang_ended == state.generation) return {false, "the hanging rank is not known"};
    return decide_in_place(state, policy, {}, {.ranks = state.ranks(), .lost = 1}, now);
}

// ---- a generation in place, from its decision to its end

Recovery::InPlace RecoverySteps::recovery_of(const std::string& cause, bool is_workers) const {
    const std::optional<InPlace>& current = state.recovery.in_place;
    const bool has_failed = current && !current->is_rehearsal() && !current->is_growth;
    if (has_failed) return *current;
    InPlace recovery = current.value_or(InPlace{.ranks = state.ranks()});
    recovery.since = now;
    recovery.cause = cause;
    recovery.is_workers = is_workers;
    recovery.is_growth = false;
    return recovery;
}

InPlaceDecision RecoverySteps::decide_without_leaving(const FailureFacts& facts,
                                                      const InPlace& recovery) const {
    InPlace without = recovery;
    for (std::size_t i = 0; i < state.nodes.size(); ++i) {
        if (state.nodes[i].leaving) without.add_failed(state.ranks_of(i));
    }
    return decide_with_all(facts, without);
}

InPlaceDecision RecoverySteps::decide_with_all(const FailureFacts& facts, const InPlace& recovery) const {
    return decide_in_place(state, policy, facts, recovery, now);
}

void RecoverySteps::begin_in_place(int failed_rank) {
    ++state.generation;
    state.recovery.let_go = {};
    state.change.grow_at = kNever;
    for (JobState::Node& node : state.nodes)
        node.knows = node.joined = node.finished = node.suspended = false;
    state.recovery.in_place->began_at = -1;
    await_nodes();
    act(job_action::Recover{state.generation, state.restarts_used, failed_rank});
}

/// An agent kills workers that are late; the rest of the time is for one whose kill does not help, or that
/// waits for others.
void RecoverySteps::await_nodes() {
    const Duration patience = 2 * policy.spec.recover.within + kJoinTimeout;
    state.recovery.in_place->give_up = deadline_after(now, patience);
    set_running_timer();
}

void RecoverySteps::note_steps(std::int64_t steps) {
    RestartHistory& history = state.history;
    history.stuck_recoveries = steps > history.recovered_step ? 0 : history.stuck_recoveries + 1;
    history.recovered_step = std::max(history.recovered_step, steps);
}

/// Survivors may be further than those that have failed: a program that tells its steps by letters does so
/// when it leaves its group.
void RecoverySteps::note_begin(std::int64_t steps) {
    InPlace& recovery = *state.recovery.in_place;
    recovery.began_at = std::max(recovery.began_at, steps);
    if (recovery.is_rehearsal() || steps <= state.history.recovered_step) return;
    state.history.stuck_recoveries = 0;
    state.history.recovered_step = steps;
}

void RecoverySteps::end_recovery() {
    const InPlace done = *std::exchange(state.recovery.in_place, std::nullopt);
    const Duration took = now - done.since;
    const std::string at = done.began_at < 0 ? "" : fmt::format(", at step {}", done.began_at);
    if (done.is_rehearsal()) {
        ++state.recovery.rehearsals;
        state.end.lost.rehearsals += took;
        act(job_action::Recovered{"", {}, took, done.began_at});
    } else if (done.is_growth) {
        say(fmt::format("{} ranks run after {}{}", state.ranks(), format_duration(took), at));
    } else {
        ++state.recovery.recoveries;
        state.end.lost.failures += took;
        const std::string who = done.failed.empty() ? describe_going_on(state.ranks()) + " on"
                                                    : fmt::format("{} {} back", named(done.failed),
                                                                  done.failed.size() == 1 ? "is" : "are");
        say(fmt::format("recovered after {}: {}{}", format_duration(took), who, at));
        act(job_action::Recovered{done.cause, done.failed, took, done.began_at});
    }
    const bool grows = state.change.waiting_nodes > 0 && policy.spec.grow == Grow::Now;
    state.change.grow_at = grows ? deadline_after(now, kOneChange) : kNever;
    set_running_timer();
}

void RecoverySteps::give_up_recovery() {
    InPlace pending = *state.recovery.in_place;
    if (pending.is_rehearsal()) pending.cause = "a rehearsal (--rehearse)";
    fail_recovery(
        pending,
        fmt::format("not all {} were ready {} later", state.phase == JobPhase::Suspended ? "nodes" : "ranks",
                    format_duration(now - pending.since)),
        After::Restart);
}

void RecoverySteps::fail_recovery(const InPlace& recovery, const std::string& why, After retry) {
    const int failed_rank = recovery.failed.empty() ? -1 : recovery.failed.back();
    if (!recovery.is_workers) note_failure(recovery.cause);
    fail({}, recovery.is_workers ? failed_rank : -1, recovery.cause, retry, why);
}

void RecoverySteps::release() {
    if (!std::exchange(state.recovery.is_released, true)) act(job_action::Release{});
}

// ---- a suspended generation

void RecoverySteps::suspend(InPlace recovery, Duration wait, const std::string& why) {
    recovery.losses_until = wait > Duration::zero() ? deadline_after(now, wait) : TimePoint{};
    const int failed_rank = recovery.first_failed();
    state.recovery.in_place = std::move(recovery);
    state.phase = JobPhase::Suspended;
    state.change.leave = state.recovery.let_go = {};
    state.change.grow_at = kNever;
    await_nodes();
    act(job_action::Suspend{failed_rank, why});
    for (std::size_t i = 0; i < state.nodes.size(); ++i) {
        if (state.nodes[i].leaving && state.nodes[i].is_there())
            act(job_action::StopNode{static_cast<int>(i), policy.spec.shutdown_timeout, why});
    }
}

void RecoverySteps::reform_when_due() {
    if (state.phase != JobPhase::Suspended || state.recovery.in_place->losses_until != TimePoint{}) return;
    const auto is_awaited = [](const JobState::Node& node) {
        return node.is_there() && !node.leaving && !node.suspended;
    };
    if (std::ranges::any_of(state.nodes, is_awaited)) return;
    const InPlace recovery = *state.recovery.in_place;
    note_steps(recovery.steps);
    InPlaceDecision decision = decide_without_leaving({}, recovery);
    const auto has_stopped = [](const JobState::Node& node) {
        return node.ended && !node.lost && !node.leaving;
    };
    if (decision.in_place && std::ranges::any_of(state.nodes, has_stopped))
        decision = {false, "all workers of a node have ended"};
    if (decision.in_place) return act(job_action::Reform{});
    fail_recovery(recovery, decision.why, After::Rejoin);
}

void RecoverySteps::expect_no_more_losses() {
    state.recovery.in_place->losses_until = {};
    set_running_timer();
    reform_when_due();
}

void RecoverySteps::stop_when_possible(const GenerationEnd::Stop& asked) {
    if (state.phase != JobPhase::Suspended) return stop_as_asked(asked);
    if (!state.recovery.held_stop) state.recovery.held_stop = asked;
    expect_no_more_losses();
}

// ---- failures of workers

void RecoverySteps::recover_rank(const job_event::WorkerEnded& event) {
    begin_in_place(event.rank);
    const int others = state.ranks() - static_cast<int>(state.recovery.in_place->failed.size());
    const std::string meaning = event.facts.meaning.empty() ? "" : fmt::format(" ({})", event.facts.meaning);
    warn(fmt::format("{}{}: {} on in place, {} again", event.what, meaning, describe_going_on(others),
                     describe_starting({event.rank})));
}

void RecoverySteps::lose_rank(const job_event::WorkerEnded& event) {
    InPlace recovery = recovery_of(event.what, true);
    recovery.add_failed({event.rank});
    const bool is_suspended = state.phase == JobPhase::Suspended;
    const bool is_new = !event.is_late && !is_suspended;
    const bool never_ran = event.facts.never_ran && is_new;
    if (is_new && !never_ran) note_steps(event.steps);
    // A successor of this head skips the number of one generation that no node has heard of, not of two.
    const bool all_know = std::ranges::all_of(state.nodes, &JobState::Node::knows);
    const bool must_wait = state.recovery.in_place && is_new && !all_know;
    const InPlaceDecision decision = is_suspended || must_wait || never_ran
                                         ? decide_without_leaving(event.facts, recovery)
                                         : decide_with_all(event.facts, recovery);
    if (!decision.in_place) {
        const bool is_one_of_many = state.recovery.in_place && 2 * recovery.lost > recovery.ranks;
        if (is_one_of_many && !recovery.is_workers) note_failure(recovery.cause);
        return fail(event.facts, event.rank, is_one_of_many ? recovery.cause : event.what, After::Restart,
                    decision.why);
    }
    if (must_wait || never_ran) {
        warn(fmt::format("{}: {} wait {}", event.what, state.describe_alive(),
                         never_ran ? "for another attempt" : "until all nodes know of the last recovery"));
        return suspend(std::move(recovery), never_ran ? kSpawnPause : Duration::zero(), event.what);
    }
    state.recovery.in_place = std::move(recovery);
    if (is_new) recover_rank(event);
}

void RecoverySteps::lose_before_joining(int rank) {
    if (state.recovery.in_place)
        return fail_recovery(InPlace(*state.recovery.in_place),
                             fmt::format("rank {} ended with 0 before it had joined", rank), After::Restart);
    if (state.nodes.size() > 1 && state.unfinished == state.ranks() - 1) act(job_action::EndJoining{rank});
}

void RecoverySteps::note_let_go(Duration patience, const std::string& why) {
    const TimePoint at = deadline_after(now, patience);
    Recovery::Change& let_go = state.recovery.let_go;
    if (state.phase != JobPhase::Running || (let_go.at != kNever && let_go.at >= at)) return;
    let_go = {at, why};
    set_running_timer();
}

void RecoverySteps::form_again() {
    const std::string why = std::exchange(state.recovery.let_go, {}).why;
    InPlace recovery = recovery_of(why, false);
    const InPlaceDecision decision = decide_without_leaving({}, recovery);
    if (!decision.in_place) return fail_recovery(recovery, decision.why, After::Restart);
    warn(fmt::format("{}, though nobody has ended: {} wait to go on in place", why, state.describe_alive()));
    suspend(std::move(recovery), Duration::zero(), why);
}

// ---- a death while the workers stop

/// True when a failure while the workers stop can be recovered in place, so that they save.
bool RecoverySteps::can_save_in_place(const FailureFacts& facts) const {
    const std::optional<GenerationEnd::Stop>& asked = state.end.stop;
    if (!asked || state.end.killing || now - asked->since >= asked->grace) return false;
    const auto is_gone = [](const JobState::Node& node) { return !node.is_there() || node.leaving; };
    if (std::ranges::any_of(state.nodes, is_gone)) return false;
    JobState in_time = state;
    in_time.time_up = kNever;  // the end of the walltime is why they stop
    return decide_in_place(in_time, policy, facts, {.ranks = state.ranks(), .lost = 1}, now).in_place;
}

/// Begins the generation in place in which the workers save. `rank`: the one that has ended; -1: none.
void RecoverySteps::save_in_place(int rank, const std::string& what) {
    GenerationEnd::Stop asked = *state.end.stop;
    asked.may_save.reset();  // they know
    asked.saves_in_place = true;
    InPlace& recovery =
        state.recovery.in_place.emplace(InPlace{.since = now, .cause = what, .ranks = state.ranks()});
    if (rank >= 0) recovery.add_failed({rank});
    state.phase = JobPhase::Running;
    begin_in_place(rank);
    warn(fmt::format("{}: {} on in place{}, to save before the stop", what,
                     describe_going_on(state.ranks() - (rank >= 0 ? 1 : 0)),
                     rank >= 0 ? fmt::format(", {} again", describe_starting({rank})) : ""));
    set_timer(kNever);
    stop_as_asked(std::move(asked));
}

void RecoverySteps::lose_while_stopping(const job_event::WorkerEnded& event) {
    const int status = event.facts.status;
    const std::optional<GenerationEnd::Stop>& asked = state.end.stop;
    const bool was_asked = status == SIGTERM || status == SIGINT || (asked && status == asked->signal);
    if (event.facts.signaled && !was_asked && can_save_in_place(event.facts))
        return save_in_place(event.rank, event.what);
    end_collectives(event.rank);
}

void RecoverySteps::hear_while_stopping(const job_event::NodeReady& event) {
    using enum job_event::NodeReady::Stage;
    if (event.stage == Joined) {
        state.nodes[static_cast<std::size_t>(event.node)].joined = true;
        if (state.end.stop && std::ranges::all_of(state.nodes, &JobState::Node::joined))
            state.end.stop->saves_in_place = false;
    }
    if (event.stage != LetGo) return;
    if (can_save_in_place({})) return save_in_place(-1, event.why);
    end_collectives(state.first_rank_of(event.node));
}

// ---- for people

std::string describe_going_on(int ranks) {
    return fmt::format("{} {}", ranks, ranks == 1 ? "rank goes" : "ranks go");
}

std::string describe_starting(const std::vector<int>& ranks) {
    return named(ranks) + (ranks.size() == 1 ? " starts" : " start");
}

std::string describe_lost(const std::vector<int>& ranks) {
    return named(ranks) + (ranks.size() == 1 ? " is lost" : " are lost");
}

std::string describe_recovery(const JobState& state, RecoverSpec::Mode mode) {
    if (mode != RecoverSpec::Mode::Auto) return std::string(without_recovery(mode));
    if (!state.recovery.cannot_recover.empty())
        return "all ranks restart (" + state.recovery.cannot_recover + ")";
    if (!state.can_recover_somewhere())
        return "all ranks restart (the program has not announced that it recovers in place)";
    if (!state.all_can_recover()) return "all ranks restart (not all ranks are ready for recovery in place)";
    return "the failed ranks start again in place";
}

std::string describe_rehearsals(const JobState& state, const RecoverSpec& spec) {
    if (spec.rehearse == 0) return "";
    if (const int count = state.recovery.rehearsals; count > 0)
        return fmt::format("{} rehearsal{}: all ranks let go and met again, {} steps or more apart", count,
                           count == 1 ? "" : "s", spec.rehearse);
    if (!state.recovery.cannot_recover.empty()) return "";  // the line that named the refusal has said so
    const std::string why = state.all_can_recover() && !state.nodes.empty()
                                ? "the job ended too soon for one"
                                : describe_recovery(state, spec.mode);
    return fmt::format("there was no rehearsal (--rehearse): {}", why);
}

}  // namespace ddprun
