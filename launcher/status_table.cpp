#include <fmt/core.h>

#include <algorithm>

#include "env/text.h"
#include "launcher/job_status.h"
#include "launcher/wrap.h"

namespace ddprun {
namespace {

std::string span(double seconds) {
    return format_duration(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
}

/// Other people's words on a terminal: no control characters.
std::string printable(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
    return text;
}

std::string line_of(std::string text, int width) {
    text = printable(std::move(text));
    return (width > 0 ? wrap(text, static_cast<std::size_t>(width), 4) : text) + '\n';
}

std::string title(const JobStatus& status) {
    std::string text = fmt::format("job {} (run id {}, pid {} on {}): {}", status.job, status.run_id, status.pid,
                                   status.host, status.phase);
    text += fmt::format(", generation {}", status.generation);
    if (status.is_head) text += fmt::format(", {} of {} restarts", status.restarts_used, status.max_restarts);
    text += fmt::format(", {} worker{}", status.world_size, status.world_size == 1 ? "" : "s");
    if (status.nodes > 1) text += fmt::format(" on {} nodes", status.nodes);
    return text + fmt::format(", {}, {}", span(status.seconds), status.program);
}

enum class Align : std::uint8_t { Left, Right };
constexpr int kAlways = 100;

struct Column {
    std::string name;
    std::size_t width = 0;  ///< at least; what is wider makes it so
    Align align = Align::Right;
    int keep = kAlways;     ///< where room is short the smallest goes first
    std::vector<std::string> cells = {};
};

const HostStatus* host_of(const JobStatus& status, const WorkerStatus& worker) {
    const auto node = static_cast<std::size_t>(worker.node);
    return node < status.hosts.size() ? &status.hosts[node] : nullptr;
}

/// "0,1", "3?" where it is presumed.
std::string gpu_names(const WorkerStatus& worker) {
    std::string names;
    for (const unsigned index : worker.gpus.indices) names += (names.empty() ? "" : ",") + std::to_string(index);
    if (names.empty()) return "-";
    return worker.gpus.is_presumed ? names + '?' : names;
}

/// Of the busiest of its GPUs.
std::string gpu_busy(const HostStatus* host, const WorkerStatus& worker) {
    if (host == nullptr || worker.gpus.indices.empty()) return "-";
    unsigned busy = 0;
    for (const GpuUsage& gpu : host->gpus) {
        const auto& mine = worker.gpus.indices;
        if (std::find(mine.begin(), mine.end(), gpu.index) != mine.end()) busy = std::max(busy, gpu.busy_percent);
    }
    return std::to_string(busy);
}

constexpr std::size_t kMostHostWidth = 20;
constexpr std::size_t kUsefulCollective = 12;

std::vector<Column> columns_of(const JobStatus* before, const JobStatus& now) {
    enum { Host, Rank, Pid, State, Cpu, Rss, Gpu, GpuBusy, GpuMemory, Step, StepRate, Comm, Silent, Collective };
    std::vector<Column> columns = {{"HOST", 4, Align::Left, 8},  {"RANK", 5},          {"PID", 8, Align::Right, 1}, {"STATE", 8, Align::Left},
                                   {"CPU%", 5},                  {"RSS", 8, Align::Right, 4}, {"GPU", 4, Align::Right, 9}, {"GPU%", 4, Align::Right, 7},
                                   {"GPU MEM", 8, Align::Right, 3}, {"STEP", 8, Align::Right, 6}, {"STEPS/S", 7, Align::Right, 10},
                                   {"COMM%", 5, Align::Right, 5}, {"SILENT FOR", 10, Align::Left, 2}, {"COLLECTIVE", 0, Align::Left}};
    for (const WorkerStatus& worker : now.workers) {
        const WorkerRates rate = rates_between(before, worker);
        const HostStatus* const host = host_of(now, worker);
        const auto put = [&](int column, std::string text) { columns[static_cast<std::size_t>(column)].cells.push_back(printable(std::move(text))); };
        const auto of_libddp = [&](std::string text) { return worker.uses_libddp ? text : "-"; };
        put(Host, host == nullptr ? "?" : host->host.substr(0, kMostHostWidth));
        put(Rank, std::to_string(worker.rank));
        put(Pid, std::to_string(worker.pid));
        put(State, worker.state);
        put(Cpu, fmt::format("{:.0f}", rate.cpu_percent));
        put(Rss, format_bytes(worker.rss_bytes));
        put(Gpu, gpu_names(worker));
        put(GpuBusy, gpu_busy(host, worker));
        put(GpuMemory, worker.gpus.used_bytes == 0 ? "-" : format_bytes(worker.gpus.used_bytes));
        put(Step, of_libddp(std::to_string(worker.step)));
        put(StepRate, of_libddp(fmt::format("{:.1f}", rate.steps_per_second)));
        put(Comm, of_libddp(fmt::format("{:.0f}", rate.comm_percent)));
        put(Silent, span(worker.quiet_seconds));
        put(Collective, worker.collective);
    }
    const bool has_gpus = std::any_of(now.hosts.begin(), now.hosts.end(), [](const HostStatus& host) { return !host.gpus.empty(); });
    std::erase_if(columns, [&](const Column& column) {
        return (column.name == "HOST" && now.hosts.size() < 2) || (column.name.starts_with("GPU") && !has_gpus);
    });
    return columns;
}

/// Leaves out what there is no room for, the least telling first.
void fit(std::vector<Column>& columns, std::size_t width) {
    for (;;) {
        std::size_t needed = kUsefulCollective;
        for (const Column& column : columns) needed += column.width + 1;
        const auto least = std::min_element(columns.begin(), columns.end(), [](const Column& a, const Column& b) { return a.keep < b.keep; });
        if (needed <= width || least->keep == kAlways) return;
        columns.erase(least);
    }
}

std::string table(std::vector<Column> columns, std::size_t rows, int width) {
    for (Column& column : columns) {
        if (&column == &columns.back()) continue;
        column.width = std::max(column.width, column.name.size());
        for (const std::string& cell : column.cells) column.width = std::max(column.width, cell.size());
    }
    if (width > 0) fit(columns, static_cast<std::size_t>(width));
    std::string text;
    for (std::size_t row = 0; row <= rows; ++row) {
        std::string line;
        for (const Column& column : columns) {
            const std::string& cell = row == 0 ? column.name : column.cells[row - 1];
            if (!line.empty()) line += ' ';
            line += column.align == Align::Right ? fmt::format("{:>{}}", cell, column.width) : fmt::format("{:<{}}", cell, column.width);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        if (width > 0 && line.size() > static_cast<std::size_t>(width)) line.resize(static_cast<std::size_t>(width));
        text += line + '\n';
    }
    return text;
}

}  // namespace

std::string render_status(const JobStatus* before, const JobStatus& now, int width) {
    std::string text = line_of(title(now), width);
    if (!now.log_directory.empty()) text += line_of("logs: " + now.log_directory, width);
    for (const HostStatus& host : now.hosts) {
        if (!host.trouble.empty()) text += line_of(fmt::format("node {}: {}", host.host, host.trouble), width);
    }
    if (now.workers.empty()) return text;
    text += table(columns_of(before, now), now.workers.size(), width);
    // Of several nodes the workers' rows tell enough.
    if (now.hosts.size() == 1) text += render_gpu_usage(now.hosts.front().gpus);
    return text;
}

}  // namespace ddprun
