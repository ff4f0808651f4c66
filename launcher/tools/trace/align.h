#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddprun {

/// A rank's part in a collective in which no rank leaves before all ranks have entered. Nanoseconds by the
/// rank's clock.
struct Meeting {
    std::uint64_t collective;  ///< equal for the same collective of other ranks
    std::size_t clock;
    std::int64_t entered_ns, left_ns;
};

/// How far one clock is ahead of clock 0. Between two points the offset changes in proportion to the time,
/// because clocks drift.
struct ClockOffset {
    struct Point {
        std::int64_t at_ns;  ///< by that clock
        std::int64_t offset_ns;
    };
    std::vector<Point> points;  ///< in order; never empty
    /// The true offset is within this span of each point, as far as the clock did not drift meanwhile. -1: a
    /// guess, because no collective tells.
    std::int64_t uncertainty_ns = -1;
    std::size_t collectives = 0;  ///< that the offset comes from

    /// The time of clock 0 at the time `ns` of this clock.
    [[nodiscard]] std::int64_t to_reference(std::int64_t ns) const;
};

/// Aligns the clocks 0, 1, ... `guesses` are their offsets to clock 0 by another source, for clocks that have
/// no collective in common with it. Pure.
///
/// Of each collective follows a lower bound of the offset (the other clock's last rank entered before clock
/// 0's first rank left) and an upper bound (the reverse). Within the bounds of ten seconds of collectives,
/// the offset is the median of the differences between the clocks at the moments of leaving, because ranks
/// leave a collective at nearly the same time.
std::vector<ClockOffset> align(const std::vector<Meeting>& meetings,
                               const std::vector<std::int64_t>& guesses);

}  // namespace ddprun
