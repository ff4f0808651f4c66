#include "launcher/agent_state.h"

#include <signal.h>

#include <algorithm>

namespace ddprun {

namespace {

using Phase = AgentState::Phase;
using Actions = std::vector<AgentAction>;

void set_deadline(AgentState& state, TimePoint when, Actions& actions) {
    if (state.deadline == when) return;
    state.deadline = when;
    actions.emplace_back(agent_action::SetDeadline{when});
}

void begin_sweep(AgentState& state, TimePoint now, Actions& actions) {
    state.phase = Phase::Sweeping;
    set_deadline(state, deadline_after(now, kKillPatience), actions);
    actions.emplace_back(agent_action::Sweep{});
}

/// Nobody left, and nobody to be started any more: look for strays.
void sweep_if_all_ended(AgentState& state, TimePoint now, Actions& actions) {
    const bool spawning = state.phase == Phase::Starting;
    if (state.phase == Phase::Idle || state.phase == Phase::Sweeping || spawning || state.alive() > 0) return;
    begin_sweep(state, now, actions);
}

/// Applies an event to every worker that runs, in rank order.
void tell_all(AgentState& state, WorkerEvent event, int signal, Actions& actions) {
    for (AgentState::Worker& worker : state.workers) {
        if (worker.pid == 0) continue;
        const WorkerStep next = step(worker.state, event);
        worker.state = next.next;
        if (next.action == WorkerAction::None) continue;
        worker.asked_to_stop = true;
        actions.emplace_back(agent_action::SignalGroup{worker.pid, signal});
    }
}

Actions on(AgentState& state, const agent_event::StartRequested& event, TimePoint) {
    state = AgentState{};
    state.generation = event.generation;
    state.workers.resize(static_cast<std::size_t>(event.workers));
    state.phase = event.await_gpus ? Phase::AwaitingGpus : Phase::Starting;
    if (event.await_gpus) return {agent_action::AwaitGpus{}};
    return {agent_action::SpawnNext{0}};
}

Actions on(AgentState& state, const agent_event::GpusFree&, TimePoint) {
    if (state.phase != Phase::AwaitingGpus) return {};  // stopped meanwhile
    state.phase = Phase::Starting;
    return {agent_action::SpawnNext{0}};
}

Actions on(AgentState& state, const agent_event::Spawned& event, TimePoint now) {
    state.workers[static_cast<std::size_t>(event.local_rank)].pid = event.pid;
    state.next_to_spawn = event.local_rank + 1;
    Actions actions;
    if (state.phase != Phase::Starting) return actions;  // stopped meanwhile; cannot happen between slices
    if (state.next_to_spawn < static_cast<int>(state.workers.size())) {
        actions.emplace_back(agent_action::SpawnNext{state.next_to_spawn});
        return actions;
    }
    state.phase = Phase::Running;
    actions.emplace_back(agent_action::ReportStarted{});
    sweep_if_all_ended(state, now, actions);
    return actions;
}

Actions on(AgentState& state, const agent_event::SpawnFailed& event, TimePoint now) {
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(event.local_rank)];
    worker.state = WorkerState::Ended;
    state.phase = Phase::Running;
    Actions actions{agent_action::ReportExit{event.local_rank, {}, false, event.what}};
    sweep_if_all_ended(state, now, actions);
    return actions;
}

Actions on(AgentState& state, const agent_event::Exited& event, TimePoint now) {
    const int local_rank = state.local_rank_of(event.exit.pid);
    if (local_rank < 0) {
        Actions actions{agent_action::ReapStranger{event.exit.pid}};
        if (state.phase == Phase::Sweeping) actions.emplace_back(agent_action::Sweep{});
        return actions;
    }
    AgentState::Worker& worker = state.workers[static_cast<std::size_t>(local_rank)];
    const WorkerStep next = step(worker.state, WorkerEvent::Exited);
    worker.state = next.next;
    Actions actions;
    if (next.action == WorkerAction::BuryGroup) {
        actions.emplace_back(agent_action::BuryGroup{worker.pid});
        actions.emplace_back(agent_action::ReportExit{local_rank, event.exit, worker.asked_to_stop, {}});
    }
    sweep_if_all_ended(state, now, actions);
    return actions;
}

/// Stopped before any worker runs.
Actions stop_waiting(AgentState& state) {
    state.phase = Phase::Idle;
    return {agent_action::ReportDrained{}};
}

Actions on(AgentState& state, const agent_event::StopRequested& event, TimePoint now) {
    if (state.phase == Phase::AwaitingGpus) return stop_waiting(state);
    Actions actions;
    if (state.phase != Phase::Starting && state.phase != Phase::Running) return actions;
    state.phase = Phase::Stopping;
    state.stop_signal = event.signal;
    tell_all(state, WorkerEvent::StopRequested, event.signal, actions);
    // A stopped (SIGSTOP, SIGTSTP) worker would sleep through the grace.
    const std::size_t signalled = actions.size();
    for (std::size_t i = 0; i < signalled; ++i) {
        const pid_t pid = std::get<agent_action::SignalGroup>(actions[i]).pid;
        actions.emplace_back(agent_action::SignalGroup{pid, SIGCONT});
    }
    set_deadline(state, deadline_after(now, event.grace), actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

Actions kill_all(AgentState& state, TimePoint now) {
    Actions actions;
    state.phase = Phase::Killing;
    tell_all(state, WorkerEvent::KillRequested, SIGKILL, actions);
    set_deadline(state, deadline_after(now, kKillPatience), actions);
    sweep_if_all_ended(state, now, actions);
    return actions;
}

Actions on(AgentState& state, const agent_event::KillRequested&, TimePoint now) {
    if (state.phase == Phase::AwaitingGpus) return stop_waiting(state);
    if (state.phase == Phase::Idle || state.phase == Phase::Killing || state.phase == Phase::Sweeping) return {};
    return kill_all(state, now);
}

/// A process in uninterruptible sleep outlives SIGKILL; the job must not wait for it for ever.
Actions give_up(AgentState& state, std::vector<pid_t> unkillable) {
    Actions actions;
    for (const AgentState::Worker& worker : state.workers) {
        if (worker.pid != 0 && worker.state != WorkerState::Ended) unkillable.push_back(worker.pid);
    }
    set_deadline(state, kNever, actions);
    state.phase = Phase::Idle;
    actions.emplace_back(agent_action::ReportDrained{std::move(unkillable)});
    return actions;
}

Actions on(AgentState& state, const agent_event::DeadlinePassed&, TimePoint now) {
    if (now < state.deadline) return {};
    switch (state.phase) {
        case Phase::Stopping: return kill_all(state, now);
        case Phase::Killing: return give_up(state, {});
        case Phase::Sweeping: return {agent_action::Sweep{}};
        case Phase::Idle: case Phase::AwaitingGpus: case Phase::Starting: case Phase::Running: return {};
    }
    return {};
}

Actions on(AgentState& state, const agent_event::Swept& event, TimePoint now) {
    if (state.phase != Phase::Sweeping) return {};
    if (event.still_there.empty() || now >= state.deadline) return give_up(state, event.still_there);
    return {};  // the next look comes when one of them has been reaped
}

}  // namespace

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
