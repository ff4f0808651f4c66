#include "launcher/start/start_state.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"

namespace ddprun {
namespace {

using HostState = StartState::Host;
using StarterState = StartState::Starter;

/// Hosts that fail within this time after the first failure are reported with it.
constexpr Duration kMoreFailures = std::chrono::seconds(2);
constexpr std::size_t kWordsLines = 3;

/// The last lines that are not empty, joined to one.
std::string last_lines_of(std::string_view text) {
    std::vector<std::string> lines;
    for (const std::string_view line : split(text, '\n')) {
        if (const std::string_view said = trim(line); !said.empty()) lines.push_back(printable(said));
    }
    const std::size_t kept = std::min(lines.size(), kWordsLines);
    return join({lines.end() - static_cast<std::ptrdiff_t>(kept), lines.end()}, "; ");
}

bool is_missing(const StartState& state, int node) {
    const auto host = state.hosts.find(node);
    return host != state.hosts.end() && host->second.phase == HostState::Missing;
}

/// The starter of this node alone; null when one program (srun) starts many.
StarterState* own_starter(StartState& state, int node) {
    const auto host = state.hosts.find(node);
    if (host == state.hosts.end()) return nullptr;
    StarterState& starter = state.starters[host->second.starter];
    return starter.command.nodes.size() == 1 ? &starter : nullptr;
}

void end(StartState& state, StarterState& starter) {
    if (std::exchange(starter.phase, StarterState::Ended) == StarterState::Running) --state.running;
}

void fail(StartState& state, int node, std::string why, TimePoint now) {
    if (state.phase != StartState::Phase::Starting || !is_missing(state, node)) return;
    state.hosts[node].phase = HostState::Failed;
    --state.missing_hosts;
    state.failures.push_back({node, std::move(why)});
    state.settle_at = std::min(state.settle_at, deadline_after(now, kMoreFailures));
}

/// The reason of a host that has not joined in time and gave none itself.
std::string why_late(const StarterState& starter, Duration timeout) {
    std::string said = last_lines_of(starter.words);
    if (said.empty()) said = starter.command.words.front() + " has said nothing";
    const bool has_begun = starter.phase != StarterState::Waiting;
    if (!has_begun) said = fmt::format("still queued behind {} others", kMostStarting);
    return fmt::format("has not joined within {} (--start-timeout); {}", format_duration(timeout), said);
}

void on(StartState& state, const start_event::Begun& event, TimePoint now) {
    state.late_at = deadline_after(now, state.timeout);
    if (event.outcome) return;
    StarterState& starter = state.starters[event.starter];
    end(state, starter);
    for (const int node : starter.command.nodes) fail(state, node, event.outcome.error().what, now);
}

void on(StartState& state, const start_event::Ended& event, TimePoint now) {
    StarterState& starter = state.starters[event.starter];
    end(state, starter);
    if (state.phase != StartState::Phase::Starting) return;
    const std::string words = why_ended(starter.command, last_lines_of(starter.words), event.exit_code);
    for (const int node : starter.command.nodes) {
        HostState& host = state.hosts[node];
        // No worker runs before all have joined, so a host that has joined and ended cannot take part either.
        if (host.phase == HostState::Joined) {
            host.phase = HostState::Missing;
            ++state.missing_hosts;
        }
        fail(state, node, host.told.empty() ? words : host.told, now);
    }
}

void on(StartState& state, const start_event::TimePassed&, TimePoint now) {
    for (const StarterState& starter : state.starters) {
        const std::string late = now >= state.late_at ? why_late(starter, state.timeout) : "";
        for (const int node : starter.command.nodes) {
            const std::string& why = state.hosts[node].told.empty() ? late : state.hosts[node].told;
            if (!why.empty()) fail(state, node, why, now);
        }
    }
}

void on(StartState& state, const start_event::Joined& event, TimePoint) {
    if (is_missing(state, event.node)) {
        state.hosts[event.node].phase = HostState::Joined;
        --state.missing_hosts;
    }
    if (StarterState* starter = own_starter(state, event.node)) {
        starter->is_silent = false;
        starter->words.clear();
    }
}

void on(StartState& state, const start_event::FellSilent& event, TimePoint) {
    if (StarterState* starter = own_starter(state, event.node)) starter->is_silent = true;
}

void on(StartState& state, const start_event::Finish& event, TimePoint now) {
    state.phase = StartState::Phase::Ending;
    // While hosts are missing no worker has run, and their starter may wait for them for ever (Hydra does).
    const bool all_have_joined = state.failures.empty() && state.missing_hosts == 0;
    const Duration timeout = all_have_joined ? event.timeout : std::min(event.timeout, kMoreFailures);
    state.kill_at = std::min(state.kill_at, deadline_after(now, timeout));
}

/// The first waiting starter, unless kMostStarting starters with missing hosts run.
std::optional<std::size_t> next_starter(StartState& state) {
    if (state.begun == state.starters.size()) return std::nullopt;
    std::erase_if(state.starting, [&state](std::size_t starter) {
        const StarterState& one = state.starters[starter];
        const auto is_here = [&state](int node) { return !is_missing(state, node); };
        return one.phase != StarterState::Running || std::ranges::all_of(one.command.nodes, is_here);
    });
    if (state.starting.size() >= kMostStarting) return std::nullopt;
    state.starters[state.begun].phase = StarterState::Running;
    ++state.running;
    state.starting.push_back(state.begun);
    return state.begun++;
}

}  // namespace

std::vector<int> StartState::missing() const {
    std::vector<int> nodes;
    for (const auto& [node, host] : hosts) {
        if (host.phase == HostState::Missing) nodes.push_back(node);
    }
    return nodes;
}

StartState begin_start(std::vector<StarterCommand> commands, Duration timeout) {
    StartState state;
    state.timeout = timeout;
    for (StarterCommand& command : commands) {
        for (const int node : command.nodes) state.hosts.emplace(node, HostState{state.starters.size()});
        state.starters.emplace_back().command = std::move(command);
    }
    state.missing_hosts = state.hosts.size();
    return state;
}

StartActions step(StartState& state, const StartEvent& event, TimePoint now) {
    std::visit([&](const auto& one) { on(state, one, now); }, event);
    StartActions actions;
    if (state.phase == StartState::Phase::Starting) {
        actions.settled = now >= state.settle_at || state.missing_hosts == 0;
        if (actions.settled) state.phase = StartState::Phase::Settled;
        else actions.begin = next_starter(state);
    }
    if (state.phase != StartState::Phase::Ending) return actions;
    const bool has_ended =
        std::holds_alternative<start_event::Ended>(event);  // nothing to kill because of it
    for (std::size_t i = 0; i < state.starters.size() && !has_ended; ++i) {
        StarterState& starter = state.starters[i];
        if (starter.phase != StarterState::Running || (!starter.is_silent && now < state.kill_at)) continue;
        end(state, starter);
        actions.kill.push_back(i);
    }
    actions.ended = state.running == 0;
    if (actions.ended) state.phase = StartState::Phase::Ended;
    return actions;
}

}  // namespace ddprun
