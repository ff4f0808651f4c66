#include "launcher/hang/hang_sample.h"

#include <fmt/core.h>
#include <unistd.h>

#include <vector>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/json.h"
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

/// The values of a rank's array in their order: names would be most of the text.
template <class Sample, class Field>
void each_value(Sample& sample, std::int64_t& cpu_ns, std::int64_t& slowest_ns, std::uint32_t& operation,
                const Field& field) {
    field(sample.rank);
    field(sample.alive);
    field(sample.stopped);
    field(cpu_ns);
    field(sample.io_bytes);
    field(sample.progress_ns);
    field(sample.joined);
    field(sample.started_seq);
    field(sample.finished_seq);
    field(operation);
    field(sample.bytes);
    field(sample.step);
    field(sample.awaited);
    field(slowest_ns);
}

Json json_of(const HangSample& sample) {
    Json list = Json::array();
    std::int64_t cpu_ns = sample.cpu.count(), slowest_ns = sample.slowest_unit.count();
    auto operation = static_cast<std::uint32_t>(sample.operation);
    each_value(sample, cpu_ns, slowest_ns, operation, [&](const auto& value) { list.push_back(value); });
    return list;
}

/// nullopt where a value is absent, of another kind, or does not fit.
std::optional<HangSample> sample_from(const Json& json) {
    HangSample sample;
    std::int64_t cpu_ns = 0, slowest_ns = 0;
    std::uint32_t operation = 0;
    const Json::array_t& values = elements(json);
    std::size_t at = 0, taken = 0;
    each_value(sample, cpu_ns, slowest_ns, operation, [&]<class T>(T& into) {
        const Result<T> value = as<T>(at < values.size() ? values[at] : Json());
        if (value) into = *value;
        taken += value ? 1 : 0;
        ++at;
    });
    if (taken != at) return std::nullopt;
    sample.cpu = Duration(cpu_ns);
    sample.slowest_unit = Duration(slowest_ns);
    sample.operation = static_cast<SegmentOp>(operation);
    return sample;
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

std::string to_json(const NodeLook& look) {
    Json json = {{"ok", true}, {"generation", look.generation}, {"is_running", look.is_running}};
    if (!look.ranks.empty()) json["host"] = look.ranks.front().host;
    json["ranks"] = json_list(look.ranks, [](const HangSample& sample) { return json_of(sample); });
    return to_text(json) + '\n';
}

Result<NodeLook> node_look_from_json(std::string_view line) {
    const Error malformed{Errc::Protocol, "its look at the workers makes no sense", 0};
    const Result<Json> json = parse_json_object(line);
    if (!json) return malformed;
    const Result<std::uint64_t> generation = as<std::uint64_t>(*json, "generation");
    const Result<bool> is_running = as<bool>(*json, "is_running");
    if (!generation || !is_running || !member(*json, "ranks").is_array()) return malformed;
    NodeLook look{*generation, *is_running, {}};
    for (const Json& rank : elements(member(*json, "ranks"))) {
        std::optional<HangSample> sample = sample_from(rank);
        if (!sample) return malformed;
        take(*json, "host", sample->host);
        look.ranks.push_back(*std::move(sample));
    }
    return look;
}

}  // namespace ddprun
