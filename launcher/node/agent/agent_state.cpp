#include "launcher/node/agent/agent_state.h"

#include <signal.h>

#include <algorithm>

namespace ddprun {
namespace {

using AgentPhase = AgentState::Phase;
using AgentActions = std::vector<AgentAction>;

void set_deadline(AgentState& state, TimePoint when, AgentActions& actions) {
    if (state.deadline == when) return;
    state.deadline = when;
    actions.emplace_back(agent_action::SetDeadline{when});
}

void kill_strays(AgentState& state, TimePoint now, AgentActions& actions) {
    state.kills_strays = true;
    set_deadline(state, deadline_after(now, kKillPatience), actions);
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
        state.alive() > 0)
        return;
    begin_sweep(state, now, actions);
}

/// Applies an event to every worker that runs, in rank order.
void tell_all(AgentState& state, WorkerEvent event, int signal, AgentActions& actions) {
    for (AgentState::Worker& worker : state.workers) {
        if (worker.pid == 0) continue;
        const WorkerStep next = step(worker.state, event);
        worker.state = next.next;
        if (next.action == WorkerAction::None) continue;
        worker.asked_to_stop = true;
        actions.emplace_back(
            agent_action::SignalWorker{worker.pid, signal, signal == SIGKILL && !state.without_grace});
    }
}

AgentActions on(AgentState& state, const agent_event::StartRequested& event, TimePoint) {
    state = AgentState{};
    state.generation = event.generation;
    state.workers.resize(static_cast<std::size_t>(event.workers));
    state.phase = event.await_gpus ? AgentPhase::AwaitingGpus : AgentPhase::Starting;
    if (event.await_gpus) return {agent_action::AwaitGpus{}};
    return {agent_action::SpawnNext{0}};
}

AgentActions on(AgentState& state, const agent_event::GpusFree&, TimePoint) {
    if (state.phase != AgentPhase::AwaitingGpus) return {};  // stopped meanwhile
    state.phase = AgentPhase::Starting;
    return {agent_action::SpawnNext{0}};
}

AgentActions on(AgentState& state, const agent_event::Spawned& event, TimePoint now) {
    state.workers[static_cast<std::size_t>(event.local_rank)].pid = event.pid;
    state.next_to_spawn = event.local_rank + 1;
    AgentActions actions;
    if (state.phase != AgentPhase::Starting)
        return actions;  // stopped meanwhile; cannot happen between slices
    if (state.next_to_spawn < static_cast<int>(state.workers.size())) {
        actions.emplace_back(agent_action::SpawnNext{state.next_to_spawn});
        return actions;
    }
    state.phase = AgentPhase::Running;
    actions.emplace_back(agent_action::ReportStarted{});
    sweep_if_all_ended(state, now, actions);
    return actions;
}

AgentActions on(AgentState& state, const agent_event::SpawnFailed& event, TimePoint now) {
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(event.local_rank)];
    worker.state = WorkerState::Ended;
    state.phase = AgentPhase::Running;
    AgentActions actions{agent_action::ReportExit{event.local_rank, {}, false, event.what}};
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
    if (state.phase != AgentPhase::Starting && state.phase != AgentPhase::Running) return actions;
    state.phase = AgentPhase::Stopping;
    state.stop_signal = event.signal;
    tell_all(state, WorkerEvent::StopRequested, event.signal, actions);
    // A stopped (SIGSTOP, SIGTSTP) worker would sleep through the grace.
    const std::size_t signalled = actions.size();
    for (std::size_t i = 0; i < signalled; ++i) {
        const pid_t pid = std::get<agent_action::SignalWorker>(actions[i]).pid;
        actions.emplace_back(agent_action::SignalWorker{pid, SIGCONT});
    }
    set_deadline(state, deadline_after(now, event.grace), actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

AgentActions kill_all(AgentState& state, TimePoint now) {
    AgentActions actions;
    state.phase = AgentPhase::Killing;
    tell_all(state, WorkerEvent::KillRequested, SIGKILL, actions);
    set_deadline(state, deadline_after(now, kKillPatience), actions);
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
        if (worker.pid != 0 && worker.state != WorkerState::Ended) unkillable.push_back(worker.pid);
    }
    set_deadline(state, kNever, actions);
    state.phase = AgentPhase::Idle;
    actions.emplace_back(agent_action::ReportEnded{std::move(unkillable)});
    return actions;
}

AgentActions on(AgentState& state, const agent_event::DeadlinePassed&, TimePoint now) {
    if (now < state.deadline) return {};
    switch (state.phase) {
        case AgentPhase::Stopping: return kill_all(state, now);
        case AgentPhase::Killing: return give_up(state, {});
        case AgentPhase::Sweeping: break;
        case AgentPhase::Idle:
        case AgentPhase::AwaitingGpus:
        case AgentPhase::Starting:
        case AgentPhase::Running: return {};
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

int AgentState::alive() const {
    return static_cast<int>(std::count_if(workers.begin(), workers.end(), [](const Worker& worker) {
        return worker.pid != 0 && worker.state != WorkerState::Ended;
    }));
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
