#include "launcher/job/heir_state.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "launcher/head/succession.h"
#include "rendezvous/wire/session.h"

namespace ddprun {
namespace {

using Phase = HeirState::Phase;

/// How long nodes wait for the standby's answer after its own wait is over.
constexpr Duration kLastWord = std::chrono::seconds(2);

Error stale(const char* why) { return {Errc::StaleGeneration, why, 0}; }

/// A call of step().
struct HeirStep {
    HeirState& state;
    TimePoint now;
    HeirActions actions = {};

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
        actions.take_over = inherited(*state.legacy, state.legacy_came);
        for (auto& [agent, arrival] : std::exchange(state.arrivals, {}))
            actions.joined.emplace_back(agent, std::move(arrival.hello));
        std::ranges::stable_sort(actions.joined, std::greater{},
                                 [](const auto& one) { return one.second.kept_generation; });
    }
    /// Decides whether the standby takes the job over: not while the head, and so its workers, may still run.
    /// It also waits for agents with workers: spares, unknown to the standby, come before those have stopped.
    void consider() {
        if (state.is_decided || !state.is_orphan() || !state.is_standby()) return;
        const int agents = state.legacy->agents;
        const bool time_is_up = now >= state.until;
        // The arrivals, perhaps thousands, are counted only when all may be there.
        if (!time_is_up && static_cast<int>(state.arrivals.size()) < agents - 1) return;
        const int here = present(0, now);
        const bool all_have_stopped = present(state.legacy->generation, now) >= state.legacy->running;
        if (!time_is_up && (here < agents - 1 || !all_have_stopped)) return;
        const bool are_most = 2 * here > agents - (state.head_is_dead ? 1 : 0);
        if (are_most && !state.head_is_dead && 2 * present(0, now - state.head_notices) <= agents) return;
        state.is_decided = true;
        if (are_most) return take_over();
        actions.give_up = fmt::format(
            "{}, and {} of {} nodes, which came to the standby, are not more than half: the others may go on without them",
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
    void lose_head(const heir_event::LinkLost& event) {
        state.phase = Phase::Stopping;
        state.head = event.head;
        state.why = fmt::format("the head at {} is lost ({})", to_string(event.head), event.why.what);
        state.head_is_dead = event.head_is_dead;
        state.until = deadline_after(now, state.patience);
        state.head_knows_all = deadline_after(now, state.head_notices);
        actions.stop_workers = state.why;
        if (state.is_standby()) state.timer = std::min(state.until, state.head_knows_all);
    }
    /// True when this node may join the lost head again. A head that took this node for lost is alive and may
    /// still need it. A silent head may come back, as a stopped process does; without restarts it would then
    /// end the job, so this node does not wait for it.
    [[nodiscard]] bool may_return(const heir_event::LinkLost& event) const {
        const bool is_silent =
            event.why.code == Errc::Timeout || rdzv::outage_of(event.why) == rdzv::Outage::Unreachable;
        return !state.is_head && !state.has_asked_to_end &&
               (event.why.code == Errc::StaleGeneration ||
                (is_silent && event.was_joined && state.has_restarts));
    }

    void on(const heir_event::Appointed& event) {
        state.legacy = event.legacy;
        state.legacy_came = now;
        state.port = event.port;
        if (!event.legacy.lost.empty()) state.lost_before.insert(event.legacy.lost);
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
    void on(const heir_event::GenerationBegan&) {
        if (state.is_orphan()) forget_loss(Phase::Following);
    }
    void on(const heir_event::LinkLost& event) {
        const bool is_gone = event.why.code == Errc::Closed || event.why.code == Errc::Timeout;
        const bool is_succeeded =
            !state.is_head && state.phase == Phase::Following && !state.successor.host.empty();
        if (is_gone && is_succeeded && !state.has_asked_to_end) return lose_head(event);
        actions.lost = event.why;
        actions.leave = !may_return(event);
        if (actions.leave) return;
        if (!state.is_orphan()) state.head = event.head;
        forget_loss(Phase::Returning);
        state.legacy.reset();
        actions.renew = event.why;
    }
    void on(const heir_event::WorkersEnded&) {
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
            actions.join_by = deadline_after(state.until, kLastWord);
        }
    }
    void on(const heir_event::AgentCame& event) {
        state.arrivals[event.agent] = {event.hello, now};
        state.head_knows_all = deadline_after(now, state.head_notices);
        const TimePoint due = state.is_orphan() ? state.head_knows_all : deadline_after(now, state.patience);
        state.timer = std::min(state.timer, due);
        consider();
    }
    void on(const heir_event::AgentGone& event) { state.arrivals.erase(event.agent); }
    void on(const heir_event::EndAsked& event) {
        actions.leave = !event.is_connected || state.is_orphan();
        state.has_asked_to_end = true;
        if (!actions.leave) actions.send = event.how;
    }
    void on(const heir_event::TimerFired&) {
        state.timer = kNever;
        if (!state.is_orphan()) return refuse_late();
        consider();
        for (const TimePoint due : {state.until, state.head_knows_all}) {
            if (!state.is_decided && due > now) state.timer = std::min(state.timer, due);
        }
    }
    void refuse_late() {
        for (const auto& [agent, arrival] : state.arrivals) {
            const TimePoint refused_at = deadline_after(arrival.came, state.patience);
            if (refused_at > now) state.timer = std::min(state.timer, refused_at);
            else
                actions.refuse.emplace_back(
                    agent, stale("the job has not lost its head: this node was taken for lost"));
        }
        for (const auto& [agent, why] : actions.refuse) state.arrivals.erase(agent);
    }
};

}  // namespace

HeirActions step(HeirState& state, const HeirEvent& event, TimePoint now) {
    HeirStep one{state, now};
    std::visit([&](const auto& what) { one.on(what); }, event);
    return one.actions;
}

}  // namespace ddprun
