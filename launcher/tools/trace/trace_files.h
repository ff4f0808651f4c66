#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "env/json.h"
#include "env/trace_file.h"

namespace ddprun {

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

}  // namespace ddprun
