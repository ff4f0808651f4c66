#pragma once

#include <string>
#include <vector>

#include "launcher/tools/trace/align.h"
#include "launcher/tools/trace/trace_files.h"

namespace ddprun {

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
