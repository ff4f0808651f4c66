#include "launcher/hang_sample.h"

#include <fmt/core.h>
#include <unistd.h>

#include <vector>

#include "env/file.h"
#include "env/process_tree.h"
#include "env/text.h"
#include "launcher/death_facts.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxProcFile = 64 * 1024;

std::string proc_file(pid_t pid, std::string_view name) {
    return read_file(fmt::format("/proc/{}/{}", pid, name), kMaxProcFile).value_or("");
}

/// Bytes through read and write of any kind: a line into a log counts as well as a block from a disk.
std::uint64_t io_bytes(pid_t pid) {
    const std::string io = proc_file(pid, "io");
    return parse_counter(io, "rchar:").value_or(0) + parse_counter(io, "wchar:").value_or(0);
}

void look_at_segment(HangSample& sample, const RankLine& line) {
    sample.progress_ns = line.progress_ns.load(std::memory_order_relaxed);
    sample.joined = line.joined.load(std::memory_order_acquire) != 0;
    // Finished first: read the other way round, a call that ends in between would look like a new one.
    sample.finished_seq = line.finished_seq.load(std::memory_order_acquire);
    sample.started_seq = line.started_seq.load(std::memory_order_acquire);
    sample.operation = static_cast<SegmentOp>(line.operation.load(std::memory_order_relaxed));
    sample.bytes = line.bytes.load(std::memory_order_relaxed);
}

}  // namespace

std::optional<ProcessTimes> parse_process_times(std::string_view stat) {
    // The program's name may hold spaces and brackets: fields are counted from the last one.
    const std::size_t bracket = stat.rfind(')');
    if (bracket == std::string_view::npos || bracket + 2 >= stat.size()) return std::nullopt;
    const std::vector<std::string_view> fields = split(trim(stat.substr(bracket + 2)), ' ');
    constexpr std::size_t kFirstTime = 11;  // utime, stime, cutime, cstime
    if (fields.size() < kFirstTime + 4 || fields[0].size() != 1) return std::nullopt;
    ProcessTimes times;
    times.state = fields[0][0];
    for (std::size_t i = 0; i < 4; ++i) {
        const Result<std::uint64_t> ticks = parse_uint(fields[kFirstTime + i]);
        if (!ticks) return std::nullopt;
        times.ticks += *ticks;
    }
    return times;
}

std::optional<ProcessTimes> times_of(pid_t pid) { return parse_process_times(proc_file(pid, "stat")); }

HangSample sample_rank(int rank, pid_t pid, const RankLine& line) {
    HangSample sample;
    sample.rank = rank;
    look_at_segment(sample, line);
    std::vector<pid_t> processes = os::descendants_of(pid, "/proc");
    processes.push_back(pid);
    std::uint64_t ticks = 0;
    sample.alive = false;
    for (const pid_t process : processes) {
        const std::optional<ProcessTimes> times = times_of(process);
        if (!times) continue;
        ticks += times->ticks;
        sample.io_bytes += io_bytes(process);
        if (process != pid) continue;
        sample.alive = times->state != 'Z' && times->state != 'X';
        sample.stopped = times->state == 'T' || times->state == 't';
    }
    const auto per_second = static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
    sample.cpu = std::chrono::nanoseconds(ticks * (1'000'000'000 / per_second));
    return sample;
}

}  // namespace ddprun
