#include "launcher/hang/hang_sample.h"

#include <fmt/core.h>
#include <unistd.h>

#include <vector>

#include "env/describe.h"
#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/process_tree.h"
#include "env/text.h"
#include "launcher/ends/explain.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxProcFile = 64 * 1024;

std::string proc_file(pid_t pid, std::string_view name) {
    return read_file(fmt::format("{}/{}/{}", own_proc(), pid, name), kMaxProcFile).value_or("");
}

/// Bytes through read and write of any kind: a log line counts as well as a block from a disk.
std::uint64_t io_bytes(pid_t pid) {
    const std::string io = proc_file(pid, "io");
    return parse_counter(io, "rchar:").value_or(0) + parse_counter(io, "wchar:").value_or(0);
}

void read_segment(HangSample& sample, const RankLine& line) {
    sample.awaited = line.awaited_until_ns.load(std::memory_order_relaxed) >
                     MonotonicClock::now().time_since_epoch().count();
    sample.progress_ns = line.progress_ns.load(std::memory_order_relaxed);
    sample.step = line.step.load(std::memory_order_relaxed);
    sample.joined = line.joined.load(std::memory_order_acquire) != 0;
    // Read finished_seq first: in the other order, a call that ends in between would look like a new one.
    sample.finished_seq = line.finished_seq.load(std::memory_order_acquire);
    sample.started_seq = line.started_seq.load(std::memory_order_acquire);
    sample.operation = static_cast<SegmentOp>(line.operation.load(std::memory_order_relaxed));
    sample.bytes = line.bytes.load(std::memory_order_relaxed);
}

}  // namespace

HangSample sample_rank(int rank, pid_t pid, const RankLine& line) {
    HangSample sample;
    sample.rank = rank;
    read_segment(sample, line);
    std::vector<pid_t> processes = os::descendants_of(pid);
    processes.push_back(pid);
    std::uint64_t ticks = 0;
    sample.alive = false;
    for (const pid_t process : processes) {
        const std::optional<ProcStat> stat = proc_stat_of(process);
        if (!stat) continue;
        ticks += stat->ticks + stat->child_ticks;
        sample.io_bytes += io_bytes(process);
        if (process != pid) continue;
        sample.alive = !stat->is_dead();
        sample.stopped = stat->is_stopped();
    }
    const auto per_second = static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
    sample.cpu = std::chrono::nanoseconds(ticks * (1'000'000'000 / per_second));
    return sample;
}

static void describe(Visitor& v, HangSample& sample) {
    auto operation = static_cast<unsigned>(sample.operation);
    v("rank", sample.rank);
    v("alive", sample.alive);
    v("stopped", sample.stopped);
    v("cpu_ns", sample.cpu);
    v("io_bytes", sample.io_bytes);
    v("progress_ns", sample.progress_ns);
    v("joined", sample.joined);
    v("started_seq", sample.started_seq);
    v("finished_seq", sample.finished_seq);
    v("operation", operation);
    v("bytes", sample.bytes);
    v("step", sample.step);
    v("awaited", sample.awaited);
    v("slowest_unit_ns", sample.slowest_unit);
    sample.operation = static_cast<SegmentOp>(operation);
}

void describe(Visitor& v, NodeLook& look) {
    v("generation", look.generation);
    v("is_running", look.is_running);
    v.usually("host", look.host);
    v.rows("ranks", look.ranks);
}

}  // namespace ddprun
