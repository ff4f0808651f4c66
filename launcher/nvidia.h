#pragma once

#include <string>
#include <vector>

#include "launcher/discover.h"

namespace ddprun {

struct PhysicalGpus {
    std::vector<Gpu> gpus;  ///< by index
    std::string from;       ///< "NVML", "/proc/driver/nvidia", "/dev"
};

/// Counts this machine's NVIDIA GPUs without creating a CUDA context (that takes a second and some hundred
/// megabytes of each GPU). Never fails: no driver is no GPU.
PhysicalGpus find_nvidia_gpus();

}  // namespace ddprun
