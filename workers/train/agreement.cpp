#include "agreement.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace train {
namespace {

constexpr double kSecondsBetween = 0.2;  // of two votes on stopping
constexpr std::uint64_t kMostSteps = 10'000;

/// First byte the code, the rest what the rank has to say of its trouble.
std::string message_of(const std::optional<Trouble>& trouble) {
    return trouble ? static_cast<char>(trouble->code) + trouble->what
                   : std::string(1, static_cast<char>(ExitCode::Ok));
}

ExitCode code_of(const std::string& message) { return static_cast<ExitCode>(message.at(0)); }

/// The same on all ranks: every rank has seen both sides.
std::optional<AgreedTrouble> compare(ddp::ProcessGroup& group, std::span<const ddp::NamedValue> values,
                                     ExitCode code) {
    try {
        ddp::verify_equal(group, values);
    } catch (const ddp::MismatchError& error) {
        return AgreedTrouble{{code, error.what()}, 0};
    }
    return std::nullopt;
}

}  // namespace

std::optional<AgreedTrouble> agree(ddp::ProcessGroup& group, const std::optional<Trouble>& mine,
                                   const Common& common) {
    const std::vector<std::string> all = group.all_gather_bytes(message_of(mine));
    const auto failed =
        std::find_if(all.begin(), all.end(), [](const auto& m) { return code_of(m) != ExitCode::Ok; });
    if (failed == all.end()) {
        if (auto differs = compare(group, common.settings, ExitCode::Usage)) return differs;
        return compare(group, {&common.data, 1}, ExitCode::DataError);
    }
    const bool all_equal = std::all_of(all.begin(), all.end(), [&](const auto& m) { return m == all[0]; });
    const auto rank = static_cast<int>(failed - all.begin());
    const std::string what = failed->substr(1);
    return AgreedTrouble{{code_of(*failed), all_equal ? what : fmt::format("rank {}: {}", rank, what)}, rank};
}

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
