#include "launcher/tools/doctor/doctor.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/json.h"
#include "env/os/run_tool.h"
#include "env/os/system.h"
#include "env/text.h"

namespace ddprun::doctor {
namespace {

constexpr int kMostCpuWorkers = 64;
constexpr Duration kTrialTimeout = std::chrono::seconds(60);  ///< CUDA contexts of many GPUs take long
constexpr Duration kGrace = std::chrono::seconds(10);         ///< from SIGTERM to SIGKILL
constexpr std::size_t kMaxOutput = 1 << 20;
constexpr std::string_view kResultMark = "{\"allreduce_check\":";
constexpr std::size_t kShownLines = 3;

std::vector<std::string> child_environment(const TrialPlan& plan) {
    // The plan's variables come first, because the first of two equal names counts.
    std::vector<std::string> all = plan.environment;
    // Leave out the user's defaults for jobs.
    for (std::string& one : os::own_environment()) {
        if (!one.starts_with("PET_")) all.push_back(std::move(one));
    }
    return all;
}

/// The workers' first lines, else ddprun's.
std::string first_lines(std::string_view output) {
    std::vector<std::string> workers, ours;
    for (const std::string_view line : split(output, '\n')) {
        const std::string text(trim(line));
        if (!text.empty()) (text.starts_with('[') ? workers : ours).push_back(text);
    }
    std::vector<std::string>& lines = workers.empty() ? ours : workers;
    if (lines.size() > kShownLines) lines.resize(kShownLines);
    return lines.empty() ? "it wrote nothing" : join(lines, "; ");
}

}  // namespace

TrialPlan plan_trial(const HostFacts& host, const NvidiaFacts& nvidia, int visible_gpus,
                     const TrialSize& size) {
    TrialPlan plan;
    const bool broken = std::any_of(nvidia.gpus.begin(), nvidia.gpus.end(),
                                    [](const GpuFacts& gpu) { return !gpu.lost.empty(); });
    plan.on_gpus = visible_gpus > 0 && !broken;
    if (visible_gpus > 0 && broken) plan.why = "a GPU is lost";
    plan.workers = plan.on_gpus ? visible_gpus : std::min(cpus_in_quota(host.machine), kMostCpuWorkers);
    // A GPU's links need more bytes to show their speed.
    const std::string bytes = !size.bytes.empty() ? size.bytes : plan.on_gpus ? "256MiB" : "64MiB";
    plan.arguments = {"--standalone", "--quiet",         fmt::format("--nproc-per-node={}", plan.workers),
                      "--no-python",  "allreduce-check", "--seconds",
                      size.seconds,   "--bytes",         bytes,
                      "--json"};
    // The prefix marks the lines of workers, even of a single one.
    plan.environment = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${rank}]: "};
    if (!plan.on_gpus) return plan;
    // Name NCCL: libddp itself would go through the host when it sees fewer devices than NVML.
    plan.arguments.insert(plan.arguments.end(), {"--device", "cuda", "--backend", "nccl"});
    return plan;
}

TrialFacts read_trial(std::string_view output, int exit_code, std::int64_t started_at_ns) {
    TrialFacts facts;
    facts.exit_code = exit_code;
    const std::size_t at = output.find(kResultMark);
    const std::string_view line =
        at == std::string_view::npos ? "" : output.substr(at, output.find('\n', at) - at);
    const Result<Json> result = parse_json_object(line);
    if (exit_code != 0 || !result) {
        facts.state = TrialFacts::State::Failed;
        facts.problem = first_lines(output);
        return facts;
    }
    facts.state = TrialFacts::State::Done;
    std::int64_t first_at_ns = 0;
    take(*result, "workers", facts.workers);
    take(*result, "backend", facts.backend);
    take(*result, "bytes", facts.bytes);
    take(*result, "rounds", facts.rounds);
    take(*result, "seconds", facts.seconds);
    take(*result, "bus_gigabytes_per_second", facts.bus_gigabytes_per_second);
    take(*result, "first_at_ns", first_at_ns);
    facts.start = Duration(first_at_ns - started_at_ns);
    return facts;
}

TrialFacts run_trial(const TrialPlan& plan) {
    TrialFacts facts;
    facts.state = TrialFacts::State::Failed;
    facts.exit_code = 70;
    os::SpawnSpec ddprun;
    ddprun.program = "/proc/self/exe";
    ddprun.arguments = {"ddprun"};
    ddprun.arguments.insert(ddprun.arguments.end(), plan.arguments.begin(), plan.arguments.end());
    ddprun.environment = child_environment(plan);
    const TimePoint started = MonotonicClock::now();
    const Result<ToolEnd> end = run_tool_and_wait(std::move(ddprun), {kTrialTimeout, kMaxOutput, kGrace});
    if (!end) {
        facts.problem = end.error().what;
        return facts;
    }
    facts = read_trial(end->out + end->err, end->exit_code, started.time_since_epoch().count());
    if (!end->is_in_time)
        facts.problem =
            fmt::format("it did not end within {}; {}", format_duration(kTrialTimeout), facts.problem);
    facts.why_cpus = plan.why;
    facts.command = "ddprun " + join(plan.arguments, " ");
    return facts;
}

}  // namespace ddprun::doctor
