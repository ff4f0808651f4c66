#include "launcher/head/stop_agreement.h"

#include <algorithm>

namespace ddprun {
namespace {

using StopPhase = StopAgreement::Phase;

StopActions propose_step(StopAgreement& state, StopPhase phase, std::uint64_t step) {
    state.phase = phase;
    state.step = step;
    state.awaited = state.nodes;
    return {step, std::nullopt};
}

StopActions decide_step(StopAgreement& state, std::uint64_t step, std::string why) {
    state = {};
    return {std::nullopt, StopActions::Decision{step, std::move(why)}};
}

StopActions on(StopAgreement& state, const stop_event::Noticed& event, TimePoint now) {
    if (state.phase != StopPhase::Closed) return {};
    if (event.time < kTooNear || event.nodes.empty()) return decide_step(state, 0, "");
    state = {};
    state.nodes = event.nodes;
    state.deadline = now + std::min(event.time / 4, kLongestAgreement);
    return propose_step(state, StopPhase::Asking, 0);
}

StopActions on(StopAgreement& state, const stop_event::Answered& event, TimePoint) {
    // An answer to an earlier proposal is late.
    if (state.phase == StopPhase::Closed || event.step != state.step) return {};
    std::erase(state.awaited, event.node);
    state.listens = state.listens && event.listens;
    state.highest = std::max(state.highest, event.highest);
    if (!state.listens) return decide_step(state, 0, "");
    if (!state.awaited.empty()) return {};
    if (state.phase == StopPhase::Proposing && state.highest < state.step)
        return decide_step(state, state.step, "");
    const std::uint64_t next = state.highest + state.margin;
    state.margin *= 2;
    return propose_step(state, StopPhase::Proposing, next);
}

StopActions on(StopAgreement& state, const stop_event::Broken& event, TimePoint) {
    if (state.phase == StopPhase::Closed) return {};
    return decide_step(state, 0, state.phase == StopPhase::Proposing ? event.why : "");
}

StopActions on(StopAgreement& state, const stop_event::TimerFired&, TimePoint now) {
    if (state.phase == StopPhase::Closed || now < state.deadline) return {};
    return decide_step(state, 0,
                       state.awaited.empty() ? "the ranks are too fast" : "a node has not answered");
}

}  // namespace

StopActions step(StopAgreement& state, const StopEvent& event, TimePoint now) {
    return std::visit([&](const auto& e) { return on(state, e, now); }, event);
}

}  // namespace ddprun
