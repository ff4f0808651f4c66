#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "launcher/hang_detector.h"

namespace ddprun {

/// Looks at one rank: its process, everything below it, its line of the segment.
HangSample sample_rank(int rank, pid_t pid, const RankLine& line);

/// What /proc/<pid>/stat says: state letter, and processor time in ticks with that of children waited for.
struct ProcessTimes {
    char state = '?';
    std::uint64_t ticks = 0;
    bool operator==(const ProcessTimes&) const = default;
};
/// Pure. nullopt: malformed.
std::optional<ProcessTimes> parse_process_times(std::string_view stat);
/// nullopt: there is no such process.
std::optional<ProcessTimes> times_of(pid_t pid);

}  // namespace ddprun
