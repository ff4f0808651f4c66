#include "launcher/head/succession.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"
#include "launcher/plan/head_choice.h"
#include "rendezvous/wire/session.h"

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
        rdzv::JobSnapshot snapshot = snapshot_of(job, now);
        snapshot.agents = static_cast<int>(state.agents.size());
        snapshot.running = static_cast<int>(state.running.size());
        snapshot.lost = lost;
        actions.send.emplace_back(state.standby, std::move(snapshot));
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
    void can_succeed_no_more(rdzv::AgentId agent) {
        state.possible_standbys.erase(agent);
        actions.tell_end = state.is_last && state.possible_standbys.empty();
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
        if (job.phase == JobState::Phase::Finished) return can_succeed_no_more(event.agent);
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
        can_succeed_no_more(event.agent);
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
        if (event.where.port == 0) return can_succeed_no_more(event.agent);
        if (event.agent != state.standby || event.where == state.successor) return;
        state.successor = event.where;
        state.possible_standbys.insert(event.agent);
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
        actions.tell_end = state.possible_standbys.empty();
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

void note_generation(rdzv::AgentHello& hello, const rdzv::StartGeneration& start) {
    hello.kept_place = start.place;
    hello.kept_generation = start.generation;
    hello.kept_restarts = start.restart_count;
    hello.kept_first = start.first_generation;
    hello.kept_first_rank = start.first_rank;
}

rdzv::JobSnapshot snapshot_of(const JobState& state, TimePoint now) {
    rdzv::JobSnapshot snapshot;
    snapshot.generation = state.generation;
    snapshot.restarts_used = state.restarts_used;
    const std::vector<TimePoint>& restarts = state.history.restarts;
    const std::size_t oldest = restarts.size() - std::min(restarts.size(), kMostRestartAges);
    for (std::size_t i = oldest; i < restarts.size(); ++i)
        snapshot.restart_ages_ns.push_back(std::to_string((now - restarts[i]).count()));
    snapshot.without_progress = state.history.without_progress;
    snapshot.age_ns = (now - state.generation_started).count();
    snapshot.steps = state.history.furthest_step;
    snapshot.ranks = state.ranks();
    snapshot.recoveries = state.recovery.recoveries;
    snapshot.longest_start_ns = state.recovery.longest_start.count();
    return snapshot;
}

JobState inherited(const rdzv::JobSnapshot& snapshot, TimePoint now) {
    JobState state;
    state.phase = JobState::Phase::Running;
    state.generation =
        snapshot.generation + 1;  // the head may have begun one more that this node was not told of
    state.restarts_used = snapshot.restarts_used;
    state.recovery.recoveries = snapshot.recoveries;
    state.recovery.longest_start = Duration(snapshot.longest_start_ns);
    state.history.without_progress = snapshot.without_progress;
    state.history.furthest_step = snapshot.steps;
    for (const std::string& age : snapshot.restart_ages_ns)
        state.history.restarts.push_back(now - Duration(parse_int(age).value_or(0)));
    // Those that the message had no room for are as old as the oldest that it has.
    std::vector<TimePoint>& restarts = state.history.restarts;
    const auto used = static_cast<std::size_t>(std::max(snapshot.restarts_used, 0));
    if (restarts.size() == kMostRestartAges && restarts.size() < used)
        restarts.insert(restarts.begin(), used - restarts.size(), restarts.front());
    state.generation_started = now - Duration(snapshot.age_ns);
    state.nodes.resize(1);
    state.nodes[0].workers = snapshot.ranks;
    state.nodes_there = 1;
    return state;
}

void catch_up(JobState& state, std::uint64_t generation, int restarts, TimePoint now) {
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

// ---- the nodes that follow a head

namespace {

/// How long nodes wait for the standby's answer after its own wait is over.
constexpr Duration kAnswerTimeout = std::chrono::seconds(2);

Error stale(const char* why) { return {Errc::StaleGeneration, why, 0}; }

/// A call of step().
struct FollowerStep {
    using Phase = FollowerState::Phase;
    FollowerState& state;
    TimePoint now;
    FollowerActions actions = {};

    void refuse_all(const Error& why) {
        for (const auto& [agent, arrival] : std::exchange(state.arrivals, {}))
            actions.refuse.emplace_back(agent, why);
    }
    /// The number of agents that came by then, that the head had not lost, and that ran this generation or a
    /// later one.
    [[nodiscard]] int present(std::uint64_t generation, TimePoint by) const {
        return static_cast<int>(std::ranges::count_if(state.arrivals, [&](const auto& one) {
            const rdzv::AgentHello& hello = one.second.hello;
            return hello.kept_generation >= generation && !state.lost_before.contains(hello.instance) &&
                   one.second.came <= by;
        }));
    }
    /// Takes the job over. Of two agents with the same place, the one that had it last joins first.
    void take_over() {
        state.is_head = true;
        actions.take_over = inherited(*state.snapshot, state.snapshot_came);
        for (auto& [agent, arrival] : std::exchange(state.arrivals, {}))
            actions.joined.emplace_back(agent, std::move(arrival.hello));
        std::ranges::stable_sort(actions.joined, std::greater{},
                                 [](const auto& one) { return one.second.kept_generation; });
    }
    /// Decides whether the standby takes the job over: not while the head, and so its workers, may still run.
    /// It also waits for agents with workers: spares, unknown to the standby, come before those have stopped.
    void consider() {
        if (state.is_decided || !state.is_orphan() || !state.is_standby()) return;
        const int agents = state.snapshot->agents;
        const bool time_is_up = now >= state.until;
        // The arrivals, perhaps thousands, are counted only when all may be there.
        if (!time_is_up && static_cast<int>(state.arrivals.size()) < agents - 1) return;
        const int here = present(0, now);
        const bool all_have_stopped = present(state.snapshot->generation, now) >= state.snapshot->running;
        if (!time_is_up && (here < agents - 1 || !all_have_stopped)) return;
        const bool are_most = 2 * here > agents - (state.head_is_dead ? 1 : 0);
        if (are_most && !state.head_is_dead && 2 * present(0, now - state.head_notices) <= agents) return;
        state.is_decided = true;
        if (are_most) return take_over();
        actions.give_up = fmt::format(
            "{}, and {} of {} nodes, which came to the standby, are not more than half: the others may go "
            "on without them",
            state.why, here, agents);
        refuse_all({Errc::Refused, actions.give_up, 0});
    }
    /// This node has a head again, or goes back to the one it had.
    void forget_loss(Phase next) {
        refuse_all(stale("this node is not the standby any more"));
        state.phase = next;
        state.is_decided = false;
        state.successor = {};
        state.lost_before.clear();
    }
    void lose_head(const follower_event::LinkLost& event) {
        state.phase = Phase::Stopping;
        state.head = event.head;
        state.why = fmt::format("the head at {} is lost ({})", to_string(event.head), event.why.what);
        state.head_is_dead = event.head_is_dead;
        state.until = deadline_after(now, state.arrival_timeout);
        state.head_knows_all = deadline_after(now, state.head_notices);
        actions.stop_workers = state.why;
        if (state.is_standby()) state.timer = std::min(state.until, state.head_knows_all);
    }
    /// True when this node may join the lost head again. A head that took this node for lost is alive and may
    /// still need it. A silent head may come back, as a stopped process does; without restarts it would then
    /// end the job, so this node does not wait for it.
    [[nodiscard]] bool may_return(const follower_event::LinkLost& event) const {
        const bool is_silent =
            event.why.code == Errc::Timeout || rdzv::outage_of(event.why) == rdzv::Outage::Unreachable;
        return !state.is_head && !state.has_asked_to_end &&
               (event.why.code == Errc::StaleGeneration ||
                (is_silent && event.was_joined && state.has_restarts));
    }

    void on(const follower_event::Appointed& event) {
        state.snapshot = event.snapshot;
        state.snapshot_came = now;
        state.port = event.port;
        if (!event.snapshot.lost.empty()) state.lost_before.insert(event.snapshot.lost);
        if (event.port != 0 && !state.is_standby()) actions.send = rdzv::StandbyListens{event.port};
    }
    /// For a spare, a new Successor is the only sign that another head has taken over.
    void on(const rdzv::Successor& successor) {
        const bool was_standby = state.is_standby();
        if (state.phase == Phase::Orphaned) forget_loss(Phase::Following);
        state.successor = successor;
        if (was_standby && !state.is_standby()) actions.send = rdzv::StandbyListens{0};
    }
    void on(const rdzv::Shutdown& shutdown) {
        if (!state.is_head) actions.end = shutdown;
    }
    void on(const follower_event::GenerationBegan&) {
        if (state.is_orphan()) forget_loss(Phase::Following);
    }
    void on(const follower_event::LinkLost& event) {
        const bool is_gone = event.why.code == Errc::Closed || event.why.code == Errc::Timeout;
        const bool is_succeeded =
            !state.is_head && state.phase == Phase::Following && !state.successor.host.empty();
        if (is_gone && is_succeeded && !state.has_asked_to_end) return lose_head(event);
        actions.lost = event.why;
        actions.leave = !may_return(event);
        if (actions.leave) return;
        if (!state.is_orphan()) state.head = event.head;
        forget_loss(Phase::Returning);
        state.snapshot.reset();
        ++state.instances;
        actions.renew = event.why;
    }
    void on(const follower_event::WorkersEnded&) {
        if (state.phase == Phase::Returning) {
            state.phase = Phase::Following;
            actions.join = {state.head};
            actions.join_by = deadline_after(now, state.return_timeout);
        } else if (state.phase == Phase::Stopping) {
            state.phase = Phase::Orphaned;
            const auto port = static_cast<std::uint16_t>(state.successor.port);
            for (const std::string& address : state.successor.addresses)
                actions.join.push_back({address, port});
            if (actions.join.empty()) actions.join = {{state.successor.host, port}};
            if (state.is_standby()) actions.join = {{state.own_address, port}};
            actions.join_by = deadline_after(state.until, kAnswerTimeout);
        }
    }
    void on(const follower_event::AgentCame& event) {
        state.arrivals[event.agent] = {event.hello, now};
        state.head_knows_all = deadline_after(now, state.head_notices);
        const TimePoint due =
            state.is_orphan() ? state.head_knows_all : deadline_after(now, state.arrival_timeout);
        state.timer = std::min(state.timer, due);
        consider();
    }
    void on(const follower_event::AgentGone& event) { state.arrivals.erase(event.agent); }
    void on(const follower_event::EndAsked& event) {
        actions.leave = !event.is_connected || state.is_orphan();
        state.has_asked_to_end = true;
        if (!actions.leave) actions.send = event.how;
    }
    void on(const follower_event::TimerFired&) {
        state.timer = kNever;
        if (!state.is_orphan()) return refuse_late();
        consider();
        for (const TimePoint due : {state.until, state.head_knows_all}) {
            if (!state.is_decided && due > now) state.timer = std::min(state.timer, due);
        }
    }
    void refuse_late() {
        for (const auto& [agent, arrival] : state.arrivals) {
            const TimePoint refused_at = deadline_after(arrival.came, state.arrival_timeout);
            if (refused_at > now) state.timer = std::min(state.timer, refused_at);
            else
                actions.refuse.emplace_back(
                    agent, stale("the job has not lost its head: this node was taken for lost"));
        }
        for (const auto& [agent, why] : actions.refuse) state.arrivals.erase(agent);
    }
};

}  // namespace

FollowerActions step(FollowerState& state, const FollowerEvent& event, TimePoint now) {
    FollowerStep one{state, now};
    std::visit([&](const auto& what) { one.on(what); }, event);
    return one.actions;
}

}  // namespace ddprun
