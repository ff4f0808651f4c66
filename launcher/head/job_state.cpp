#include "launcher/head/job_state.h"

#include <fmt/core.h>
#include <signal.h>
#include <sysexits.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "env/text.h"
#include "launcher/head/in_place.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// The number of restarts that count against the budget now.
int spent(const RestartSpec& spec, const RestartHistory& history, TimePoint now) {
    if (!spec.window) return static_cast<int>(history.restarts.size());
    return static_cast<int>(std::count_if(history.restarts.begin(), history.restarts.end(),
                                          [&](TimePoint at) { return now - at < *spec.window; }));
}

/// " within 1 h", or "".
std::string within(const RestartSpec& spec) {
    return spec.window ? " within " + format_duration(*spec.window) : "";
}

std::string used_up(const RestartSpec& spec) {
    if (spec.max_restarts == 1) return fmt::format("the one restart{} is used up", within(spec));
    return fmt::format("all {} restarts{} are used up", spec.max_restarts, within(spec));
}

/// The back-off: doubled for every restart in a row, at most backoff_max, then spread over its upper half.
Duration backoff(const RestartSpec& spec, int restarts_in_a_row, double random) {
    if (spec.backoff <= Duration::zero() || restarts_in_a_row == 0) return Duration::zero();
    const double doubled = static_cast<double>(spec.backoff.count()) * std::pow(2.0, restarts_in_a_row - 1);
    const double capped = std::min(doubled, static_cast<double>(spec.backoff_max.count()));
    return Duration(static_cast<Duration::rep>(capped * (0.5 + 0.5 * random)));
}

using JobPhase = JobState::Phase;
using After = JobState::After;
using JobActions = std::vector<JobAction>;

void say(JobActions& actions, std::string text) {
    actions.emplace_back(job_action::Say{std::move(text), false});
}
void warn(JobActions& actions, std::string text) {
    actions.emplace_back(job_action::Say{std::move(text), true});
}

void set_timer(JobState& state, TimePoint when, JobActions& actions) {
    if (state.timer == when) return;
    state.timer = when;
    actions.emplace_back(job_action::SetTimer{when});
}

/// "4 workers": the number that may be alive.
std::string alive_elsewhere(const JobState& state) {
    int workers = 0;
    for (const JobState::Node& node : state.nodes) {
        if (!node.lost && !node.ended) workers += node.workers - node.succeeded;
    }
    return fmt::format("{} worker{}", workers, workers == 1 ? "" : "s");
}

/// Counts a node out of `nodes_there`, a counter because every node's end asks for it in a large job.
void note_gone(JobState& state, const JobState::Node& before) {
    state.nodes_there -= before.ended || before.lost ? 0 : 1;
}

bool nobody_runs(const JobState& state) {
    return state.phase == JobPhase::Joining || state.phase == JobPhase::BackingOff;
}

void finish(JobState& state, JobActions& actions) {
    state.phase = JobPhase::Finished;
    set_timer(state, kNever, actions);
    actions.emplace_back(job_action::Finish{});
}

bool has_finished(const JobState::Node& node) { return node.ended && node.succeeded == node.workers; }

/// True while workers go on, or wait to go on.
bool is_under_way(const JobState& state) {
    return state.phase == JobPhase::Running || state.phase == JobPhase::Suspended;
}

/// True when the next generation cannot have all nodes of this one.
bool anybody_goes(const JobState& state) {
    return std::any_of(state.nodes.begin(), state.nodes.end(),
                       [](const JobState::Node& node) { return node.lost || node.leaving; });
}

/// Forgets what was due in the generation that ends.
void forget_what_is_due(JobState& state) {
    state.in_place.reset();
    state.held_stop.reset();
    state.leave = state.let_go = {};
    state.grow_at = kNever;
}

/// Sets the timer for what is due next while workers go on, or wait to go on.
void set_running_timer(JobState& state, JobActions& actions) {
    const bool awaits_losses =
        state.phase == JobPhase::Suspended && state.in_place->losses_until != TimePoint{};
    if (awaits_losses) return set_timer(state, state.in_place->losses_until, actions);
    const TimePoint give_up = state.in_place ? state.in_place->give_up : kNever;
    set_timer(state, std::min({give_up, state.leave.at, state.let_go.at, state.grow_at}), actions);
}

void start_generation(JobState& state, TimePoint now, JobActions& actions) {
    ++state.generation;
    state.nodes_there = static_cast<int>(state.nodes.size());
    state.unfinished = 0;
    for (JobState::Node& node : state.nodes) {
        node = {.workers = node.workers};
        state.unfinished += node.workers;
    }
    state.waiting_nodes = 0;
    state.phase = JobPhase::Running;
    state.generation_started = now;
    state.lost.restarts += now - state.idle_since.value_or(now);
    state.idle_since.reset();
    state.killing = false;
    state.is_free = false;
    state.hung = false;
    state.failure.clear();
    state.failure_decided.reset();
    forget_what_is_due(state);
    state.stop.reset();
    state.outlived.reset();
    state.cannot_recover.clear();
    state.is_released = false;
    state.history.stuck_recoveries = 0;
    state.history.recovered_step = -1;
    set_timer(state, kNever, actions);
    actions.emplace_back(job_action::StartGeneration{state.generation, state.restarts_used});
}

/// Begins a new generation on the same nodes, or waits for nodes again.
void start_over(JobState& state, TimePoint now, JobActions& actions) {
    if (state.after != After::Rejoin) return start_generation(state, now, actions);
    state.phase = JobPhase::Joining;
    set_timer(state, kNever, actions);
    actions.emplace_back(job_action::Rejoin{});
}

/// Decides what follows a generation, once no node of it is left.
void continue_after_end(JobState& state, TimePoint now, JobActions& actions) {
    if (state.nodes_there > 0) return;
    if (state.phase == JobPhase::Succeeded || state.after == After::Finish) return finish(state, actions);
    if (state.timer != kNever && state.timer > now) {
        state.phase = JobPhase::BackingOff;
        return;
    }
    start_over(state, now, actions);
}

void stop_generation(JobState& state, int signal, Duration grace, int failed_rank, std::string why,
                     TimePoint now, JobActions& actions) {
    state.phase = JobPhase::Stopping;
    if (!state.idle_since) state.idle_since = state.in_place ? state.in_place->since : now;
    forget_what_is_due(state);
    state.stop.reset();
    state.has_ended_collectives = failed_rank >= 0;
    actions.emplace_back(job_action::StopGeneration{signal, grace, failed_rank, std::move(why)});
    continue_after_end(state, now, actions);
}

/// Stops all workers as the user or the scheduler has asked.
void stop_workers(JobState& state, JobState::Stop stop, TimePoint now, JobActions& actions) {
    const Duration left = stop.grace - std::min(stop.grace, now - stop.since);
    if (stop.may_save)
        actions.emplace_back(job_action::NotifyPreempt{stop.why, std::min(*stop.may_save, left)});
    stop_generation(state, stop.signal, left, -1, stop.why, now, actions);
    if (state.phase == JobPhase::Stopping) state.stop = std::move(stop);
}

/// True: a stop was held back until the suspended workers have a world again, which they will not have.
bool stops_instead(JobState& state, const std::string& what, TimePoint now, JobActions& actions) {
    if (!state.held_stop) return false;
    warn(actions, what + "; the job is being stopped");
    stop_workers(state, *state.held_stop, now, actions);
    return true;
}

/// Notes a cause that is no worker. The time of an earlier one stays (a node was lost, then no other came),
/// because workers reacted to that.
void decide_on_failure(JobState& state, const std::string& why, TimePoint now) {
    state.failure = why;
    if (!state.failure_decided) state.failure_decided = now;
}

/// Notes at a generation's end whether it made progress.
void note_progress(JobState& state, bool made_progress, TimePoint now) {
    const bool progressed = made_progress || now - state.generation_started >= kProgressAge;
    state.history.without_progress = progressed ? 0 : state.history.without_progress + 1;
}

/// "not recovered in place: a rank has ended; ", or "".
std::string refused(const std::string& why) {
    return why.empty() ? "" : fmt::format("not recovered in place: {}; ", why);
}

/// Handles a failure of the running generation: decides on a restart and stops what still runs.
/// `not_in_place`: why it is not recovered in place; "" nobody expects that.
void fail(JobState& state, const FailureFacts& facts, int failed_rank, const std::string& what, After retry,
          const JobPolicy& policy, TimePoint now, JobActions& actions, const std::string& not_in_place = {}) {
    if (stops_instead(state, what, now, actions)) return;
    note_progress(state, facts.made_progress, now);
    const RestartDecision decision =
        decide_restart(policy.restart, state.history, facts, now, policy.random, state.time_up);
    state.out_of_time = decision.out_of_time;
    const bool changes = state.waiting_nodes > 0 || anybody_goes(state);
    state.after = !decision.restart ? After::Finish : changes ? After::Rejoin : retry;
    if (decision.restart) {
        ++state.restarts_used;
        state.history.restarts.push_back(now);
    }
    set_timer(state, decision.restart && decision.at > now ? decision.at : kNever, actions);
    const std::string meaning = facts.meaning.empty() ? "" : fmt::format(" ({})", facts.meaning);
    warn(actions, fmt::format("root cause: {}{}; {}{}", what, meaning, refused(not_in_place), decision.why));
    // Where one rank has saved and ends, the others do so too.
    const bool all_save = stopped_early(facts);
    stop_generation(state, SIGTERM, all_save ? policy.shutdown_timeout : policy.failure_grace,
                    all_save ? -1 : failed_rank, what, now, actions);
}

/// Decides whether another generation can begin that uses up no restart.
RestartDecision decide_change(const JobState& state, TimePoint now) {
    RestartSpec unlimited;
    unlimited.max_restarts = std::numeric_limits<int>::max();
    return decide_restart(unlimited, {}, {}, now, 0, state.time_up);
}

/// Ends the generation for one with other nodes, which begins at `when` or later. All workers may save.
void change_world(JobState& state, const std::string& why, Duration grace, TimePoint when, TimePoint now,
                  JobActions& actions) {
    note_progress(state, false, now);
    state.after = After::Rejoin;
    state.is_free = true;
    set_timer(state, when, actions);
    say(actions, fmt::format("{}: {} may save for {}; then another generation, which uses up no restart", why,
                             alive_elsewhere(state), format_duration(grace)));
    actions.emplace_back(job_action::NotifyPreempt{why, grace});
    stop_generation(state, SIGTERM, grace, -1, why, now, actions);
}

// ---- recovery in place

/// "rank 5", "ranks 5, 6".
std::string named(std::vector<int> ranks) {
    std::sort(ranks.begin(), ranks.end());
    return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks",
                       join(ranks, ", ", [](int rank) { return std::to_string(rank); }));
}

int first_rank_of(const JobState& state, int node) {
    return std::accumulate(state.nodes.begin(), state.nodes.begin() + node, 0,
                           [](int first, const JobState::Node& one) { return first + one.workers; });
}

/// The ranks of a node of the world.
std::vector<int> ranks_of(const JobState& state, std::size_t node) {
    std::vector<int> ranks(static_cast<std::size_t>(state.nodes[node].workers));
    std::iota(ranks.begin(), ranks.end(), first_rank_of(state, static_cast<int>(node)));
    return ranks;
}

/// The recovery under way, or a new one with this cause: a rehearsal, or a growth, becomes it.
JobState::InPlace recovery_of(const JobState& state, const std::string& cause, bool is_workers,
                              TimePoint now) {
    const bool has_failed = state.in_place && !state.in_place->is_rehearsal() && !state.in_place->is_growth;
    if (has_failed) return *state.in_place;
    JobState::InPlace recovery = state.in_place.value_or(JobState::InPlace{.ranks = state.ranks()});
    recovery.since = now;
    recovery.cause = cause;
    recovery.is_workers = is_workers;
    recovery.is_growth = false;
    return recovery;
}

void add_failed(JobState::InPlace& recovery, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
        if (std::find(recovery.failed.begin(), recovery.failed.end(), rank) != recovery.failed.end())
            continue;
        recovery.failed.push_back(rank);
        ++recovery.lost;
    }
}

/// Decides whether the workers go on without those of nodes that leave.
InPlaceDecision decide_to_part(const JobState& state, const JobPolicy& policy, const FailureFacts& facts,
                               const JobState::InPlace& recovery, TimePoint now) {
    JobState::InPlace without = recovery;
    for (std::size_t i = 0; i < state.nodes.size(); ++i) {
        if (state.nodes[i].leaving) add_failed(without, ranks_of(state, i));
    }
    return decide_in_place(state, policy, facts, without, now);
}

void note_steps(RestartHistory& history, std::int64_t steps) {
    history.stuck_recoveries = steps > history.recovered_step ? 0 : history.stuck_recoveries + 1;
    history.recovered_step = std::max(history.recovered_step, steps);
}

/// Notes with which step a node's ranks begin a generation in place. Survivors may be further than those that
/// have failed: a program that tells its steps by letters does so when it leaves its group.
void note_begin(JobState& state, std::int64_t steps) {
    state.in_place->began_at = std::max(state.in_place->began_at, steps);
    if (state.in_place->is_rehearsal() || steps <= state.history.recovered_step) return;
    state.history.stuck_recoveries = 0;
    state.history.recovered_step = steps;
}

/// Waits until all ranks have joined the generation in place, or all nodes have suspended theirs. An agent
/// kills workers that are late; the rest of the time is for one whose kill does not help, or that waits for
/// others.
void await_nodes(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    state.in_place->give_up = deadline_after(now, 2 * policy.recover.within + kJoinPatience);
    set_running_timer(state, actions);
}

/// Begins the next generation, in which the workers that run go on.
void begin_in_place(JobState& state, int failed_rank, const JobPolicy& policy, TimePoint now,
                    JobActions& actions) {
    ++state.generation;
    state.let_go = {};
    state.grow_at = kNever;
    for (JobState::Node& node : state.nodes)
        node.knows = node.joined = node.finished = node.suspended = false;
    state.in_place->began_at = -1;
    await_nodes(state, policy, now, actions);
    actions.emplace_back(job_action::Recover{state.generation, state.restarts_used, failed_rank});
}

/// "7 ranks go".
std::string go(int ranks) { return fmt::format("{} {}", ranks, ranks == 1 ? "rank goes" : "ranks go"); }

/// "rank 5 starts", "ranks 4, 5 start".
std::string start(const std::vector<int>& ranks) {
    return named(ranks) + (ranks.size() == 1 ? " starts" : " start");
}

void recover(JobState& state, const job_event::WorkerEnded& event, const JobPolicy& policy, TimePoint now,
             JobActions& actions) {
    begin_in_place(state, event.rank, policy, now, actions);
    const int others = state.ranks() - static_cast<int>(state.in_place->failed.size());
    const std::string meaning = event.facts.meaning.empty() ? "" : fmt::format(" ({})", event.facts.meaning);
    warn(actions,
         fmt::format("{}{}: {} on in place, {} again", event.what, meaning, go(others), start({event.rank})));
}

/// Ends the generation for one with other nodes, or with the same ones, in which the workers that run go on.
/// `wait`: for this long more nodes may be lost.
void suspend(JobState& state, JobState::InPlace recovery, Duration wait, const std::string& why,
             const JobPolicy& policy, TimePoint now, JobActions& actions) {
    state.in_place = std::move(recovery);
    state.phase = JobPhase::Suspended;
    state.leave = state.let_go = {};
    state.grow_at = kNever;
    state.in_place->losses_until = wait > Duration::zero() ? deadline_after(now, wait) : TimePoint{};
    await_nodes(state, policy, now, actions);
    const std::vector<int>& failed = state.in_place->failed;
    actions.emplace_back(job_action::Suspend{failed.empty() ? -1 : failed.front(), why});
    for (std::size_t i = 0; i < state.nodes.size(); ++i) {
        if (state.nodes[i].leaving && !state.nodes[i].ended && !state.nodes[i].lost)
            actions.emplace_back(job_action::StopNode{static_cast<int>(i), policy.shutdown_timeout, why});
    }
}

/// Handles the failure of a recovery that no single worker's end explains.
void fail_recovery(JobState& state, const JobState::InPlace& recovery, const std::string& why, After retry,
                   const JobPolicy& policy, TimePoint now, JobActions& actions) {
    const int failed_rank = recovery.failed.empty() ? -1 : recovery.failed.back();
    if (!recovery.is_workers) decide_on_failure(state, recovery.cause, now);
    fail(state, FailureFacts{}, recovery.is_workers ? failed_rank : -1, recovery.cause, retry, policy, now,
         actions, why);
}

/// Asks for the next world once all nodes have confirmed that the generation is over, and no further loss is
/// expected.
void reform_when_due(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    if (state.phase != JobPhase::Suspended || state.in_place->losses_until != TimePoint{}) return;
    const auto is_awaited = [](const JobState::Node& node) {
        return !node.lost && !node.leaving && !node.ended && !node.suspended;
    };
    if (std::any_of(state.nodes.begin(), state.nodes.end(), is_awaited)) return;
    note_steps(state.history, state.in_place->steps);
    InPlaceDecision decision = decide_to_part(state, policy, {}, *state.in_place, now);
    const auto has_stopped = [](const JobState::Node& node) {
        return node.ended && !node.lost && !node.leaving;
    };
    if (decision.in_place && std::any_of(state.nodes.begin(), state.nodes.end(), has_stopped))
        decision = {false, "all workers of a node have ended"};
    if (decision.in_place) return actions.emplace_back(job_action::Reform{}), void();
    fail_recovery(state, JobState::InPlace(*state.in_place), decision.why, After::Rejoin, policy, now,
                  actions);
}

/// Begins the suspended generation's successor on the nodes of the next world.
void reform(JobState& state, const job_event::WorldFormed& event, const JobPolicy& policy, TimePoint now,
            JobActions& actions) {
    const JobState before = state;
    std::vector<int>& failed = state.in_place->failed;
    failed.clear();
    state.nodes.clear();
    state.unfinished = 0;
    int new_nodes = 0;
    for (std::size_t i = 0; i < event.workers.size(); ++i) {
        // A new node's workers are taken to recover as the others, until one refuses.
        state.nodes.push_back({.workers = event.workers[i], .can_recover = true});
        state.unfinished += event.workers[i];
        const std::vector<int> ranks = ranks_of(state, i);
        new_nodes += event.before[i] < 0 ? 1 : 0;
        if (event.before[i] < 0) failed.insert(failed.end(), ranks.begin(), ranks.end());
        else {
            const std::vector<int> old = ranks_of(before, static_cast<std::size_t>(event.before[i]));
            for (std::size_t n = 0; n < old.size(); ++n) {
                if (std::count(before.in_place->failed.begin(), before.in_place->failed.end(), old[n]) > 0)
                    failed.push_back(ranks[n]);
            }
        }
    }
    state.nodes_there = static_cast<int>(state.nodes.size());
    state.waiting_nodes = 0;
    state.phase = JobPhase::Running;
    begin_in_place(state, failed.empty() ? -1 : failed.front(), policy, now, actions);
    std::string line = go(state.ranks() - static_cast<int>(failed.size())) + " on in place";
    if (!failed.empty())
        line += fmt::format(", {} {}", start(failed),
                            new_nodes == 0   ? "again"
                            : new_nodes == 1 ? "on another node"
                                             : "on other nodes");
    if (state.nodes.size() != before.nodes.size())
        line += fmt::format("; {} instead of {} nodes", state.nodes.size(), before.nodes.size());
    say(actions, line);
    if (before.held_stop) stop_workers(state, *before.held_stop, now, actions);
}

/// Handles a worker's failure in the running or suspended generation.
void lose_rank(JobState& state, const job_event::WorkerEnded& event, const JobPolicy& policy, TimePoint now,
               JobActions& actions) {
    JobState::InPlace recovery = recovery_of(state, event.what, true, now);
    add_failed(recovery, {event.rank});
    const bool is_suspended = state.phase == JobPhase::Suspended;
    const bool never_ran = event.facts.never_ran && !event.is_late && !is_suspended;
    if (!event.is_late && !is_suspended && !never_ran) note_steps(state.history, event.steps);
    // A successor of this head skips the number of one generation that no node has heard of, not of two.
    const bool all_know = std::ranges::all_of(state.nodes, &JobState::Node::knows);
    const bool must_wait = state.in_place && !event.is_late && !is_suspended && !all_know;
    const InPlaceDecision decision = is_suspended || must_wait || never_ran
                                         ? decide_to_part(state, policy, event.facts, recovery, now)
                                         : decide_in_place(state, policy, event.facts, recovery, now);
    if (!decision.in_place) {
        const bool is_one_of_many = state.in_place && 2 * recovery.lost > recovery.ranks;
        if (is_one_of_many && !recovery.is_workers) decide_on_failure(state, recovery.cause, now);
        return fail(state, event.facts, event.rank, is_one_of_many ? recovery.cause : event.what,
                    After::Restart, policy, now, actions, decision.why);
    }
    if (must_wait || never_ran) {
        warn(actions,
             fmt::format("{}: {} wait {}", event.what, alive_elsewhere(state),
                         never_ran ? "for another attempt" : "until all nodes know of the last recovery"));
        const Duration pause = never_ran ? kSpawnPause : Duration::zero();
        return suspend(state, std::move(recovery), pause, event.what, policy, now, actions);
    }
    state.in_place = std::move(recovery);
    if (!event.is_late && !is_suspended) recover(state, event, policy, now, actions);
}

// ---- a death while the workers stop

/// Tells all nodes once that a rank will never answer: its peers would wait in a collective until their grace
/// is over.
void end_collectives(JobState& state, int rank, JobActions& actions) {
    if (!std::exchange(state.has_ended_collectives, true))
        actions.emplace_back(job_action::EndCollectives{rank});
}

/// True when a failure while the workers stop can be recovered in place, so that they save.
bool can_meet_again(const JobState& state, const FailureFacts& facts, const JobPolicy& policy,
                    TimePoint now) {
    if (!state.stop || state.killing || now - state.stop->since >= state.stop->grace) return false;
    const auto is_gone = [](const JobState::Node& node) { return node.ended || node.lost || node.leaving; };
    if (std::ranges::any_of(state.nodes, is_gone)) return false;
    JobState in_time = state;
    in_time.time_up = kNever;  // the end of the walltime is why they stop
    return decide_in_place(in_time, policy, facts, {.ranks = state.ranks(), .lost = 1}, now).in_place;
}

/// Begins the generation in place in which the workers save. `rank`: the one that has ended; -1: none.
void meet_again(JobState& state, int rank, const std::string& what, const JobPolicy& policy, TimePoint now,
                JobActions& actions) {
    JobState::Stop stop = *state.stop;
    stop.may_save.reset();  // they know
    stop.meets = true;
    state.in_place = JobState::InPlace{.since = now, .cause = what, .ranks = state.ranks()};
    if (rank >= 0) add_failed(*state.in_place, {rank});
    state.phase = JobPhase::Running;
    begin_in_place(state, rank, policy, now, actions);
    warn(actions, fmt::format("{}: {} on in place{}, to save before the stop", what,
                              go(state.ranks() - (rank >= 0 ? 1 : 0)),
                              rank >= 0 ? fmt::format(", {} again", start({rank})) : ""));
    set_timer(state, kNever, actions);
    stop_workers(state, std::move(stop), now, actions);
}

/// Handles a worker's failure while the workers stop. One that the stop's own signal has ended, or that exits
/// with an error, would do so again.
void lose_while_stopping(JobState& state, const job_event::WorkerEnded& event, const JobPolicy& policy,
                         TimePoint now, JobActions& actions) {
    const bool was_asked = event.facts.status == SIGTERM || event.facts.status == SIGINT ||
                           (state.stop && event.facts.status == state.stop->signal);
    if (event.facts.signaled && !was_asked && can_meet_again(state, event.facts, policy, now))
        return meet_again(state, event.rank, event.what, policy, now, actions);
    end_collectives(state, event.rank, actions);
}

/// Handles what nodes say of workers while these stop.
void hear_while_stopping(JobState& state, const job_event::NodeReady& event, const JobPolicy& policy,
                         TimePoint now, JobActions& actions) {
    using enum job_event::NodeReady::Stage;
    if (event.stage == Joined) {
        state.nodes[static_cast<std::size_t>(event.node)].joined = true;
        if (state.stop && std::ranges::all_of(state.nodes, &JobState::Node::joined))
            state.stop->meets = false;
    }
    if (event.stage != LetGo) return;
    if (can_meet_again(state, {}, policy, now)) return meet_again(state, -1, event.why, policy, now, actions);
    end_collectives(state, first_rank_of(state, event.node), actions);
}

/// Notes a failure that the other ranks outlive.
void outlive(JobState& state, const job_event::WorkerEnded& event, JobActions& actions) {
    warn(actions, fmt::format("{}: {}", event.what, without_recovery(RecoverSpec::Mode::Program)));
    if (!state.outlived) state.outlived = {event.rank, event.facts, event.what};
}

/// Handles the end of a generation in which ranks outlived a failure.
void end_outlived(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    if (state.anybody_succeeded()) return finish(state, actions);
    const JobState::Failure first = *state.outlived;
    fail(state, first.facts, first.rank, first.what, After::Restart, policy, now, actions);
}

void end_recovery(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    const JobState::InPlace done = *std::exchange(state.in_place, std::nullopt);
    const Duration took = now - done.since;
    const std::int64_t steps = done.began_at;
    const std::string who = done.failed.empty() ? fmt::format("{} on", go(state.ranks()))
                                                : fmt::format("{} {} back", named(done.failed),
                                                              done.failed.size() == 1 ? "is" : "are");
    const std::string at = steps < 0 ? "" : fmt::format(", at step {}", steps);
    if (done.is_rehearsal()) {
        ++state.rehearsals;
        state.lost.rehearsals += took;
        actions.emplace_back(job_action::Recovered{"", {}, took, steps});
    } else if (done.is_growth) {
        say(actions, fmt::format("{} ranks run after {}{}", state.ranks(), format_duration(took), at));
    } else {
        ++state.recoveries;
        state.lost.failures += took;
        say(actions, fmt::format("recovered after {}: {}{}", format_duration(took), who, at));
        actions.emplace_back(job_action::Recovered{done.cause, done.failed, took, steps});
    }
    const bool grows = state.waiting_nodes > 0 && policy.grow == Grow::Now;
    state.grow_at = grows ? deadline_after(now, kOneChange) : kNever;
    set_running_timer(state, actions);
}

/// Lets ranks that have finished end, now and later.
void release(JobState& state, JobActions& actions) {
    if (!std::exchange(state.is_released, true)) actions.emplace_back(job_action::Release{});
}

/// A worker leaves the generation, for another reason than that ddprun told it. Usually the end of a worker
/// is reported within `patience`.
void note_let_go(JobState& state, Duration patience, const std::string& why, TimePoint now,
                 JobActions& actions) {
    const TimePoint at = deadline_after(now, patience);
    if (state.phase != JobPhase::Running || (state.let_go.at != kNever && state.let_go.at >= at)) return;
    state.let_go = {at, why};
    set_running_timer(state, actions);
}

/// Forms the world of the same nodes anew, when nobody's end explains why its ranks have left it.
void form_again(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    const std::string why = std::exchange(state.let_go, {}).why;
    JobState::InPlace recovery = recovery_of(state, why, false, now);
    const InPlaceDecision decision = decide_to_part(state, policy, {}, recovery, now);
    if (!decision.in_place)
        return fail_recovery(state, recovery, decision.why, After::Restart, policy, now, actions);
    warn(actions,
         fmt::format("{}, though nobody has ended: {} wait to go on in place", why, alive_elsewhere(state)));
    suspend(state, std::move(recovery), Duration::zero(), why, policy, now, actions);
}

/// Lets the others go on in place without the nodes that leave.
void part(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    const std::string why = state.leave.why;
    JobState::InPlace recovery = recovery_of(state, why, false, now);
    const InPlaceDecision decision = decide_to_part(state, policy, {}, recovery, now);
    // The ranks that have failed need the state of those that leave.
    if (!decision.in_place && state.in_place) {
        state.leave.at = deadline_after(now, kOneChange);
        return set_running_timer(state, actions);
    }
    if (!decision.in_place) return change_world(state, why, policy.shutdown_timeout, kNever, now, actions);
    suspend(state, std::move(recovery), Duration::zero(), why, policy, now, actions);
}

/// Takes in the waiting nodes. After kStuckGenerations without progress they wait until this generation has
/// made some: a node that comes and goes for ever must not stop the others each time.
void grow_when_due(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    state.grow_at = kNever;
    const bool changes = state.in_place || state.leave.at != kNever || state.let_go.at != kNever;
    if (changes) return set_running_timer(state, actions);
    if (state.waiting_nodes == 0 || state.anybody_succeeded()) return;
    const TimePoint progress = state.generation_started + kProgressAge;
    if (state.history.without_progress >= kStuckGenerations && now < progress) {
        state.grow_at = progress;
        set_running_timer(state, actions);
        return say(
            actions,
            fmt::format(
                "{} generations in a row made no progress: the nodes that wait are taken in when this one has run for {}",
                state.history.without_progress, format_duration(kProgressAge)));
    }
    if (const RestartDecision decision = decide_change(state, now); !decision.restart) {
        return say(actions, fmt::format("the nodes that wait are not taken in: {}", decision.why));
    }
    const std::size_t nodes = state.nodes.size();
    const std::string why = fmt::format("growing from {} to {} nodes", nodes,
                                        nodes + static_cast<std::size_t>(state.waiting_nodes));
    JobState::InPlace recovery = recovery_of(state, why, false, now);
    recovery.is_growth = true;
    if (!decide_to_part(state, policy, {}, recovery, now).in_place)
        return change_world(state, why, policy.preempt_grace, kNever, now, actions);
    say(actions, why + ": all workers go on in place");
    suspend(state, std::move(recovery), Duration::zero(), why, policy, now, actions);
}

JobActions on(JobState& state, const job_event::NodeReady& event, const JobPolicy& policy, TimePoint now) {
    using enum job_event::NodeReady::Stage;
    JobActions actions;
    if (state.phase == JobPhase::Stopping) hear_while_stopping(state, event, policy, now, actions);
    if (!is_under_way(state)) return actions;
    JobState::Node& node = state.nodes[static_cast<std::size_t>(event.node)];
    node.knows = true;
    switch (event.stage) {
        case Started: break;
        case Announced: node.can_recover = true; break;
        case Refused:
            node.can_recover = false;
            if (policy.recover.rehearse > 0 && state.cannot_recover.empty())
                warn(actions, "there are no rehearsals (--rehearse): " + event.why);
            if (state.cannot_recover.empty()) state.cannot_recover = event.why;
            release(state, actions);  // no failure is recovered any more, so nobody has to wait
            break;
        case Joined: node.joined = true; break;
        case Finished: node.finished = true; break;
        case Suspended: node.suspended = true; break;
        case LetGo: note_let_go(state, kLetGoPatience, event.why, now, actions); break;
        case Failing:
            note_let_go(state, policy.failure_grace + kLetGoPatience, event.why, now, actions);
            break;
        case Slow:
            if (state.phase == JobPhase::Running && state.in_place) await_nodes(state, policy, now, actions);
            break;
    }
    if (state.phase == JobPhase::Suspended) {
        if (event.stage == Suspended) state.in_place->steps = std::max(state.in_place->steps, event.steps);
        reform_when_due(state, policy, now, actions);
        return actions;
    }
    const auto all = [&](bool JobState::Node::*has_come) {
        return std::ranges::all_of(state.nodes, has_come);
    };
    if (event.stage == Started && all(&JobState::Node::knows)) state.has_run = true;
    if (event.stage == Joined && state.in_place) note_begin(state, event.steps);
    if (event.stage == Joined && all(&JobState::Node::joined)) {
        if (state.in_place) end_recovery(state, policy, now, actions);
        else state.longest_start = std::max(state.longest_start, now - state.generation_started);
    }
    if (event.stage == Finished && all(&JobState::Node::finished)) release(state, actions);
    return actions;
}

/// Stops a generation that not all nodes have confirmed as over, or that not all ranks have joined, although
/// the agents have killed late ones.
void give_up_recovery(JobState& state, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    JobState::InPlace pending = *state.in_place;
    if (pending.is_rehearsal()) pending.cause = "a rehearsal (--rehearse)";
    fail_recovery(
        state, pending,
        fmt::format("not all {} were ready {} later", state.phase == JobPhase::Suspended ? "nodes" : "ranks",
                    format_duration(now - pending.since)),
        After::Restart, policy, now, actions);
}

JobActions on(JobState& state, const job_event::WorldFormed& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase == JobPhase::Suspended) reform(state, event, policy, now, actions);
    if (state.phase != JobPhase::Joining) return actions;
    state.nodes.clear();
    for (const int workers : event.workers) state.nodes.push_back({.workers = workers});
    start_generation(state, now, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::NodesMissing&, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase == JobPhase::Suspended)
        fail_recovery(state, JobState::InPlace(*state.in_place), "too few nodes are left", After::Rejoin,
                      policy, now, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::JoinFailed& event, const JobPolicy&, TimePoint now) {
    if (state.phase != JobPhase::Joining) return {};
    JobActions actions;
    decide_on_failure(state, event.why, now);
    finish(state, actions);
    return actions;
}

/// Handles the end of a rank that has ended with 0 before it had joined the others, who wait for it. The
/// first such end says it all; in programs without libddp, every end is one.
void miss(JobState& state, int rank, const JobPolicy& policy, TimePoint now, JobActions& actions) {
    if (state.in_place)
        return fail_recovery(state, JobState::InPlace(*state.in_place),
                             fmt::format("rank {} ended with 0 before it had joined", rank), After::Restart,
                             policy, now, actions);
    if (state.nodes.size() > 1 && state.unfinished == state.ranks() - 1)
        actions.emplace_back(job_action::EndJoining{rank});
}

JobActions on(JobState& state, job_event::WorkerEnded event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    event.facts.ran_before = state.has_run;
    if (event.steps > state.history.furthest_step) {
        state.history.furthest_step = event.steps;
        if (state.phase == JobPhase::Stopping) state.history.without_progress = 0;
    }
    if (event.is_late && (!event.failed || !state.in_place)) return actions;
    JobState::Node& node = state.nodes[static_cast<std::size_t>(event.node)];
    if (!event.is_late) node.knows = true;
    // The workers of a node that leaves may have had the signal from the scheduler, too.
    const bool is_recovering = state.phase == JobPhase::Running && state.in_place;
    const bool is_failure = is_recovering && event.failed && !event.by_us;
    if (node.leaving && is_under_way(state) && !state.is_released && !is_failure) {
        if (state.phase == JobPhase::Running) part(state, policy, now, actions);
        return actions;
    }
    if (!event.failed) {
        ++node.succeeded;
        --state.unfinished;
        if (event.never_joined && is_under_way(state)) {
            miss(state, event.rank, policy, now, actions);
            if (!is_under_way(state)) return actions;
        }
        if (can_recover_somewhere(state)) release(state, actions);
        if (state.phase == JobPhase::Running && state.unfinished == 0) state.phase = JobPhase::Succeeded;
        // It has saved before it knew that the others meet again.
        const bool is_missed = state.phase == JobPhase::Stopping && state.stop && state.stop->meets;
        if (is_missed) end_collectives(state, event.rank, actions);
        return actions;
    }
    if (state.phase == JobPhase::Stopping) lose_while_stopping(state, event, policy, now, actions);
    if (!is_under_way(state) || event.by_us) return actions;
    const bool others_go_on = policy.recover.mode == RecoverSpec::Mode::Program && !event.facts.never_ran;
    if (others_go_on) outlive(state, event, actions);
    else lose_rank(state, event, policy, now, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::NodeEnded& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase == JobPhase::Joining || state.phase == JobPhase::Finished ||
        state.phase == JobPhase::BackingOff) {
        return actions;
    }
    JobState::Node& node = state.nodes[static_cast<std::size_t>(event.node)];
    note_gone(state, node);
    node.ended = true;
    if (node.leaving) actions.emplace_back(job_action::Dismiss{*node.leaving});
    if (state.phase == JobPhase::Stopping && state.stop && state.stop->meets)
        end_collectives(state, first_rank_of(state, event.node), actions);
    if (state.phase == JobPhase::Suspended) reform_when_due(state, policy, now, actions);
    else if (state.phase != JobPhase::Running) continue_after_end(state, now, actions);
    else if (state.outlived && state.nodes_there == 0) end_outlived(state, policy, now, actions);
    return actions;
}

/// Delays the generation after the stopping one while more nodes may be noticed as lost.
void wait_for_others(JobState& state, const job_event::NodeLost& event, TimePoint now, JobActions& actions) {
    if (event.others_may_follow <= Duration::zero()) return;
    const TimePoint until = deadline_after(now, event.others_may_follow);
    set_timer(state, state.timer == kNever ? until : std::max(state.timer, until), actions);
}

/// Handles the loss of a node without which the others are enough. Their collectives end at once, and they
/// get the short grace: they have nothing to save.
void lose(JobState& state, const job_event::NodeLost& event, const std::string& not_in_place,
          const JobPolicy& policy, TimePoint now, JobActions& actions) {
    if (stops_instead(state, event.why, now, actions)) return;
    decide_on_failure(state, event.why, now);
    note_progress(state, false, now);
    const RestartDecision decision = decide_change(state, now);
    state.out_of_time = decision.out_of_time;
    state.after = decision.restart ? After::Rejoin : After::Finish;
    state.is_free = decision.restart;
    const bool waits = decision.restart && event.others_may_follow > Duration::zero();
    set_timer(state, waits ? deadline_after(now, event.others_may_follow) : kNever, actions);
    warn(actions,
         fmt::format("{}; {}{}", event.why, refused(not_in_place),
                     decision.restart ? "going on without it, which uses up no restart" : decision.why));
    const int first_lost = first_rank_of(state, event.node);
    stop_generation(state, SIGTERM, policy.failure_grace, first_lost, event.why, now, actions);
}

/// Lets the others go on in place, if they can. Returns why not.
InPlaceDecision lose_in_place(JobState& state, const job_event::NodeLost& event, const JobPolicy& policy,
                              TimePoint now, JobActions& actions) {
    JobState::InPlace recovery = recovery_of(state, event.why, false, now);
    const auto node = static_cast<std::size_t>(event.node);
    const std::vector<int> ranks = ranks_of(state, node);
    if (!state.nodes[node].leaving) add_failed(recovery, ranks);
    const InPlaceDecision decision = decide_to_part(state, policy, {}, recovery, now);
    if (!decision.in_place) return decision;
    warn(actions, fmt::format("{}: {} {} lost, {} wait to go on in place", event.why, named(ranks),
                              ranks.size() == 1 ? "is" : "are", alive_elsewhere(state)));
    if (state.phase == JobPhase::Running) {
        suspend(state, std::move(recovery), event.others_may_follow, event.why, policy, now, actions);
        return decision;
    }
    if (event.others_may_follow > Duration::zero())
        recovery.losses_until = std::max(recovery.losses_until, deadline_after(now, event.others_may_follow));
    state.in_place = std::move(recovery);
    set_running_timer(state, actions);
    reform_when_due(state, policy, now, actions);
    return decision;
}

/// Makes a free change of the world a restart, because another loss has left too few nodes. The workers have
/// ended or are stopping already.
void charge(JobState& state, const job_event::NodeLost& event, const JobPolicy& policy, TimePoint now,
            JobActions& actions) {
    decide_on_failure(state, event.why, now);
    const RestartDecision decision =
        decide_restart(policy.restart, state.history, {}, now, policy.random, state.time_up);
    state.out_of_time = decision.out_of_time;
    state.after = decision.restart ? After::Rejoin : After::Finish;
    state.is_free = false;
    warn(actions, fmt::format("{}; too few nodes are left: {}", event.why, decision.why));
    if (!decision.restart) return;
    ++state.restarts_used;
    state.history.restarts.push_back(now);
    if (decision.at > now)
        set_timer(state, state.timer == kNever ? decision.at : std::max(decision.at, state.timer), actions);
}

JobActions on(JobState& state, const job_event::NodeLost& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase == JobPhase::Finished) return actions;
    JobState::Node& node = state.nodes[static_cast<std::size_t>(event.node)];
    if (node.lost) return actions;
    const bool was_done = has_finished(node), had_workers = !node.ended;
    const bool is_first = std::none_of(state.nodes.begin(), state.nodes.end(),
                                       [](const JobState::Node& one) { return one.lost; });
    note_gone(state, node);
    node.lost = true;
    if (is_under_way(state) && !was_done) {
        if (event.others_go_on) {
            const InPlaceDecision decision = lose_in_place(state, event, policy, now, actions);
            if (!decision.in_place) lose(state, event, decision.why, policy, now, actions);
            return actions;
        }
        decide_on_failure(state, event.why, now);
        const int first_lost = first_rank_of(state, event.node);
        fail(state, FailureFacts{}, first_lost, event.why, After::Rejoin, policy, now, actions);
        return actions;
    }
    if (state.phase != JobPhase::Joining && state.after == After::Rejoin && state.is_free &&
        !event.others_go_on)
        charge(state, event, policy, now, actions);
    else warn(actions, event.why + (had_workers ? "; its workers are not waited for" : ""));
    // The others would wait for its ranks in a collective until their grace is over.
    if (state.phase == JobPhase::Stopping && had_workers)
        actions.emplace_back(job_action::EndCollectives{first_rank_of(state, event.node)});
    if (state.phase == JobPhase::Joining) return actions;
    if (state.after == After::Restart) state.after = After::Rejoin;
    if (state.after == After::Rejoin && is_first) wait_for_others(state, event, now, actions);
    if (state.phase != JobPhase::BackingOff) continue_after_end(state, now, actions);
    else if (state.after == After::Finish) finish(state, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::NodesWaiting& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    state.waiting_nodes = event.nodes;
    if (event.nodes == 0) return actions;
    const bool is_over = state.phase == JobPhase::Stopping || state.phase == JobPhase::BackingOff;
    if (is_over && state.after == After::Restart) state.after = After::Rejoin;
    const bool grows =
        state.phase == JobPhase::Running && policy.grow == Grow::Now && !state.anybody_succeeded();
    if (grows && !state.in_place && state.grow_at == kNever) {
        state.grow_at = deadline_after(now, kOneChange);
        set_running_timer(state, actions);
    }
    return actions;
}

JobActions on(JobState& state, const job_event::Outnumbered& event, const JobPolicy&, TimePoint now) {
    JobActions actions;
    if (state.phase == JobPhase::Finished || state.phase == JobPhase::Succeeded) return actions;
    decide_on_failure(state, event.why, now);
    state.after = After::Finish;
    warn(actions, event.why);
    if (nobody_runs(state)) {
        finish(state, actions);
        return actions;
    }
    stop_generation(state, SIGTERM, Duration::zero(), -1, event.why, now, actions);
    if (state.phase != JobPhase::Stopping) return actions;
    // A generation that was already stopping may have a long grace; the others' next one does not wait for
    // it.
    state.killing = true;
    actions.emplace_back(job_action::KillGeneration{});
    return actions;
}

JobActions kill_now(JobState& state, JobActions actions) {
    if (!state.killing) {
        state.killing = true;
        say(actions, fmt::format("killing {} now", alive_elsewhere(state)));
        actions.emplace_back(job_action::KillGeneration{});
    }
    return actions;
}

JobActions finish_early(JobState& state, const std::string& why, JobActions actions) {
    say(actions, fmt::format("{}: stopping before any worker runs", why));
    finish(state, actions);
    return actions;
}

/// Kills the node's workers, which have had their notice already.
JobActions kill_node(JobState& state, int node, JobActions actions) {
    if (!state.nodes[static_cast<std::size_t>(node)].ended) actions.emplace_back(job_action::KillNode{node});
    return actions;
}

/// Handles SIGTERM at a node that may leave; see JobState.
JobActions leave(JobState& state, const job_event::StopAsked& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    const std::string why =
        fmt::format("{} at the ddprun of {}, which leaves", signal_name(event.signal), event.host);
    actions.emplace_back(job_action::NodeLeaves{event.source});
    const bool has_world = event.node >= 0 && state.phase != JobPhase::Joining;
    JobState::Node* const node = has_world ? &state.nodes[static_cast<std::size_t>(event.node)] : nullptr;
    if (node != nullptr) node->leaving = event.source;
    if (node == nullptr || node->ended) actions.emplace_back(job_action::Dismiss{event.source});
    const TimePoint at = deadline_after(now, kOneChange);
    if (node != nullptr && is_under_way(state) && !has_finished(*node)) {
        const JobState::InPlace recovery = recovery_of(state, why, false, now);
        const InPlaceDecision decision = state.phase == JobPhase::Running
                                             ? decide_in_place(state, policy, {}, recovery, now)
                                             : decide_to_part(state, policy, {}, recovery, now);
        if (decision.in_place) {
            say(actions, why + ": the others go on in place");
            // All workers go on for now: if every node has got the signal, all are to stop, and may save.
            if (state.phase == JobPhase::Running) {
                state.leave = {at, why};
                set_running_timer(state, actions);
            } else if (!node->ended) {
                actions.emplace_back(job_action::StopNode{event.node, policy.shutdown_timeout, why});
                reform_when_due(state, policy, now, actions);
            }
            return actions;
        }
        change_world(state, why, policy.shutdown_timeout, at, now, actions);
        return actions;
    }
    say(actions, why);
    if (node == nullptr || is_under_way(state)) return actions;
    if (state.after == After::Restart) state.after = After::Rejoin;
    if (state.after == After::Rejoin)
        set_timer(state, state.timer == kNever ? at : std::max(at, state.timer), actions);
    return actions;
}

bool is_leaving(const JobState& state, int node) {
    return node >= 0 && state.nodes[static_cast<std::size_t>(node)].leaving.has_value();
}

enum class Asked : std::uint8_t { First, Echo, Again };

/// Tells whether this source's request is its first, another one, or the first come by another way (Echo).
Asked note_stop_source(JobState& state, const job_event::StopAsked& event, const JobPolicy& policy,
                       TimePoint now) {
    const auto known =
        std::find_if(state.stop_sources.begin(), state.stop_sources.end(),
                     [&](const JobState::StopSource& one) { return one.source == event.source; });
    if (known == state.stop_sources.end()) {
        state.stop_sources.push_back({event.source, now});
        return Asked::First;
    }
    return event.signal == SIGTERM && now - known->since < policy.one_stop ? Asked::Echo : Asked::Again;
}

void stop_when_possible(JobState& state, const JobState::Stop& stop, const JobPolicy& policy, TimePoint now,
                        JobActions& actions) {
    if (state.phase != JobPhase::Suspended) return stop_workers(state, stop, now, actions);
    if (!state.held_stop) state.held_stop = stop;
    state.in_place->losses_until = {};
    set_running_timer(state, actions);
    reform_when_due(state, policy, now, actions);
}

JobActions on(JobState& state, const job_event::StopAsked& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    // Too late to stop when all workers have succeeded.
    if (state.phase == JobPhase::Finished || state.phase == JobPhase::Succeeded) return actions;
    const Asked asked = note_stop_source(state, event, policy, now);
    if (asked == Asked::Again && is_leaving(state, event.node) && !state.stopped_by)
        return kill_node(state, event.node, std::move(actions));
    if (asked == Asked::Again && state.phase == JobPhase::Suspended) {
        state.after = After::Finish;
        stop_generation(state, event.signal, Duration::zero(), -1, signal_name(event.signal), now, actions);
    }
    if (asked == Asked::Again) return kill_now(state, std::move(actions));
    if (asked == Asked::Echo || state.stopped_by)
        return actions;  // the same stop by another way or at another node
    if (event.others_go_on && !state.preempted) return leave(state, event, policy, now);
    // A request to leave is not yet a request to stop.
    state.stop_sources = {{event.source, now}};
    state.stopped_by = event.signal;
    state.after = After::Finish;
    set_timer(state, kNever, actions);
    const std::string why =
        event.host.empty() ? signal_name(event.signal)
                           : fmt::format("{} at the ddprun of {}", signal_name(event.signal), event.host);
    if (nobody_runs(state)) return finish_early(state, why, std::move(actions));
    if (state.phase == JobPhase::Stopping) {  // a failure's restart becomes the end; its grace runs on
        say(actions, fmt::format("{}: no restart; the generation is already stopping", why));
        return actions;
    }
    say(actions, fmt::format("{}: stopping {}, SIGKILL in {} (again: kill now)", why, alive_elsewhere(state),
                             format_duration(policy.shutdown_timeout)));
    JobState::Stop stop{event.signal, policy.shutdown_timeout, why, now};
    // Workers that listen stop by agreement. Ctrl-C reaches them at once.
    if (event.signal != SIGINT) stop.may_save = policy.shutdown_timeout;
    stop_when_possible(state, stop, policy, now, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::PreemptAsked& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    // Too late to stop when all workers have succeeded.
    if (state.phase == JobPhase::Finished || state.phase == JobPhase::Succeeded || state.preempted)
        return actions;
    state.preempted = true;
    state.after = After::Finish;
    set_timer(state, kNever, actions);
    if (nobody_runs(state)) return finish_early(state, event.why, std::move(actions));
    if (!is_under_way(state)) return actions;
    const Duration span = std::min(policy.preempt_grace, event.left.value_or(policy.preempt_grace));
    say(actions,
        fmt::format("{}: {} may save for {}", event.why, alive_elsewhere(state), format_duration(span)));
    stop_when_possible(state, {event.signal, policy.preempt_grace, event.why, now, span}, policy, now,
                       actions);
    return actions;
}

JobActions on(JobState& state, const job_event::HangFound& event, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase != JobPhase::Running) return actions;
    InPlaceDecision decision = decide_on_hang(state, policy, now);
    if (decision.in_place && event.culprit >= 0) {  // its end is recovered as any other
        state.hang_ended = state.generation;
        actions.emplace_back(job_action::KillRank{event.culprit, event.what});
        return actions;
    }
    if (decision.in_place) decision.why = "it does not tell which rank is to start again";
    if (!event.was_asked) {
        say(actions, fmt::format("the hang ends nothing without --hang-timeout: {}", decision.why));
        return actions;
    }
    decide_on_failure(state, event.what, now);
    state.hung = true;
    fail(state, FailureFacts{}, event.culprit, event.what, After::Restart, policy, now, actions,
         decision.why);
    return actions;
}

JobActions on(JobState& state, const job_event::WalltimeKnown& event, const JobPolicy&, TimePoint) {
    state.time_up = event.time_up;
    return {};
}

JobActions on(JobState& state, const job_event::RehearsalDue&, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (state.phase != JobPhase::Running || state.in_place || state.leave.at != kNever) return actions;
    const JobState::InPlace rehearsal{.since = now, .ranks = state.ranks()};
    if (!decide_in_place(state, policy, {}, rehearsal, now).in_place) return actions;
    state.in_place = rehearsal;
    begin_in_place(state, -1, policy, now, actions);
    return actions;
}

JobActions on(JobState& state, const job_event::TimerFired&, const JobPolicy& policy, TimePoint now) {
    JobActions actions;
    if (now < state.timer) return actions;
    state.timer = kNever;
    if (state.phase == JobPhase::BackingOff) start_over(state, now, actions);
    else if (!is_under_way(state)) return actions;
    else if (state.leave.at <= now) part(state, policy, now, actions);
    else if (state.let_go.at <= now) form_again(state, policy, now, actions);
    else if (state.in_place && state.in_place->give_up <= now) give_up_recovery(state, policy, now, actions);
    else if (state.phase == JobPhase::Suspended) {
        state.in_place->losses_until = {};
        set_running_timer(state, actions);
        reform_when_due(state, policy, now, actions);
    } else if (state.grow_at <= now) grow_when_due(state, policy, now, actions);
    else set_running_timer(state, actions);
    return actions;
}

}  // namespace

bool JobState::anybody_succeeded() const {
    return std::any_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.succeeded > 0; });
}

int JobState::ranks() const {
    int ranks = 0;
    for (const Node& node : nodes) ranks += node.workers;
    return ranks;
}

bool stopped_early(const FailureFacts& failure) {
    return !failure.never_ran && !failure.signaled && failure.status == static_cast<int>(ExitCode::TryAgain);
}

std::string permanent_failure(const FailureFacts& failure) {
    if (failure.never_ran && !failure.ran_before)
        return "the program could not be started: a restart cannot help";
    if (failure.signaled) return {};
    switch (failure.status) {
        case EX_USAGE: return "exit code 64 means wrong usage: a restart cannot help";
        case EX_DATAERR: return "exit code 65 means wrong data: a restart cannot help";
        case EX_NOINPUT: return "exit code 66 means a missing input: a restart cannot help";
        case EX_CONFIG: return "exit code 78 means a wrong configuration: a restart cannot help";
        case static_cast<int>(ExitCode::DoNotRequeue): return "exit code 93 asks for no restart";
        case static_cast<int>(ExitCode::NotExecutable):
            return "exit code 126 means not executable: a restart cannot help";
        case static_cast<int>(ExitCode::NotFound):
            return "exit code 127 means not found: a restart cannot help";
        default: return {};
    }
}

RestartDecision decide_restart(const RestartSpec& spec, const RestartHistory& history,
                               const FailureFacts& failure, TimePoint now, double random, TimePoint time_up) {
    if (const std::string why = permanent_failure(failure); !why.empty()) return {false, now, why};
    if (spec.max_restarts == 0) return {false, now, "no restarts were asked for (--max-restarts)"};
    const int used = spent(spec, history, now);
    if (used >= spec.max_restarts) return {false, now, used_up(spec)};
    if (history.without_progress >= kStuckGenerations) {
        return {false, now,
                fmt::format("{} generations in a row made no progress", history.without_progress)};
    }
    const Duration wait = backoff(spec, static_cast<int>(history.restarts.size()), random);
    const TimePoint at = deadline_after(now, wait);
    if (time_up != kNever && time_up - at < kProgressAge) {
        const Duration left =
            std::max(Duration::zero(), Duration(std::chrono::round<std::chrono::seconds>(time_up - now)));
        return {false, now,
                fmt::format("no restart: it would get nowhere in the {} that the walltime leaves",
                            format_duration(left)),
                true};
    }
    std::string why = fmt::format("restart {} of {}{}", used + 1, spec.max_restarts, within(spec));
    if (wait > Duration::zero()) why += " in " + format_duration(wait);
    return {true, at, std::move(why)};
}

std::vector<JobAction> step(JobState& state, const JobEvent& event, const JobPolicy& policy, TimePoint now) {
    return std::visit([&](const auto& e) { return on(state, e, policy, now); }, event);
}

}  // namespace ddprun
