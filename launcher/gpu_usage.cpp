#include "launcher/gpu_usage.h"

#include <fmt/core.h>

#include "env/text.h"
#include "launcher/nvml.h"

namespace ddprun {
namespace {

/// Loaded once and kept: `top` asks every second. Null without a driver.
const nvml::Session* kept_session() {
    static const Result<nvml::Session> session = nvml::Session::open();
    return session ? &*session : nullptr;
}

GpuUsage usage_of(const nvml::Session& nvml, nvml::Device device, unsigned index) {
    GpuUsage usage{};
    usage.index = index;
    nvml::Utilization utilization{};
    if (nvml->utilization(device, &utilization) == nvml::Code::Success) usage.busy_percent = utilization.gpu;
    nvml::Memory memory{};
    if (nvml->memory(device, &memory) == nvml::Code::Success) {
        usage.used_bytes = memory.used;
        usage.total_bytes = memory.total;
    }
    return usage;
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
        if ((*nvml)->handle(index, &device) == nvml::Code::Success) gpus.push_back(usage_of(*nvml, device, index));
    }
    return gpus;
}

std::string render_gpu_usage(const std::vector<GpuUsage>& gpus) {
    std::string text;
    for (const GpuUsage& gpu : gpus) {
        text += fmt::format("GPU {}: {} % busy, {} of {}\n", gpu.index, gpu.busy_percent, format_bytes(gpu.used_bytes),
                            format_bytes(gpu.total_bytes));
    }
    return text;
}

}  // namespace ddprun
