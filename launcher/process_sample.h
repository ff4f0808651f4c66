#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace ddprun {

/// What one process has used so far.
struct ProcessSample {
    double cpu_seconds = 0;  ///< user and system, of all threads
    std::uint64_t rss_bytes = 0;
    bool operator==(const ProcessSample&) const = default;
};

/// Reads the text of /proc/<pid>/stat. Pure. nullopt: malformed.
std::optional<ProcessSample> parse_process_stat(std::string_view stat, long ticks_per_second, long page_bytes);
/// nullopt: there is no such process.
std::optional<ProcessSample> sample_process(pid_t pid);

}  // namespace ddprun
