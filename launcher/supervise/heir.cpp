#include "launcher/supervise/heir.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace ddprun {

void Heir::obey(const rdzv::Legacy& legacy) {
    legacy_ = legacy;
    if (!legacy.lost.empty()) lost_before_.insert(legacy.lost);
    legacy_came_ = parts_.loop.now();
    if (port_ == 0) {
        const Result<std::uint16_t> port = parts_.listen();
        if (!port) return parts_.log.warning("this node cannot be the standby: {}", port.error().what);
        port_ = *port;
    }
    if (!is_standby()) parts_.say(rdzv::StandbyListens{port_});
}

void Heir::obey(const rdzv::Successor& successor) {
    const bool was_standby = is_standby();
    if (has_left_) generation_began();  // the next controller's word
    successor_ = successor;
    if (was_standby && !is_standby()) parts_.say(rdzv::StandbyListens{0});
}

void Heir::head_lost(const std::string& why, bool is_dead) {
    is_orphan_ = true;
    head_is_dead_ = is_dead;
    why_ = why;
    until_ = deadline_after(parts_.loop.now(), parts_.patience);
    head_runs_until_ = is_dead ? parts_.loop.now() : deadline_after(parts_.loop.now(), parts_.head_notices);
    if (!is_standby()) return;
    timer_ = parts_.loop.call_at(until_, [this] { consider(true); });
    head_timer_ = parts_.loop.call_at(head_runs_until_, [this] { consider(false); });
}

void Heir::workers_ended() {
    if (!is_orphan_ || has_left_) return;
    has_left_ = true;
    // The standby waits for whoever is late to stop; a moment more is for its own word on that to arrive.
    const TimePoint by = deadline_after(until_, std::chrono::seconds(2));
    parts_.loop.post([this, controller = endpoints_of_successor(), by] { parts_.go_to(controller, by); });
}

std::vector<Endpoint> Heir::endpoints_of_successor() const {
    if (is_standby()) return {parts_.own_endpoint(port_)};
    const auto port = static_cast<std::uint16_t>(successor_.port);
    std::vector<Endpoint> all;
    for (const std::string& address : successor_.addresses) all.push_back({address, port});
    if (all.empty()) all.push_back({successor_.host, port});
    return all;
}

void Heir::generation_began() {
    if (!std::exchange(is_orphan_, false)) return;
    has_left_ = is_over_ = false;
    successor_ = {};
    lost_before_.clear();
    forget_arrivals();
}

void Heir::rejoin() {
    const Error why{Errc::StaleGeneration,
                    "this node is not the standby any more: it was taken for lost itself", 0};
    for (const auto& [agent, arrival] : arrivals_) parts_.refuse(agent, why);
    is_orphan_ = has_left_ = is_over_ = false;
    legacy_.reset();
    successor_ = {};
    lost_before_.clear();
    forget_arrivals();
}

void Heir::arrived(rdzv::AgentId agent, const rdzv::AgentHello& hello) {
    const auto refusal = parts_.loop.call_after(parts_.patience, [this, agent] {
        if (!is_orphan_)
            parts_.refuse(agent, {Errc::StaleGeneration,
                                  "the job has not lost its head: this node was taken for lost", 0});
    });
    arrivals_[agent] = {hello.instance, hello.kept_generation, refusal};
    consider(false);
}

void Heir::gone(rdzv::AgentId agent) {
    const auto known = arrivals_.find(agent);
    if (known == arrivals_.end()) return;
    parts_.loop.cancel(known->second.refusal);
    arrivals_.erase(known);
}

void Heir::forget_arrivals() {
    for (const auto& [agent, arrival] : std::exchange(arrivals_, {})) parts_.loop.cancel(arrival.refusal);
    for (const os::EventLoop::TimerId timer : {timer_, head_timer_}) parts_.loop.cancel(timer);
}

int Heir::present(std::uint64_t generation) const {
    return static_cast<int>(std::count_if(arrivals_.begin(), arrivals_.end(), [&](const auto& one) {
        return one.second.generation >= generation && !lost_before_.contains(one.second.instance);
    }));
}

void Heir::consider(bool time_is_up) {
    if (is_over_ || !is_orphan_) return;
    // Who counts is looked up when all may be there: there can be thousands.
    if (!time_is_up && static_cast<int>(arrivals_.size()) < legacy_->agents - 1) return;
    const bool head_may_run = parts_.loop.now() < head_runs_until_;
    const Succession decision = judge_succession({legacy_->agents, head_is_dead_, head_may_run, present(),
                                                  legacy_->running - present(legacy_->generation)},
                                                 time_is_up);
    if (decision == Succession::Wait) return;
    is_over_ = true;
    for (const os::EventLoop::TimerId timer : {timer_, head_timer_}) parts_.loop.cancel(timer);
    if (decision == Succession::TakeOver) return parts_.take_over(inherited(*legacy_, legacy_came_), why_);
    parts_.give_up(fmt::format(
        "{}, and {} of {} nodes, which came to the standby, are not more than half: the others may go on without them",
        why_, present(), legacy_->agents));
}

}  // namespace ddprun
