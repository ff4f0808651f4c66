#include "launcher/process_sample.h"

#include <fmt/core.h>
#include <unistd.h>

#include "env/file.h"
#include "env/text.h"

namespace ddprun {

std::optional<ProcessSample> parse_process_stat(std::string_view stat, long ticks_per_second, long page_bytes) {
    // "4171 (a name) of any (shape)) S 1 ...": the name ends at the last parenthesis.
    const std::size_t name_end = stat.rfind(')');
    if (name_end == std::string_view::npos || name_end + 2 > stat.size()) return std::nullopt;
    const std::vector<std::string_view> fields = split(trim(stat.substr(name_end + 1)), ' ');
    // proc(5) counts from 1 and the state is its field 3: utime 14, stime 15, rss 24.
    if (fields.size() < 22) return std::nullopt;
    const Result<std::uint64_t> user = parse_uint(fields[11]);
    const Result<std::uint64_t> system = parse_uint(fields[12]);
    const Result<std::uint64_t> pages = parse_uint(fields[21]);
    if (!user || !system || !pages) return std::nullopt;
    return ProcessSample{static_cast<double>(*user + *system) / static_cast<double>(ticks_per_second),
                         *pages * static_cast<std::uint64_t>(page_bytes)};
}

std::optional<ProcessSample> sample_process(pid_t pid) {
    const Result<std::string> stat = read_file(fmt::format("/proc/{}/stat", pid), 4096);
    if (!stat) return std::nullopt;
    return parse_process_stat(*stat, ::sysconf(_SC_CLK_TCK), ::sysconf(_SC_PAGESIZE));
}

}  // namespace ddprun
