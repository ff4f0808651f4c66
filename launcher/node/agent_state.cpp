#include "launcher/node/agent_state.h"

#include <signal.h>

#include <algorithm>
#include <utility>

#include "env/kept.h"
#include "launcher/spec/exit_codes.h"

namespace ddprun {
namespace {

using AgentPhase = AgentState::Phase;
using AgentStage = AgentState::Stage;
using AgentActions = std::vector<AgentAction>;

void set_deadline(AgentState& state, TimePoint when, AgentActions& actions) {
    if (state.deadline == when) return;
    state.deadline = when;
    actions.emplace_back(agent_action::SetDeadline{when});
}

/// Begins to wait until workers have left a generation, or have joined one.
void begin_wait(AgentState& state, Duration longest, TimePoint now, AgentActions& actions) {
    state.waits_since = now;
    state.longest_wait = longest;
    set_deadline(state, deadline_after(now, std::min(longest, state.recover_within)), actions);
}

void kill_strays(AgentState& state, TimePoint now, AgentActions& actions) {
    state.kills_strays = true;
    set_deadline(state, deadline_after(now, kKillTimeout), actions);
    actions.emplace_back(agent_action::Sweep{SIGKILL});
}

void begin_sweep(AgentState& state, TimePoint now, AgentActions& actions) {
    state.phase = AgentPhase::Sweeping;
    if (state.without_grace) return kill_strays(state, now, actions);
    set_deadline(state, deadline_after(now, kStrayGrace), actions);
    actions.emplace_back(agent_action::Sweep{SIGTERM});
}

/// Searches for strays once no worker is left and none is to be started.
void sweep_if_all_ended(AgentState& state, TimePoint now, AgentActions& actions) {
    const bool spawning = state.phase == AgentPhase::Starting;
    if (state.phase == AgentPhase::Idle || state.phase == AgentPhase::Sweeping || spawning ||
        state.awaits_head || state.alive() > 0)
        return;
    begin_sweep(state, now, actions);
}

/// Applies an event to every worker that runs, in rank order. A worker that replaces another gets the stop
/// signal when it has joined: before, it could not save, and its peers wait for it.
void tell_all(AgentState& state, WorkerEvent event, int signal, AgentActions& actions) {
    for (AgentState::Worker& worker : state.workers) {
        if (worker.pid == 0) continue;
        const WorkerStep next = step(worker.state, event);
        worker.state = next.next;
        if (next.action == WorkerAction::None) continue;
        worker.asked_to_stop = true;
        worker.stop_is_due = next.action == WorkerAction::SendStop && worker.is_new;
        if (worker.stop_is_due) continue;
        actions.emplace_back(
            agent_action::SignalWorker{worker.pid, signal, signal == SIGKILL && !state.without_grace});
    }
}

AgentActions on(AgentState& state, const agent_event::StartRequested& event, TimePoint now) {
    state = AgentState{};
    state.generation = event.generation;
    state.workers.resize(static_cast<std::size_t>(event.workers));
    state.recover_within = event.recover_within;
    state.start_limit = event.start_limit;
    state.phase = event.await_gpus ? AgentPhase::AwaitingGpus : AgentPhase::Starting;
    AgentActions actions;
    if (event.in_place && event.recover_within > Duration::zero()) {
        state.reported = AgentStage::Announced;
        state.is_recovering = true;
        for (AgentState::Worker& worker : state.workers) worker.is_new = true;
        begin_wait(state, Duration::max(), now, actions);
    }
    if (event.await_gpus) actions.emplace_back(agent_action::AwaitGpus{});
    else actions.emplace_back(agent_action::SpawnNext{0});
    return actions;
}

AgentActions on(AgentState& state, const agent_event::StopRequested& event, TimePoint now);

/// Stops workers that have been started, if they are to stop.
void stop_if_due(AgentState& state, TimePoint now, AgentActions& actions) {
    const auto due = std::exchange(state.due_stop, std::nullopt);
    if (!due) return;
    const Duration grace = std::max(Duration::zero(), Duration(due->deadline - now));
    for (AgentAction& action : on(state, agent_event::StopRequested{due->signal, grace, due->is_last}, now))
        actions.push_back(std::move(action));
}

/// Spawns the first worker at or after `first` that does not run, or reports that all have started.
AgentActions spawn_next(AgentState& state, int first, TimePoint now) {
    for (int i = first; i < static_cast<int>(state.workers.size()); ++i) {
        if (state.workers[static_cast<std::size_t>(i)].pid == 0) return {agent_action::SpawnNext{i}};
    }
    state.phase = AgentPhase::Running;
    AgentActions actions{agent_action::ReportStarted{}};
    stop_if_due(state, now, actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::SuspendRequested& event, TimePoint now) {
    if (!state.is_under_way() && state.phase != AgentPhase::AwaitingGpus) return {};
    state.phase = AgentPhase::Suspended;
    state.is_recovering = false;
    state.awaits_head = true;
    AgentActions actions{agent_action::ReportSuspended{}};
    begin_wait(state, event.within, now, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::RecoverRequested& event, TimePoint now) {
    if (!state.is_under_way() && state.phase != AgentPhase::Stopping) return {};
    state.generation = event.generation;
    state.start_limit = event.start_limit;
    state.phase = AgentPhase::Starting;
    state.reported = AgentStage::Announced;
    state.is_recovering = true;
    state.awaits_head = state.is_released = state.told_let_go = state.is_last = false;
    state.due_stop.reset();
    for (AgentState::Worker& worker : state.workers) {
        if (worker.state == WorkerState::Ended) worker = {.is_new = true};
        worker.stage = std::min(worker.stage, AgentStage::Announced);
        worker.has_let_go = worker.has_come = false;
        worker.moves = 0;
    }
    AgentActions actions;
    begin_wait(state, Duration::max(), now, actions);
    for (AgentAction& action : spawn_next(state, 0, now)) actions.push_back(std::move(action));
    return actions;
}

/// Sends the stop signals that waited for a worker to join.
void send_due_stops(AgentState& state, AgentActions& actions) {
    for (AgentState::Worker& worker : state.workers) {
        if (std::exchange(worker.stop_is_due, false) && worker.state != WorkerState::Ended)
            actions.emplace_back(agent_action::SignalWorker{worker.pid, state.stop_signal});
    }
}

AgentActions on(AgentState& state, const agent_event::StageReached& event, TimePoint) {
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(event.local_rank)];
    const bool is_of_now = event.stage == AgentStage::Announced || event.generation == state.generation;
    if (state.recover_within == Duration::zero() || !is_of_now) return {};
    worker.stage = std::max(worker.stage, event.stage);
    AgentActions actions;
    if (worker.stage >= AgentStage::Joined && std::exchange(worker.is_new, false) && worker.stop_is_due) {
        worker.stop_is_due = false;
        actions.emplace_back(agent_action::SignalWorker{worker.pid, state.stop_signal});
    }
    const AgentStage slowest =
        std::min_element(state.workers.begin(), state.workers.end(), [](const auto& a, const auto& b) {
            return a.stage < b.stage;
        })->stage;
    const bool has_recovered = slowest >= AgentStage::Joined && std::exchange(state.is_recovering, false);
    // In a stop it has saved, and so have the others.
    if (event.stage == AgentStage::Finished && (state.is_released || !state.is_under_way()))
        actions.emplace_back(agent_action::TellRelease{event.local_rank});
    const bool is_stopping = state.phase == AgentPhase::Stopping;
    if ((!state.is_under_way() && !is_stopping) || state.phase == AgentPhase::Suspended) return actions;
    if (has_recovered && !is_stopping) set_deadline(state, kNever, actions);
    while (state.reported < slowest) {
        state.reported = static_cast<AgentStage>(static_cast<int>(state.reported) + 1);
        actions.emplace_back(agent_action::ReportStage{state.reported});
    }
    return actions;
}

AgentActions on(AgentState& state, const agent_event::Came& event, TimePoint) {
    if (event.generation == state.generation)
        state.workers[static_cast<std::size_t>(event.local_rank)].has_come = true;
    return {};
}

void release_finished(const AgentState& state, AgentActions& actions) {
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        if (state.workers[i].stage == AgentStage::Finished)
            actions.emplace_back(agent_action::TellRelease{static_cast<int>(i)});
    }
}

AgentActions on(AgentState& state, const agent_event::Released&, TimePoint) {
    state.is_released = true;
    AgentActions actions;
    release_finished(state, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::Refused& event, TimePoint) {
    if (state.recover_within == Duration::zero() || std::exchange(state.refuses, true)) return {};
    return {agent_action::ReportRefusal{event.local_rank, event.why}};
}

AgentActions on(AgentState& state, const agent_event::ErrorReported&, TimePoint) {
    state.told_let_go = true;
    return {};
}

/// True while the head may begin a generation in place for workers that stop, so that they save.
bool may_meet_again(const AgentState& state) {
    return state.phase == AgentPhase::Stopping && !state.is_last && state.can_recover();
}

AgentActions on(AgentState& state, const agent_event::LetGo& event, TimePoint now) {
    if (event.generation != state.generation) return {};  // the next one has begun already
    state.workers[static_cast<std::size_t>(event.local_rank)].has_let_go = true;
    AgentActions actions;
    const bool may_follow = may_meet_again(state);
    if (!state.is_under_way() && !may_follow) {
        actions.emplace_back(agent_action::TellLast{event.local_rank});
        return actions;
    }
    if (state.deadline == kNever && state.can_recover()) begin_wait(state, Duration::max(), now, actions);
    if (state.phase != AgentPhase::Suspended && !std::exchange(state.told_let_go, true))
        actions.emplace_back(agent_action::ReportLetGo{event.local_rank, event.why});
    return actions;
}

bool runs(const AgentState::Worker& worker) { return worker.pid != 0 && worker.state != WorkerState::Ended; }

/// True when a worker may still be in a collective of the generation. One that has finished waits for its
/// release, and tells nothing else.
bool may_be_in_group(const AgentState::Worker& worker) {
    return runs(worker) && !worker.has_let_go && worker.stage != AgentStage::Finished;
}

/// Returns how long the others wait for a worker, since waits_since. A worker that computes hears of the
/// generation's end in its next collective: no earlier than at the end of its unit.
Duration limit_of(const AgentState& state, const AgentState::Worker& worker,
                  const AgentState::Progress& progress) {
    const Duration needed = progress.is_stopped ? Duration::zero()
                            : worker.is_new     ? state.start_limit
                                                : kSlowestUnits * progress.slowest_unit;
    return std::min(state.longest_wait, std::max(state.recover_within, needed));
}

/// Kills the workers for which the others have waited too long; the head decides what follows.
AgentActions kill_late(AgentState& state, const std::vector<AgentState::Progress>& known, TimePoint now) {
    agent_action::KillLate late;
    bool is_slow = false;
    TimePoint next = kNever;
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        AgentState::Worker& worker = state.workers[i];
        const AgentState::Progress progress = i < known.size() ? known[i] : AgentState::Progress{};
        const bool moves = std::exchange(worker.moves, progress.moves) != progress.moves;
        const bool is_missing =
            state.is_recovering ? runs(worker) && worker.stage < AgentStage::Joined : may_be_in_group(worker);
        if (!is_missing) continue;
        const bool has_come =
            state.is_recovering && (worker.has_come || progress.has_mapped) && !progress.is_stopped;
        const TimePoint end = deadline_after(state.waits_since, limit_of(state, worker, progress));
        const bool is_late = !has_come && now >= end;
        if (is_late) late.local_ranks.push_back(static_cast<int>(i));
        is_slow = is_slow || (has_come ? moves : !is_late);
        const TimePoint again = deadline_after(now, state.recover_within);
        next = std::min(next, is_late || has_come ? again : std::min(end, again));
    }
    AgentActions actions;
    set_deadline(state, next, actions);
    if (is_slow && state.is_recovering) actions.emplace_back(agent_action::ReportSlow{});
    if (!late.local_ranks.empty()) actions.emplace_back(std::move(late));
    return actions;
}

AgentActions on(AgentState& state, const agent_event::GpusFree&, TimePoint) {
    if (state.phase != AgentPhase::AwaitingGpus) return {};  // stopped meanwhile
    state.phase = AgentPhase::Starting;
    return {agent_action::SpawnNext{0}};
}

AgentActions on(AgentState& state, const agent_event::Spawned& event, TimePoint now) {
    state.workers[static_cast<std::size_t>(event.local_rank)].pid = event.pid;
    if (state.phase != AgentPhase::Starting) return {};  // stopped meanwhile; cannot happen between slices
    return spawn_next(state, event.local_rank + 1, now);
}

AgentActions on(AgentState& state, const agent_event::SpawnFailed& event, TimePoint now) {
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(event.local_rank)];
    worker.state = WorkerState::Ended;
    state.phase = AgentPhase::Running;
    state.awaits_head = state.can_recover();
    AgentActions actions{agent_action::ReportExit{event.local_rank, {}, false, event.why}};
    stop_if_due(state, now, actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

/// The signal for the children of a worker that has ended. No second SIGTERM: a handler may take it for
/// impatience.
int farewell_signal(const AgentState& state, const AgentState::Worker& worker) {
    if (state.without_grace) return SIGKILL;
    return worker.asked_to_stop && state.stop_signal == SIGTERM ? 0 : SIGTERM;
}

AgentActions on(AgentState& state, const agent_event::Exited& event, TimePoint now) {
    const int local_rank = state.local_rank_of(event.exit.pid);
    if (local_rank < 0) {
        AgentActions actions{agent_action::ReapStranger{event.exit.pid}};
        const int signal = state.kills_strays ? SIGKILL : SIGTERM;
        if (state.phase == AgentPhase::Sweeping) actions.emplace_back(agent_action::Sweep{signal});
        return actions;
    }
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(local_rank)];
    const WorkerStep next = step(worker.state, WorkerEvent::Exited);
    worker.state = next.next;
    AgentActions actions;
    if (next.action == WorkerAction::BuryGroup) {
        actions.emplace_back(agent_action::BuryGroup{worker.pid, farewell_signal(state, worker)});
        actions.emplace_back(agent_action::ReportExit{local_rank, event.exit, worker.asked_to_stop, {}});
    }
    const bool failed = event.exit.signaled || event.exit.status != 0;
    const bool has_saved = !event.exit.signaled && event.exit.status == static_cast<int>(ExitCode::TryAgain);
    const bool may_start_again = (state.is_under_way() && state.can_recover()) || may_meet_again(state);
    if (failed && !has_saved && may_start_again) state.awaits_head = true;
    send_due_stops(state, actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

int first_that_let_go(const AgentState& state) {
    const auto found = std::ranges::find_if(state.workers, &AgentState::Worker::has_let_go);
    return found == state.workers.end() ? -1 : static_cast<int>(found - state.workers.begin());
}

void tell_last(const AgentState& state, AgentActions& actions) {
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        if (state.workers[i].has_let_go) actions.emplace_back(agent_action::TellLast{static_cast<int>(i)});
    }
}

AgentActions on(AgentState& state, const agent_event::NoneFollows&, TimePoint now) {
    AgentActions actions;
    state.is_last = true;  // also for a stop that comes later
    if (state.phase != AgentPhase::Stopping) return actions;
    state.awaits_head = false;
    tell_last(state, actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

/// Ends a generation that was stopped before any worker ran.
AgentActions stop_waiting(AgentState& state) {
    state.phase = AgentPhase::Idle;
    return {agent_action::ReportEnded{}};
}

AgentActions on(AgentState& state, const agent_event::StopRequested& event, TimePoint now) {
    if (state.phase == AgentPhase::AwaitingGpus) return stop_waiting(state);
    AgentActions actions;
    if (!state.is_under_way()) return actions;
    if (state.phase == AgentPhase::Starting && state.is_recovering) {
        state.due_stop = {event.signal, deadline_after(now, event.grace), event.is_last};
        return actions;
    }
    if (state.phase == AgentPhase::Suspended) {
        for (AgentState::Worker& worker : state.workers) worker.is_new = false;  // nobody waits for it
    }
    state.phase = AgentPhase::Stopping;
    state.stop_signal = event.signal;
    state.is_last = state.is_last || event.is_last;
    state.awaits_head = state.awaits_head && may_meet_again(state);
    tell_all(state, WorkerEvent::StopRequested, event.signal, actions);
    // A stopped (SIGSTOP, SIGTSTP) worker would sleep through the grace.
    const std::size_t signalled = actions.size();
    for (std::size_t i = 0; i < signalled; ++i) {
        const pid_t pid = std::get<agent_action::SignalWorker>(actions[i]).pid;
        actions.emplace_back(agent_action::SignalWorker{pid, SIGCONT});
    }
    if (!may_meet_again(state)) tell_last(state, actions);
    else if (const int left = first_that_let_go(state); left >= 0)
        actions.emplace_back(agent_action::ReportLetGo{left, "before the stop"});
    release_finished(state, actions);
    set_deadline(state, deadline_after(now, event.grace), actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

AgentActions kill_all(AgentState& state, TimePoint now) {
    AgentActions actions;
    state.phase = AgentPhase::Killing;
    state.awaits_head = false;
    tell_all(state, WorkerEvent::KillRequested, SIGKILL, actions);
    set_deadline(state, deadline_after(now, kKillTimeout), actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::KillRequested&, TimePoint now) {
    if (state.phase == AgentPhase::AwaitingGpus) return stop_waiting(state);
    if (state.phase == AgentPhase::Idle) return {};
    state.without_grace = true;
    AgentActions actions;
    if (state.phase == AgentPhase::Sweeping && !state.kills_strays) kill_strays(state, now, actions);
    if (state.phase == AgentPhase::Sweeping || state.phase == AgentPhase::Killing) return actions;
    return kill_all(state, now);
}

/// Ends the generation with processes left: one in uninterruptible sleep outlives SIGKILL, and the job must
/// not wait for it for ever.
AgentActions give_up(AgentState& state, std::vector<pid_t> unkillable) {
    AgentActions actions;
    for (const AgentState::Worker& worker : state.workers) {
        if (runs(worker)) unkillable.push_back(worker.pid);
    }
    set_deadline(state, kNever, actions);
    state.phase = AgentPhase::Idle;
    actions.emplace_back(agent_action::ReportEnded{std::move(unkillable)});
    return actions;
}

AgentActions on(AgentState& state, const agent_event::DeadlinePassed& event, TimePoint now) {
    if (now < state.deadline) return {};
    switch (state.phase) {
        case AgentPhase::Stopping: return kill_all(state, now);
        case AgentPhase::Killing: return give_up(state, {});
        case AgentPhase::Sweeping: break;
        case AgentPhase::Starting:
        case AgentPhase::Running:
        case AgentPhase::Suspended: return kill_late(state, event.workers, now);
        case AgentPhase::Idle:
        case AgentPhase::AwaitingGpus: return {};
    }
    if (state.kills_strays) return {agent_action::Sweep{SIGKILL}};
    AgentActions actions;
    kill_strays(state, now, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::Swept& event, TimePoint now) {
    if (state.phase != AgentPhase::Sweeping) return {};
    state.asked_strays = event.still_there;
    AgentActions actions;
    if (state.kills_strays && !state.told_of_strays && !event.still_there.empty()) {
        state.told_of_strays = true;
        actions.emplace_back(agent_action::ReportStrays{event.still_there.size()});
    }
    const bool is_over = event.still_there.empty() || (state.kills_strays && now >= state.deadline);
    if (!is_over) return actions;  // the next search follows the end of one of them, or the deadline
    for (AgentAction& action : give_up(state, event.still_there)) actions.push_back(std::move(action));
    return actions;
}

}  // namespace

WorkerStep step(WorkerState state, WorkerEvent event) {
    if (state == WorkerState::Ended) return {state, WorkerAction::None};
    switch (event) {
        case WorkerEvent::Exited: return {WorkerState::Ended, WorkerAction::BuryGroup};
        case WorkerEvent::StopRequested:
            if (state != WorkerState::Running) return {state, WorkerAction::None};
            return {WorkerState::Stopping, WorkerAction::SendStop};
        case WorkerEvent::KillRequested:
            if (state == WorkerState::Killed) return {state, WorkerAction::None};
            return {WorkerState::Killed, WorkerAction::SendKill};
    }
    return {state, WorkerAction::None};
}

bool ForwardedSignals::is_new(int signal, SignalFrom from, TimePoint now) {
    std::erase_if(unanswered_, [&](const Passed& passed) { return now - passed.when > kApart; });
    const auto same = std::find_if(unanswered_.begin(), unanswered_.end(), [&](const Passed& passed) {
        return passed.signal == signal && passed.from != from;
    });
    if (same == unanswered_.end()) {
        unanswered_.push_back({signal, from, now});
        return true;
    }
    unanswered_.erase(same);
    return false;
}

int AgentState::alive() const { return static_cast<int>(std::ranges::count_if(workers, runs)); }

bool AgentState::is_under_way() const {
    return phase == Phase::Starting || phase == Phase::Running || phase == Phase::Suspended;
}

bool AgentState::is_left() const {
    return phase == Phase::Suspended && std::ranges::none_of(workers, may_be_in_group);
}

bool AgentState::is_announcing() const {
    return reported == Stage::Started &&
           std::any_of(workers.begin(), workers.end(),
                       [](const Worker& worker) { return worker.stage != Stage::Started; });
}

int AgentState::local_rank_of(pid_t pid) const {
    const auto found = std::find_if(workers.begin(), workers.end(), [pid](const Worker& worker) {
        return worker.pid == pid && worker.state != WorkerState::Ended;
    });
    return found == workers.end() ? -1 : static_cast<int>(found - workers.begin());
}

std::vector<AgentAction> step(AgentState& state, const AgentEvent& event, TimePoint now) {
    return std::visit([&](const auto& e) { return on(state, e, now); }, event);
}

}  // namespace ddprun
