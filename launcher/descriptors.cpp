#include "launcher/descriptors.h"

#include <dirent.h>
#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "env/text.h"

namespace ddprun {
namespace {

/// For the loop, the server, the link, the spawn slots, the terminal's relay and the ends that a child takes over;
/// what a job of one worker opens besides its worker is 25.
constexpr int kOwn = 40;

bool is_shown(const OutputSpec& output, int local_rank, bool to_file_only) {
    if (to_file_only) return false;
    const std::vector<int>& shown = output.local_ranks;
    return shown.empty() || std::find(shown.begin(), shown.end(), local_rank) != shown.end();
}

/// A pipe's end and a file where both are needed; a stream that only goes to a file is the child's alone. The same
/// choice as Output::needs_pipe, before there is an Output.
int for_stream(const OutputSpec& output, int local_rank, Streams stream) {
    const bool teed = has(output.tee.of(local_rank), stream);
    const bool redirected = has(output.redirects.of(local_rank), stream);
    const bool kept = !output.log_dir.empty() && (teed || redirected);
    const bool filtered = !(stream == Streams::Out ? output.stdout_filters : output.stderr_filters).empty();
    const bool rotated = kept && output.max_file_bytes != 0;
    const bool for_report = !kept && stream == Streams::Err;
    if (!is_shown(output, local_rank, kept && !teed) && !filtered && !rotated && !for_report) return 0;
    return kept ? 2 : 1;
}

int for_worker(const OutputSpec& output, int local_rank) {
    const int lifeline = 1;
    const int error_file = output.log_dir.empty() ? 1 : 0;
    return lifeline + error_file + for_stream(output, local_rank, Streams::Out) + for_stream(output, local_rank, Streams::Err);
}

}  // namespace

int descriptors_for_workers(const OutputSpec& output, int workers) {
    int total = 0;
    for (int local_rank = 0; local_rank < workers; ++local_rank) total += for_worker(output, local_rank);
    return total;
}

Status check_descriptor_limit(const OutputSpec& output, int workers, int open_now, std::uint64_t limit) {
    const int needed = open_now + kOwn + descriptors_for_workers(output, workers);
    if (static_cast<std::uint64_t>(needed) <= limit) return {};
    return Error{Errc::InvalidArgument,
                 fmt::format("--nproc-per-node: {} workers need {} open files, the hard limit is {}: raise it (ulimit -Hn, "
                             "or nofile in limits.conf), or start fewer workers per node", workers, needed, limit)};
}

InheritedNumbers inherited_numbers(std::uint64_t worker_limit) {
    constexpr int kSegment = 250;
    constexpr int kLowest = 3;
    if (worker_limit == 0 || worker_limit > kSegment + 1) return {kSegment, kSegment + 1};
    const int segment = std::max(kLowest, static_cast<int>(worker_limit) - 2);
    return {segment, segment + 1};
}

std::vector<int> open_descriptors() {
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
    std::vector<int> open;
    while (const dirent* entry = directory ? ::readdir(directory.get()) : nullptr) {
        const Result<std::int64_t> number = parse_int(entry->d_name);  // "." and ".." have none
        if (number && *number != ::dirfd(directory.get())) open.push_back(static_cast<int>(*number));
    }
    return open;
}

}  // namespace ddprun
