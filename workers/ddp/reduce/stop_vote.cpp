#include "ddp/stop_vote.h"

#include <algorithm>
#include <vector>

namespace ddp {
namespace {

constexpr double kSecondsBetween = 0.2;  // between two votes
constexpr std::uint64_t kMostSteps = 10'000;

/// What one rank says in a vote.
struct Vote {
    double is_asked = 0;
    double step_seconds = 0;
};

std::vector<Vote> gather(ProcessGroup& group, const Vote& mine) {
    // With one rank there is no other, and on a GPU the exchange would wait for the device.
    return group.size() == 1 ? std::vector{mine} : group.all_gather_values(mine);
}

}  // namespace

StopVote::StopVote(ProcessGroup& group) : group_(group), last_vote_(std::chrono::steady_clock::now()) {}

bool StopVote::passed(DistributedDataParallel& model, const std::function<bool()>& wanted) {
    if (!model.carries_stop()) return passed(wanted);
    if (wanted()) model.request_stop();
    return model.stop_requested();
}

bool StopVote::passed(const std::function<bool()>& wanted) {
    if (passed_ || --steps_left_ > 0) return passed_;
    const auto now = std::chrono::steady_clock::now();
    const double step_seconds =
        std::chrono::duration<double>(now - last_vote_).count() / static_cast<double>(steps_between_);
    last_vote_ = now;
    double slowest = 0;
    for (const Vote& vote : gather(*group_, {wanted() ? 1.0 : 0.0, step_seconds})) {
        passed_ = passed_ || vote.is_asked > 0;
        slowest = std::max(slowest, vote.step_seconds);
    }
    // At most twice the last number: the first steps are slow and not typical.
    const double wanted_steps = kSecondsBetween / std::max(slowest, 1e-6);
    steps_between_ = std::clamp(static_cast<std::uint64_t>(wanted_steps), std::uint64_t{1},
                                std::min(kMostSteps, 2 * steps_between_));
    steps_left_ = steps_between_;
    return passed_;
}

}  // namespace ddp
