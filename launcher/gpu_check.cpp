#include "launcher/gpu_check.h"

#include <fmt/core.h>

#include <algorithm>

#include "launcher/gpu_health.h"

namespace ddprun {
namespace {

constexpr std::string_view kOverride = "--gpu-check=warn starts all the same";

const GpuFacts* facts_of(const NvidiaFacts& nvidia, const Gpu& gpu) {
    const auto same = [&](const GpuFacts& facts) {
        return gpu.uuid.empty() ? gpu.id == fmt::format("{}", facts.index) : gpu.uuid == facts.uuid;
    };
    const auto found = std::find_if(nvidia.gpus.begin(), nvidia.gpus.end(), same);
    return found == nvidia.gpus.end() ? nullptr
                                      : &*found;  // a MIG device: its parent is not known from its name
}

std::vector<Gpu> physical_gpus(const NvidiaFacts& nvidia) {
    std::vector<Gpu> gpus;
    for (const GpuFacts& facts : nvidia.gpus)
        gpus.push_back({fmt::format("{}", facts.index), facts.uuid, facts.numa_node});
    return gpus;
}

void sort_in(GpuVerdict& verdict, GpuCheck check, Severity severity, const std::string& line) {
    if (severity < Severity::Warning) return;
    const bool refuses =
        check == GpuCheck::Refuse || (check == GpuCheck::Auto && severity == Severity::Error);
    if (refuses) verdict.refusals.push_back(fmt::format("{}; {}", line, kOverride));
    else verdict.warnings.push_back(line);
}

}  // namespace

bool looks_at_gpus(const JobSpec& spec, const Machine& machine) {
    switch (spec.gpu_check) {
        case GpuCheck::Off:
            return false;
        case GpuCheck::Warn:
        case GpuCheck::Refuse:
            return true;
        case GpuCheck::Auto:
            break;
    }
    const bool asks = spec.workers.kind == WorkerCount::Kind::Gpu ||
                      spec.workers.kind == WorkerCount::Kind::Auto || spec.narrow_gpus ||
                      spec.virtual_local_rank;
    return asks && machine.gpus > 0;
}

GpuVerdict judge_job_gpus(const JobSpec& spec, int workers, const NvidiaFacts& nvidia,
                          const std::optional<std::string>& visible_devices) {
    GpuVerdict verdict;
    if (nvidia.mismatch) sort_in(verdict, spec.gpu_check, Severity::Error, nvidia.problem);
    if (!nvidia.problem.empty()) return verdict;
    const std::vector<Gpu> visible = visible_gpus(physical_gpus(nvidia), visible_devices);
    for (std::size_t rank = 0; rank < visible.size() && rank < static_cast<std::size_t>(workers); ++rank) {
        const GpuFacts* facts = facts_of(nvidia, visible[rank]);
        if (facts == nullptr) continue;
        for (const Finding& finding : gpu_health(*facts)) {
            std::string line = fmt::format("{} (local rank {}): {}", finding.subject, rank, finding.what);
            if (!finding.remedy.empty()) line += ": " + finding.remedy;
            sort_in(verdict, spec.gpu_check, finding.severity, line);
        }
    }
    if (static_cast<int>(visible.size()) < workers) {
        sort_in(verdict, spec.gpu_check, Severity::Warning,
                fmt::format("{} workers and {} visible GPUs: --nproc-per-node, CUDA_VISIBLE_DEVICES", workers,
                            visible.size()));
    }
    return verdict;
}

}  // namespace ddprun
