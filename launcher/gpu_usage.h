#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddprun {

/// What NVML says about one GPU of this host, whoever uses it.
struct GpuUsage {
    unsigned index = 0;
    unsigned busy_percent = 0;  ///< of the last sample period in which a kernel ran
    std::uint64_t used_bytes = 0;
    std::uint64_t total_bytes = 0;
};

/// Empty without a driver. NVML is loaded at run time and creates no CUDA context.
std::vector<GpuUsage> measure_gpus();

/// "GPU 0: 87 % busy, 12 GiB of 80 GiB" lines; "" for none. Pure.
std::string render_gpu_usage(const std::vector<GpuUsage>& gpus);

}  // namespace ddprun
