#pragma once

#include <string>
#include <string_view>
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

/// "0000:3b:00.0" of "00000000:3B:00.0": NVML and sysfs differ in the width of the domain and in case.
std::string sysfs_bus_id(std::string_view nvml_id);
/// Of a PCI device by its sysfs name; -1 not known.
int numa_node_of(const std::string& bus_id);

}  // namespace ddprun
