#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "env/json.h"
#include "env/trace_file.h"

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
/// Each collective gives a lower bound of the offset (the other clock's last rank entered before clock 0's
/// first rank left) and an upper bound (the reverse). Within the bounds of ten seconds of collectives, the
/// offset is the median difference between the clocks at the moments of leaving. Ranks leave a collective at
/// nearly the same time.
std::vector<ClockOffset> align(const std::vector<Meeting>& meetings,
                               const std::vector<std::int64_t>& guesses);

/// A record of a trace file, by the clock of its process.
struct TraceSpan {
    TraceKind kind = TraceKind::None;
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;  ///< 0: it had not ended
    std::int64_t waiting_ns = 0;
    std::uint64_t seq = 0, bytes = 0, world = 0;
    std::uint32_t rank = 0, generation = 0, thread = 0;
    std::uint16_t group = 0;
    std::string name = {};  ///< of a collective its operation
};

/// The clock of a process.
struct TraceClock {
    std::string id;            ///< equal where the clocks are the same one
    std::int64_t wall_ns = 0;  ///< nanoseconds from 1970 to its zero, as the host's date says
};

/// One process of the job.
struct TracedProcess {
    std::string host;
    std::uint32_t pid = 0;
    TraceClock clock;
    std::uint64_t lost = 0;             ///< spans that later ones have overwritten
    std::vector<TraceSpan> spans = {};  ///< in the order of their begin
};

/// One line of a ddprun's events (docs/events.md).
struct TracedEvent {
    std::int64_t at_ns = 0;
    TraceClock clock;
    Json line;
};
struct TracedLauncher {
    std::string host;
    std::vector<TracedEvent> events;
};

struct TraceFiles {
    std::vector<TracedProcess> processes = {};
    std::vector<TracedLauncher> launchers = {};
    std::vector<std::string> remarks = {};  ///< files that are left out, and why
};

/// Reads the trace files of a directory, also while they are written. Error: System (the directory), NotFound
/// (it has no trace file), both ready to be shown.
Result<TraceFiles> read_trace_files(const std::string& directory);

struct MergedTrace {
    std::string json;                  ///< in the trace-event format of Chrome, which Perfetto reads
    std::vector<std::string> remarks;  ///< about clocks and lost spans, for people
};

/// Merges the files of a job: each rank is a process, with a track for each kind of span; each ddprun is one
/// too. Times begin at the first span. Pure.
MergedTrace merge_trace(const TraceFiles& files);

/// The collectives that align clocks; `clock_of` are the processes' clocks.
std::vector<Meeting> meetings_of(const TraceFiles& files, const std::vector<std::size_t>& clock_of);

}  // namespace ddprun
