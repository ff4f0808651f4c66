#include "rendezvous/client/redial_state.h"

#include <utility>

namespace ddprun::rdzv {
namespace {

RedialAction dial(RedialState& state) {
    if (state.is_dialling || state.dial_at != kNever) return RedialAction::None;
    state.is_dialling = true;
    state.is_accepted = false;
    return RedialAction::Dial;
}

RedialAction on(RedialState& state, const redial_event::Beat&, TimePoint now) {
    if (now - std::exchange(state.last_beat, now) > state.limits.timeout) state.stood_still = now;
    return RedialAction::None;
}

RedialAction on(RedialState& state, const redial_event::SilenceChecked& event, TimePoint now) {
    const SilenceWatch::Verdict verdict = state.silence.look(now, event.heard);
    const TimePoint suspect = event.heard + redial_after(state.limits);
    state.check_at = suspect > now ? std::min(suspect, verdict.next) : verdict.next;
    if (verdict.are_lost) return RedialAction::EndAsSilent;
    return suspect <= now ? dial(state) : RedialAction::None;
}

RedialAction on(RedialState& state, const redial_event::Closed& event, TimePoint now) {
    // After a long standstill of ours, a closed connection means that the controller has given us up.
    const bool stood_still = now - state.stood_still < state.limits.timeout;
    state.outage = event.outage == Outage::Broken && stood_still ? Outage::Unreachable : event.outage;
    state.grace_ends = deadline_after(now, wait_for_redial(*state.outage, state.limits));
    state.dial_at = kNever;
    if (!state.is_accepted) state.is_dialling = false;  // it began when nothing came through
    return dial(state);
}

RedialAction on(RedialState& state, const redial_event::TimePassed&, TimePoint now) {
    if (now >= state.grace_ends) {
        state.grace_ends = kNever;
        if (!state.is_dialling || !state.is_accepted) return RedialAction::EndAsLost;
    }
    if (now < state.dial_at) return RedialAction::None;
    state.dial_at = kNever;
    return dial(state);
}

RedialAction on(RedialState& state, const redial_event::Accepted&, TimePoint) {
    state.is_accepted = true;
    return RedialAction::None;
}

/// Dials again also when the silent connection has recovered: TCP may deliver our messages much later than
/// the peer's. There is no pause after a Timeout, which has taken one already.
RedialAction on(RedialState& state, const redial_event::DialFailed& event, TimePoint now) {
    state.is_dialling = false;
    if (!is_worth_coming_again(event.why)) return RedialAction::EndAsRefused;
    const bool is_timeout = event.why.code == Errc::Timeout, is_broken = state.outage == Outage::Broken;
    const bool has_grace = is_broken && state.grace_ends != kNever;
    if (is_broken && !has_grace && !is_timeout) return RedialAction::EndAsLost;
    const Duration pause = has_grace    ? wait_for_redial(Outage::Broken, state.limits) / 5
                           : is_timeout ? Duration::zero()
                                        : redial_pause(state.limits);
    state.dial_at = deadline_after(now, pause);
    return RedialAction::None;
}

RedialAction on(RedialState& state, const redial_event::Resumed&, TimePoint) {
    state.is_dialling = false;
    state.outage.reset();
    state.grace_ends = state.dial_at = kNever;
    return RedialAction::None;
}

}  // namespace

bool is_worth_coming_again(const Error& why) {
    switch (why.code) {
        case Errc::System:
        case Errc::NotFound:
        case Errc::Closed:
        case Errc::Timeout:
        case Errc::Limit: return true;
        default: return false;
    }
}

RedialAction step(RedialState& state, const RedialEvent& event, TimePoint now) {
    return std::visit([&](const auto& one) { return on(state, one, now); }, event);
}

}  // namespace ddprun::rdzv
