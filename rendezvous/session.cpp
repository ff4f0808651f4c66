#include "rendezvous/session.h"

#include <algorithm>

namespace ddprun::rdzv {

SilenceWatch::Verdict SilenceWatch::look(TimePoint now, TimePoint heard) {
    const TimePoint lost_at = deadline_after(heard, limits_.timeout);
    if (lost_at > now) return wait_until(std::min(lost_at, now + limits_.interval), false);
    if (!is_second_) {
        const bool were_away = now - due_ > limits_.interval;
        return wait_until(were_away ? now + limits_.timeout / 3 : now, true);
    }
    Verdict verdict = wait_until(now, false);  // who comes next may be due as well
    verdict.are_lost = true;
    return verdict;
}

SilenceWatch::Verdict SilenceWatch::wait_until(TimePoint next, bool is_second) {
    due_ = next;
    is_second_ = is_second;
    return {false, next};
}

}  // namespace ddprun::rdzv
