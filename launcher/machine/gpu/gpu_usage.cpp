#include "launcher/machine/gpu/gpu_usage.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/describe.h"
#include "env/text.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/machine/gpu/nvml.h"

namespace ddprun {
namespace {

constexpr unsigned kMostProcesses = 256;  ///< on one GPU

/// NVML's session, opened once, because `top` asks every second; null without a driver.
const nvml::Session* kept_session() {
    static const Result<nvml::Session> session = nvml::Session::open();
    return session ? &*session : nullptr;
}

std::vector<GpuProcessUsage> usage_on(const nvml::Session& nvml, nvml::Device device) {
    std::vector<GpuProcessUsage> found;
    if (nvml->processes == nullptr) return found;
    nvml::ProcessInfo list[kMostProcesses];
    unsigned count = kMostProcesses;
    if (nvml->processes(device, &count, list) != nvml::Code::Success) return found;
    for (unsigned i = 0; i < count; ++i) {
        found.push_back({static_cast<pid_t>(list[i].pid),
                         list[i].used_bytes == nvml::kUnknownBytes ? 0 : list[i].used_bytes});
    }
    return found;
}

GpuUsage usage_of(const nvml::Session& nvml, nvml::Device device, unsigned index) {
    GpuUsage usage{};
    usage.index = index;
    char uuid[96] = "";
    if (nvml->uuid(device, uuid, sizeof uuid - 1) == nvml::Code::Success) usage.uuid = uuid;
    nvml::Utilization utilization{};
    if (nvml->utilization(device, &utilization) == nvml::Code::Success) usage.busy_percent = utilization.gpu;
    nvml::Memory memory{};
    if (nvml->memory(device, &memory) == nvml::Code::Success) {
        usage.used_bytes = memory.used;
        usage.total_bytes = memory.total;
    }
    usage.processes = usage_on(nvml, device);
    return usage;
}

std::vector<Gpu> as_physical(const std::vector<GpuUsage>& gpus) {
    std::vector<Gpu> physical;
    for (const GpuUsage& gpu : gpus) physical.push_back({std::to_string(gpu.index), gpu.uuid, -1});
    return physical;
}

/// The GPUs on which the driver shows the worker's processes.
WorkerGpus seen_on(const std::vector<GpuUsage>& gpus, const std::vector<pid_t>& pids) {
    WorkerGpus worker;
    for (const GpuUsage& gpu : gpus) {
        bool is_here = false;
        for (const GpuProcessUsage& process : gpu.processes) {
            if (std::find(pids.begin(), pids.end(), process.pid) == pids.end()) continue;
            is_here = true;
            worker.used_bytes += process.used_bytes;
        }
        if (is_here) worker.indices.push_back(gpu.index);
    }
    return worker;
}

/// The GPU that a worker would use by torchrun's convention: the visible one of its local rank.
WorkerGpus presumed(const std::vector<GpuUsage>& gpus, const WorkerProcesses& worker) {
    const std::vector<Gpu> physical = as_physical(gpus);
    const std::vector<Gpu> visible =
        visible_gpus(physical, worker.limits_devices ? std::optional(worker.visible_devices) : std::nullopt);
    const std::size_t place = visible.size() == 1 ? 0 : static_cast<std::size_t>(worker.local_rank);
    WorkerGpus result;
    if (place >= visible.size()) return result;
    for (const GpuUsage& gpu : gpus) {
        const bool is_it = gpu.uuid.empty() ? visible[place].id == std::to_string(gpu.index)
                                            : visible[place].uuid == gpu.uuid;
        if (is_it) result = {{gpu.index}, true, 0};
    }
    return result;
}

}  // namespace

std::vector<GpuUsage> measure_gpus() {
    std::vector<GpuUsage> gpus;
    const nvml::Session* nvml = kept_session();
    unsigned count = 0;
    if (nvml == nullptr || (*nvml)->utilization == nullptr || (*nvml)->memory == nullptr) return gpus;
    if ((*nvml)->count(&count) != nvml::Code::Success) return gpus;
    for (unsigned index = 0; index < count; ++index) {
        nvml::Device device = nullptr;
        if ((*nvml)->handle(index, &device) == nvml::Code::Success)
            gpus.push_back(usage_of(*nvml, device, index));
    }
    return gpus;
}

std::string render_gpu_usage(const std::vector<GpuUsage>& gpus) {
    std::string text;
    for (const GpuUsage& gpu : gpus) {
        text += fmt::format("GPU {}: {} % busy, {} of {}\n", gpu.index, gpu.busy_percent,
                            format_bytes(gpu.used_bytes), format_bytes(gpu.total_bytes));
    }
    return text;
}

std::vector<WorkerGpus> assign_gpu_usage(const std::vector<GpuUsage>& gpus,
                                         const std::vector<WorkerProcesses>& workers) {
    std::vector<WorkerGpus> result;
    for (const WorkerProcesses& worker : workers) result.push_back(seen_on(gpus, worker.pids));
    const bool any = std::any_of(result.begin(), result.end(),
                                 [](const WorkerGpus& worker) { return !worker.indices.empty(); });
    if (any) return result;
    for (std::size_t i = 0; i < workers.size(); ++i) result[i] = presumed(gpus, workers[i]);
    return result;
}

static void describe(Visitor& v, GpuProcessUsage& process) {
    v("pid", process.pid);
    v("used_bytes", process.used_bytes);
}

void describe(Visitor& v, GpuUsage& gpu) {
    v("index", gpu.index);
    v("uuid", gpu.uuid);
    v("busy_percent", gpu.busy_percent);
    v("used_bytes", gpu.used_bytes);
    v("total_bytes", gpu.total_bytes);
    v("processes", gpu.processes);
}

}  // namespace ddprun
