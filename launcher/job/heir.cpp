#include "launcher/job/heir.h"

#include <fmt/core.h>

namespace ddprun {

void Heir::feed(const HeirEvent& event) {
    const HeirActions actions = step(state_, event, MonotonicClock::now());
    loop_.cancel(timer_);
    if (state_.timer != kNever)
        timer_ = loop_.call_at(state_.timer, [this] { feed(heir_event::TimerFired{}); });
    perform(actions);
}

void Heir::generation_began(const rdzv::StartGeneration& start) {
    hello_.kept_place = start.place;
    hello_.kept_generation = start.generation;
    hello_.kept_restarts = start.restart_count;
    hello_.kept_first = start.first_generation;
    hello_.kept_first_rank = start.first_rank;
    feed(heir_event::GenerationBegan{});
}

void Heir::perform(const HeirActions& actions) {
    if (actions.send) hands_.send(*actions.send);
    if (!actions.stop_workers.empty()) hands_.stop_workers(actions.stop_workers);
    for (const auto& [agent, why] : actions.refuse) hands_.refuse(agent, why);
    if (actions.renew) {
        // A standby does not count nodes that its head has lost, so this node takes a new instance name.
        hello_.rejoins = std::exchange(hello_.instance, fmt::format("{}.{}", first_instance_, ++instances_));
        hands_.kill_workers(*actions.renew);
    }
    const bool ends_workers = actions.renew || !actions.stop_workers.empty();
    if (ends_workers && !hands_.has_workers()) feed(heir_event::WorkersEnded{});
    if (!actions.join.empty()) {
        hello_.keeps_workers = hands_.keeps_workers();
        hands_.join(actions.join, actions.join_by);
    }
    if (actions.take_over) hands_.take_over(*actions.take_over, actions.joined);
    if (!actions.give_up.empty()) hands_.give_up(actions.give_up);
    if (actions.end) hands_.end(*actions.end);
    if (actions.leave) hands_.leave(actions.lost);
}

}  // namespace ddprun
