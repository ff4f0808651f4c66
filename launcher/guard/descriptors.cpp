#include "launcher/guard/descriptors.h"

#include <dirent.h>
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <bit>
#include <memory>

#include "env/text.h"
#include "launcher/output/kept_output.h"

namespace ddprun {
namespace {

/// Descriptors of the loop, the server, the link, the spawn slots, the terminal's relay and a child's ends. A
/// job of one worker opens 25 of these.
constexpr int kOwn = 40;

/// Counts a pipe's end, and a file that we write; a stream that only goes to a file is the worker's alone.
int for_stream(const OutputSpec& output, int local_rank, Streams stream) {
    const StreamRoute route = route_of(output, local_rank, stream, !output.log_dir.empty());
    if (!route.needs_pipe) return 0;
    return route.to_file ? 2 : 1;
}

int for_worker(const OutputSpec& output, int local_rank) {
    const int lifeline = 1;
    return lifeline + for_stream(output, local_rank, Streams::Out) +
           for_stream(output, local_rank, Streams::Err);
}

}  // namespace

DescriptorLimit raise_descriptor_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
    DescriptorLimit result{limit.rlim_cur, limit.rlim_max};
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) result.now = result.before;
    return result;
}

int descriptors_for_workers(const OutputSpec& output, int workers) {
    int total = 0;
    for (int local_rank = 0; local_rank < workers; ++local_rank) total += for_worker(output, local_rank);
    return total;
}

Status check_descriptor_limit(const OutputSpec& output, int workers, int open_now, std::uint64_t limit) {
    const int needed = open_now + kOwn + descriptors_for_workers(output, workers);
    if (static_cast<std::uint64_t>(needed) <= limit) return {};
    return Error{
        Errc::InvalidArgument,
        fmt::format(
            "--nproc-per-node: {} workers need {} open files, the hard limit is {}: raise it (ulimit -Hn, "
            "or nofile in limits.conf), or start fewer workers per node",
            workers, needed, limit)};
}

InheritedNumbers inherited_numbers(std::uint64_t worker_limit) {
    constexpr int kSegment = 250;
    constexpr int kLowest = 3;
    constexpr int kCount = 4;
    const bool has_room = worker_limit == 0 || worker_limit >= kSegment + kCount;
    const int first = has_room ? kSegment : std::max(kLowest, static_cast<int>(worker_limit) - kCount);
    return {first, first + 1, first + 2, first + 3};
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

std::size_t pipe_bytes(int workers) {
    constexpr std::size_t kBudget = 32 * 1024 * 1024, kLeast = 16 * 1024, kMost = 1024 * 1024;
    const auto pipes = 2 * static_cast<std::size_t>(std::max(workers, 1));
    return std::clamp(std::bit_floor(kBudget / pipes), kLeast, kMost);
}

}  // namespace ddprun
