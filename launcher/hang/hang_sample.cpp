#include "launcher/hang/hang_sample.h"

#include <fmt/core.h>
#include <unistd.h>

#include <vector>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/proc_stat.h"
#include "env/json.h"
#include "env/os/process_tree.h"
#include "env/text.h"
#include "launcher/report/explain.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxProcFile = 64 * 1024;

std::string proc_file(pid_t pid, std::string_view name) {
    return read_file(fmt::format("{}/{}/{}", own_proc(), pid, name), kMaxProcFile).value_or("");
}

/// Bytes through read and write of any kind: a line into a log counts as well as a block from a disk.
std::uint64_t io_bytes(pid_t pid) {
    const std::string io = proc_file(pid, "io");
    return parse_counter(io, "rchar:").value_or(0) + parse_counter(io, "wchar:").value_or(0);
}

void look_at_segment(HangSample& sample, const RankLine& line) {
    sample.awaited = line.awaited_until_ns.load(std::memory_order_relaxed) >
                     MonotonicClock::now().time_since_epoch().count();
    sample.progress_ns = line.progress_ns.load(std::memory_order_relaxed);
    sample.step = line.step.load(std::memory_order_relaxed);
    sample.joined = line.joined.load(std::memory_order_acquire) != 0;
    // Finished first: read the other way round, a call that ends in between would look like a new one.
    sample.finished_seq = line.finished_seq.load(std::memory_order_acquire);
    sample.started_seq = line.started_seq.load(std::memory_order_acquire);
    sample.operation = static_cast<SegmentOp>(line.operation.load(std::memory_order_relaxed));
    sample.bytes = line.bytes.load(std::memory_order_relaxed);
}

/// Positions in a rank's array: names would be most of the text.
struct At {
    enum : std::uint8_t {
        Rank,
        Alive,
        Stopped,
        Cpu,
        Io,
        Progress,
        Joined,
        Started,
        Finished,
        Operation,
        Bytes,
        Step,
        Awaited
    };
};

Json json_of(const HangSample& sample) {
    return Json::list({sample.rank, sample.alive, sample.stopped, sample.cpu.count(), sample.io_bytes,
                       sample.progress_ns, sample.joined, sample.started_seq, sample.finished_seq,
                       static_cast<std::uint32_t>(sample.operation), sample.bytes, sample.step,
                       sample.awaited});
}

/// False where the field is absent, of another kind, or does not fit.
template <class T>
bool take_field(const std::optional<T>& field, T& into) {
    if (field) into = *field;
    return field.has_value();
}

std::optional<HangSample> sample_from(const Json& json) {
    HangSample sample;
    std::int64_t cpu_ns = 0;
    std::uint64_t operation = 0;
    const bool is_whole = take_field(json[At::Rank].as_int(), sample.rank) &&
                          take_field(json[At::Alive].as_bool(), sample.alive) &&
                          take_field(json[At::Stopped].as_bool(), sample.stopped) &&
                          take_field(json[At::Cpu].as_int64(), cpu_ns) &&
                          take_field(json[At::Io].as_uint64(), sample.io_bytes) &&
                          take_field(json[At::Progress].as_int64(), sample.progress_ns) &&
                          take_field(json[At::Joined].as_bool(), sample.joined) &&
                          take_field(json[At::Started].as_uint64(), sample.started_seq) &&
                          take_field(json[At::Finished].as_uint64(), sample.finished_seq) &&
                          take_field(json[At::Operation].as_uint64(), operation) &&
                          take_field(json[At::Bytes].as_uint64(), sample.bytes) &&
                          take_field(json[At::Step].as_uint64(), sample.step) &&
                          take_field(json[At::Awaited].as_bool(), sample.awaited);
    if (!is_whole || !std::in_range<std::uint32_t>(operation)) return std::nullopt;
    sample.cpu = Duration(cpu_ns);
    sample.operation = static_cast<SegmentOp>(operation);
    return sample;
}

}  // namespace

HangSample sample_rank(int rank, pid_t pid, const RankLine& line) {
    HangSample sample;
    sample.rank = rank;
    look_at_segment(sample, line);
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
        sample.stopped = stat->state == 'T' || stat->state == 't';
    }
    const auto per_second = static_cast<std::uint64_t>(::sysconf(_SC_CLK_TCK));
    sample.cpu = std::chrono::nanoseconds(ticks * (1'000'000'000 / per_second));
    return sample;
}

std::string to_json(const NodeLook& look) {
    Json json = {{"ok", true}, {"generation", look.generation}, {"is_running", look.is_running}};
    if (!look.ranks.empty()) json.set("host", look.ranks.front().host);
    json.set("ranks", json_list(look.ranks, [](const HangSample& sample) { return json_of(sample); }));
    return to_text(json) + '\n';
}

Result<NodeLook> node_look_from_json(std::string_view line) {
    const Error malformed{Errc::Protocol, "its look at the workers makes no sense", 0};
    const std::optional<Json> json = parse_json_object(line);
    if (!json) return malformed;
    const std::optional<std::uint64_t> generation = (*json)["generation"].as_uint64();
    const std::optional<bool> is_running = (*json)["is_running"].as_bool();
    if (!generation || !is_running || !(*json)["ranks"].is_list()) return malformed;
    NodeLook look{*generation, *is_running, {}};
    for (const Json& rank : (*json)["ranks"].elements()) {
        std::optional<HangSample> sample = sample_from(rank);
        if (!sample) return malformed;
        take(*json, "host", sample->host);
        look.ranks.push_back(*std::move(sample));
    }
    return look;
}

}  // namespace ddprun
