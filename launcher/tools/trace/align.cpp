#include "launcher/tools/trace/trace.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

namespace ddprun {
namespace {

constexpr std::int64_t kWindow = 10'000'000'000;

/// The ranks of one clock in one collective.
struct Side {
    std::int64_t last_entered = std::numeric_limits<std::int64_t>::min();
    std::int64_t first_left = std::numeric_limits<std::int64_t>::max();
};
/// A collective in which ranks of both clocks took part.
struct Shared {
    Side reference, other;
};

ClockOffset::Point point_of(std::vector<Shared>::const_iterator begin,
                            std::vector<Shared>::const_iterator end, std::int64_t& uncertainty) {
    std::int64_t lower = std::numeric_limits<std::int64_t>::min(),
                 upper = std::numeric_limits<std::int64_t>::max();
    std::vector<std::int64_t> apart;
    for (auto one = begin; one != end; ++one) {
        lower = std::max(lower, one->other.last_entered - one->reference.first_left);
        upper = std::min(upper, one->other.first_left - one->reference.last_entered);
        apart.push_back(one->other.first_left - one->reference.first_left);
    }
    const auto middle = apart.begin() + (end - begin) / 2;
    std::nth_element(apart.begin(), middle, apart.end());
    const bool contradict = lower > upper;  // the clock drifted by more than a collective takes
    uncertainty = std::max(uncertainty, contradict ? lower - upper : upper - lower);
    const std::int64_t at = begin[(end - begin) / 2].other.first_left;
    return {at, contradict ? *middle : std::clamp(*middle, lower, upper)};
}

ClockOffset offset_from(std::vector<Shared> shared) {
    std::ranges::sort(shared, {}, [](const Shared& one) { return one.other.first_left; });
    ClockOffset offset{.points = {}, .uncertainty_ns = 0, .collectives = shared.size()};
    for (auto begin = shared.cbegin(); begin != shared.cend();) {
        const std::int64_t until = begin->other.first_left + kWindow;
        const auto end = std::find_if(begin, shared.cend(),
                                      [&](const Shared& one) { return one.other.first_left >= until; });
        offset.points.push_back(point_of(begin, end, offset.uncertainty_ns));
        begin = end;
    }
    return offset;
}

}  // namespace

std::int64_t ClockOffset::to_reference(std::int64_t ns) const {
    const auto after = std::ranges::lower_bound(points, ns, {}, &Point::at_ns);
    if (after == points.begin()) return ns - after->offset_ns;
    const Point& before = *std::prev(after);
    if (after == points.end()) return ns - before.offset_ns;
    const double part =
        static_cast<double>(ns - before.at_ns) / static_cast<double>(after->at_ns - before.at_ns);
    return ns - before.offset_ns -
           static_cast<std::int64_t>(part * static_cast<double>(after->offset_ns - before.offset_ns));
}

std::vector<ClockOffset> align(const std::vector<Meeting>& meetings,
                               const std::vector<std::int64_t>& guesses) {
    std::map<std::uint64_t, std::vector<std::optional<Side>>> collectives;
    for (const Meeting& one : meetings) {
        std::vector<std::optional<Side>>& sides = collectives[one.collective];
        sides.resize(guesses.size());
        std::optional<Side>& side = sides[one.clock];
        if (!side) side.emplace();
        side->last_entered = std::max(side->last_entered, one.entered_ns);
        side->first_left = std::min(side->first_left, one.left_ns);
    }
    std::vector<ClockOffset> offsets;
    for (std::size_t clock = 0; clock < guesses.size(); ++clock) {
        std::vector<Shared> shared;
        for (const auto& [_, sides] : collectives) {
            if (clock > 0 && sides[0] && sides[clock]) shared.push_back({*sides[0], *sides[clock]});
        }
        offsets.push_back(shared.empty() ? ClockOffset{.points = {{0, guesses[clock]}}}
                                         : offset_from(std::move(shared)));
    }
    return offsets;
}

}  // namespace ddprun
