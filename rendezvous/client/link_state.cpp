#include "rendezvous/client/link_state.h"

#include <utility>

namespace ddprun::rdzv {
namespace {

LinkAction dial(LinkState& state) {
    if (state.is_dialling || state.dial_at != kNever) return LinkAction::None;
    state.is_dialling = true;
    state.is_accepted = false;
    return LinkAction::Dial;
}

/// True when another attempt to connect can only fail the same way. Strangers can keep a controller of ours
/// from answering once, and a process that was stopped may have let the time pass itself. A system call that
/// is refused (EPERM of sendmsg in a sandbox) stays refused.
bool is_hopeless(LinkState& state, const Error& why) {
    constexpr int kTimeouts = 2;
    if (!state.is_ours) return false;
    if (why.code == Errc::Closed && outage_of(why) == Outage::Unreachable) return true;
    return why.code == Errc::System || (why.code == Errc::Timeout && ++state.timeouts == kTimeouts);
}

LinkAction on(LinkState& state, const link_event::Beat&, TimePoint now) {
    if (now - std::exchange(state.last_beat, now) > state.limits.timeout) state.stood_still = now;
    return LinkAction::None;
}

LinkAction on(LinkState& state, const link_event::SilenceChecked& event, TimePoint now) {
    const SilenceWatch::Verdict verdict = state.silence.look(now, event.heard);
    const TimePoint suspect = event.heard + redial_after(state.limits);
    state.check_at = suspect > now ? std::min(suspect, verdict.next) : verdict.next;
    if (verdict.are_lost) return LinkAction::EndAsSilent;
    return suspect <= now ? dial(state) : LinkAction::None;
}

LinkAction on(LinkState& state, const link_event::Closed& event, TimePoint now) {
    // After a long standstill of ours, a closed connection means that the controller has given us up.
    const bool stood_still = now - state.stood_still < state.limits.timeout;
    state.outage = event.outage == Outage::Broken && stood_still ? Outage::Unreachable : event.outage;
    state.grace_ends = deadline_after(now, wait_for_redial(*state.outage, state.limits));
    state.dial_at = kNever;
    if (!state.is_accepted) state.is_dialling = false;  // it began when nothing came through
    return dial(state);
}

LinkAction on(LinkState& state, const link_event::TimePassed&, TimePoint now) {
    if (now >= state.connect_by) return LinkAction::EndAsAbsent;
    if (now >= state.grace_ends) {
        state.grace_ends = kNever;
        if (!state.is_dialling || !state.is_accepted) return LinkAction::EndAsLost;
    }
    if (now < state.dial_at) return LinkAction::None;
    state.dial_at = kNever;
    return dial(state);
}

LinkAction on(LinkState& state, const link_event::Accepted&, TimePoint) {
    state.is_accepted = true;
    return LinkAction::None;
}

/// Dials again also when the silent connection has recovered: TCP may deliver our messages much later than
/// the peer's. There is no pause after a Timeout, which has taken one already.
LinkAction on(LinkState& state, const link_event::DialFailed& event, TimePoint now) {
    state.is_dialling = false;
    if (!is_worth_coming_again(event.why)) return LinkAction::EndAsRefused;
    if (!state.is_joined) {
        if (is_hopeless(state, event.why)) return LinkAction::EndAsAbsent;
        state.dial_at = now + state.backoff;
        state.backoff = std::min<Duration>(state.backoff * 2, std::chrono::seconds(1));
        return LinkAction::None;
    }
    const bool is_timeout = event.why.code == Errc::Timeout, is_broken = state.outage == Outage::Broken;
    const bool has_grace = is_broken && state.grace_ends != kNever;
    if (is_broken && !has_grace && !is_timeout) return LinkAction::EndAsLost;
    const Duration pause = has_grace    ? wait_for_redial(Outage::Broken, state.limits) / 5
                           : is_timeout ? Duration::zero()
                                        : redial_pause(state.limits);
    state.dial_at = deadline_after(now, pause);
    return LinkAction::None;
}

LinkAction on(LinkState& state, const link_event::Connected&, TimePoint now) {
    if (!std::exchange(state.is_joined, true)) {
        state.silence = SilenceWatch(state.limits, now);
        state.last_beat = now;
    }
    state.is_dialling = false;
    state.outage.reset();
    state.connect_by = state.grace_ends = state.dial_at = kNever;
    return LinkAction::None;
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

LinkAction step(LinkState& state, const LinkEvent& event, TimePoint now) {
    return std::visit([&](const auto& one) { return on(state, one, now); }, event);
}

}  // namespace ddprun::rdzv
