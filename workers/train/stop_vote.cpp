#include "stop_vote.h"

#include <algorithm>
#include <utility>

#include "agreement.h"

namespace train {
namespace {

constexpr double kSecondsBetween = 0.2;
constexpr std::uint64_t kMostSteps = 10'000;

}  // namespace

StopVote::StopVote(ddp::ProcessGroup& group, std::function<bool()> wanted)
    : group_(group), wanted_(std::move(wanted)), last_vote_(ddprun::MonotonicClock::now()) {}

bool StopVote::passed() {
    if (!wanted_ || passed_) return passed_;
    if (--steps_left_ == 0) vote();
    return passed_;
}

void StopVote::vote() {
    const ddprun::TimePoint now = ddprun::MonotonicClock::now();
    const double step_seconds =
        std::chrono::duration<double>(now - last_vote_).count() / static_cast<double>(steps_between_);
    last_vote_ = now;
    double slowest = 0;
    for (const auto& [wanted, seconds] : gather_numbers<2>(group_, {wanted_() ? 1.0 : 0.0, step_seconds})) {
        passed_ = passed_ || wanted > 0;
        slowest = std::max(slowest, seconds);
    }
    // At most twice as many as before: the first steps are slow and tell little.
    const double wanted_steps = kSecondsBetween / std::max(slowest, 1e-6);
    steps_between_ = std::clamp(static_cast<std::uint64_t>(wanted_steps), std::uint64_t{1},
                                std::min(kMostSteps, 2 * steps_between_));
    steps_left_ = steps_between_;
}

}  // namespace train
