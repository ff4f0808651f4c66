#include "launcher/head/succession.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"
#include "launcher/plan/head_choice.h"

namespace ddprun {
namespace {

/// The newest ones; a message has a limit of 1 MiB, and a decimal age up to 22 bytes.
constexpr std::size_t kMostRestartAges = 10'000;

/// A call of step().
struct HeadStep {
    SuccessionState& state;
    const JobState& job;
    TimePoint now;
    SuccessionActions actions = {};

    void tell_standby(const std::string& lost = {}) {
        if (state.standby == 0) return;
        rdzv::Legacy legacy = legacy_of(job, now);
        legacy.agents = static_cast<int>(state.agents.size());
        legacy.running = static_cast<int>(state.running.size());
        legacy.lost = lost;
        actions.send.emplace_back(state.standby, std::move(legacy));
    }
    /// Takes the standby back: from now on the job ends with this process.
    void end_succession() {
        state.standby = 0;
        if (!state.successor.host.empty()) actions.send.emplace_back(0, state.successor = {});
    }
    void appoint_standby() {
        if (state.is_last || !state.can_be_succeeded || job.phase != JobState::Phase::Running) return;
        const auto first = std::ranges::find_if(
            state.world, [&](rdzv::AgentId agent) { return state.running.contains(agent); });
        const auto staying = static_cast<int>(state.agents.size() - state.leaving.size());
        if (first == state.world.end() || staying <= state.spec.nodes.min) return end_succession();
        if (*first != state.standby) end_succession();
        state.standby = *first;
        tell_standby();
    }
    void succeeds_no_more(rdzv::AgentId agent) {
        state.heirs.erase(agent);
        actions.tell_end = state.is_last && state.heirs.empty();
    }
    /// Ends the job here if silent nodes may be the larger part of a split network and go on without this
    /// one.
    void check_majority() {
        const int present = static_cast<int>(state.agents.size());
        const int living = state.electorate - state.known_dead;
        if (!state.may_be_succeeded || 2 * present >= living) return;
        end_succession();
        actions.overrule = fmt::format(
            "only {} of {} nodes are left that hear each other: the others may go on without this one",
            present, living);
    }

    void on(const succession_event::Joined& event) {
        state.agents.insert(event.agent);
        if (event.is_own) state.own = event.agent;
        state.electorate =
            std::max(state.electorate, static_cast<int>(state.agents.size()) + state.known_dead);
        if (!state.successor.host.empty()) actions.send.emplace_back(event.agent, state.successor);
        state.standby != 0 ? tell_standby() : appoint_standby();
    }
    void on(const succession_event::Lost& event) {
        using enum succession_event::Lost::How;
        for (auto* agents : {&state.agents, &state.leaving, &state.running}) agents->erase(event.agent);
        if (job.phase == JobState::Phase::Finished) return succeeds_no_more(event.agent);
        if (event.how == Silent)
            state.silent_may_return = deadline_after(now, return_timeout(state.spec.rendezvous));
        const bool has_died = event.how == Closed && now >= state.sees_no_death_until;
        if (has_died || event.how == Dismissed) ++state.known_dead;
        if (event.how != Dismissed) check_majority();
        if (event.agent != state.standby) {
            tell_standby(event.instance);
        } else {
            end_succession();
            appoint_standby();
        }
        succeeds_no_more(event.agent);
    }
    void on(const succession_event::Leaves& event) {
        if (state.agents.contains(event.agent)) state.leaving.insert(event.agent);
    }
    void on(const succession_event::GenerationBegan& event) {
        state.world = event.world;
        state.unconfirmed = static_cast<int>(event.world.size());
        state.running.clear();
        for (const rdzv::AgentId agent : event.world) {
            if (agent != state.own && state.agents.contains(agent)) state.running.insert(agent);
        }
        appoint_standby();
    }
    /// Counts the electorate anew once the workers of all nodes have started: earlier generations are over.
    void on(const succession_event::Confirmed&) {
        if (--state.unconfirmed != 0) return;
        state.electorate = static_cast<int>(state.agents.size());
        state.known_dead = 0;
        state.may_be_succeeded = !state.successor.host.empty();
    }
    void on(const succession_event::CountChanged&) { tell_standby(); }
    void on(const succession_event::StandbyListens& event) {
        if (event.where.port == 0) return succeeds_no_more(event.agent);
        if (event.agent != state.standby || event.where == state.successor) return;
        state.successor = event.where;
        state.heirs.insert(event.agent);
        state.may_be_succeeded = true;
        actions.send.emplace_back(0, state.successor);
        actions.say =
            fmt::format("{} is the standby: the job outlives this node", printable(state.successor.host));
    }
    void on(const succession_event::StoodStill&) {
        state.sees_no_death_until = deadline_after(now, heartbeats_of(state.spec.rendezvous).timeout);
    }
    /// Needs no timer: a standby that does not answer is lost within the heartbeat timeout.
    void on(const succession_event::JobEnds&) {
        state.is_last = true;
        end_succession();
        actions.tell_end = state.heirs.empty();
    }
    void on(const succession_event::NodesNeeded& event) {
        if (!state.nobody_can_come) actions.await_nodes = state.spec.rendezvous.join_timeout;
        else if (event.are_enough || now < state.silent_may_return)
            actions.await_nodes = state.silent_may_return - now;
        else actions.nobody_comes = true;
    }
    /// Keeps a restarted ddprun from running the job a second time: it joins the successor or ends.
    void on(const succession_event::SuccessorMet& event) {
        if (state.is_successor) return;
        const std::string there = fmt::format("the job goes on under {}, which succeeded its lost head",
                                              printable(event.successor.host));
        state.is_handed_over = job.generation == 0 && event.can_join;
        if (!state.is_handed_over) {
            actions.overrule = there + ": it must not run a second time here";
            return;
        }
        actions.hand_over = there + ": this node joins it there";
        actions.send.emplace_back(0, event.successor);
    }
};

}  // namespace

SuccessionActions step(SuccessionState& state, const SuccessionEvent& event, const JobState& job,
                       TimePoint now) {
    HeadStep one{state, job, now};
    std::visit([&](const auto& what) { one.on(what); }, event);
    return one.actions;
}

rdzv::Legacy legacy_of(const JobState& state, TimePoint now) {
    rdzv::Legacy legacy;
    legacy.generation = state.generation;
    legacy.restarts_used = state.restarts_used;
    const std::vector<TimePoint>& restarts = state.history.restarts;
    const std::size_t oldest = restarts.size() - std::min(restarts.size(), kMostRestartAges);
    for (std::size_t i = oldest; i < restarts.size(); ++i)
        legacy.restart_ages_ns.push_back(std::to_string((now - restarts[i]).count()));
    legacy.without_progress = state.history.without_progress;
    legacy.age_ns = (now - state.generation_started).count();
    legacy.steps = state.history.furthest_step;
    legacy.ranks = state.ranks();
    legacy.recoveries = state.recoveries;
    legacy.longest_start_ns = state.longest_start.count();
    return legacy;
}

JobState inherited(const rdzv::Legacy& legacy, TimePoint now) {
    JobState state;
    state.phase = JobState::Phase::Running;
    state.generation =
        legacy.generation + 1;  // the head may have begun one more that this node was not told of
    state.restarts_used = legacy.restarts_used;
    state.recoveries = legacy.recoveries;
    state.longest_start = Duration(legacy.longest_start_ns);
    state.history.without_progress = legacy.without_progress;
    state.history.furthest_step = legacy.steps;
    for (const std::string& age : legacy.restart_ages_ns)
        state.history.restarts.push_back(now - Duration(parse_int(age).value_or(0)));
    // Those that the message had no room for are as old as the oldest that it has.
    std::vector<TimePoint>& restarts = state.history.restarts;
    const auto used = static_cast<std::size_t>(std::max(legacy.restarts_used, 0));
    if (restarts.size() == kMostRestartAges && restarts.size() < used)
        restarts.insert(restarts.begin(), used - restarts.size(), restarts.front());
    state.generation_started = now - Duration(legacy.age_ns);
    state.nodes.resize(1);
    state.nodes[0].workers = legacy.ranks;
    state.nodes_there = 1;
    return state;
}

void take_word(JobState& state, std::uint64_t generation, int restarts, TimePoint now) {
    state.generation = std::max(state.generation, generation + 1);
    for (; state.restarts_used < restarts; ++state.restarts_used) state.history.restarts.push_back(now);
}

std::size_t adopt(JobState& state, const std::vector<KeptNode>& nodes) {
    JobState::Node lost = std::exchange(state.nodes, {}).front();
    std::size_t hole = 0;
    for (int ranks = 0; hole < nodes.size() && nodes[hole].first_rank == ranks; ++hole)
        ranks += nodes[hole].workers;
    for (const KeptNode& node : nodes) {
        lost.workers = std::max(lost.workers - node.workers, 1);
        state.nodes.push_back({.workers = node.workers, .can_recover = true});
    }
    state.has_run = true;
    state.nodes_there += static_cast<int>(nodes.size());
    lost.can_recover = true;
    state.nodes.insert(state.nodes.begin() + static_cast<std::ptrdiff_t>(hole), lost);
    return hole;
}

}  // namespace ddprun
