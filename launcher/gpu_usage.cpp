#include "launcher/gpu_usage.h"

#include <dlfcn.h>
#include <fmt/core.h>
#include <unistd.h>

#include "env/text.h"

namespace ddprun {
namespace {

/// As in nvml.h, whose ABI is stable: nvmlUtilization_t and nvmlMemory_t.
struct Utilization {
    unsigned gpu, memory;
};
struct Memory {
    unsigned long long total, free, used;
};

struct Nvml {
    int (*init)() = nullptr;
    int (*count)(unsigned*) = nullptr;
    int (*handle)(unsigned, void**) = nullptr;
    int (*utilization)(void*, Utilization*) = nullptr;
    int (*memory)(void*, Memory*) = nullptr;
    bool ready = false;
};

template <class Function>
bool find(void* library, Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    return function != nullptr;
}

/// Loaded once and kept: `top` asks every second.
const Nvml& nvml() {
    static const Nvml loaded = [] {
        Nvml api;
        if (::access("/dev/nvidiactl", F_OK) != 0 && ::access("/dev/dxg", F_OK) != 0) return api;
        void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) return api;
        api.ready = find(library, api.init, "nvmlInit_v2") && find(library, api.count, "nvmlDeviceGetCount_v2") &&
                    find(library, api.handle, "nvmlDeviceGetHandleByIndex_v2") &&
                    find(library, api.utilization, "nvmlDeviceGetUtilizationRates") &&
                    find(library, api.memory, "nvmlDeviceGetMemoryInfo") && api.init() == 0;
        return api;
    }();
    return loaded;
}

}  // namespace

std::vector<GpuUsage> measure_gpus() {
    std::vector<GpuUsage> gpus;
    unsigned count = 0;
    if (!nvml().ready || nvml().count(&count) != 0) return gpus;
    for (unsigned index = 0; index < count; ++index) {
        void* device = nullptr;
        if (nvml().handle(index, &device) != 0) continue;
        GpuUsage usage{};
        usage.index = index;
        Utilization utilization{};
        if (nvml().utilization(device, &utilization) == 0) usage.busy_percent = utilization.gpu;
        Memory memory{};
        if (nvml().memory(device, &memory) == 0) {
            usage.used_bytes = memory.used;
            usage.total_bytes = memory.total;
        }
        gpus.push_back(usage);
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
