#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

/// A GPU for a worker.
struct Gpu {
    std::string id;      ///< as CUDA_VISIBLE_DEVICES names it: "0", "GPU-8932f937-...", "MIG-..."
    std::string uuid;    ///< "" not known
    int numa_node = -1;  ///< -1 not known
    bool operator==(const Gpu&) const = default;
};

struct PhysicalGpus {
    std::vector<Gpu> gpus;  ///< by index
    std::string from;       ///< "NVML", "/proc/driver/nvidia", "/dev"
};

/// Counts this machine's NVIDIA GPUs without a CUDA context (which takes a second and some hundred megabytes
/// of each GPU). Never fails: without a driver there is no GPU.
PhysicalGpus find_nvidia_gpus();

/// The physical GPUs that CUDA would show for this value of CUDA_VISIBLE_DEVICES: as CUDA does, the list ends
/// at the first entry that names no GPU. nullopt is the unset variable, "" hides all.
std::vector<Gpu> visible_gpus(const std::vector<Gpu>& physical,
                              const std::optional<std::string>& visible_devices);

/// Converts "00000000:3B:00.0" to "0000:3b:00.0": NVML and sysfs differ in the domain's width and in case.
std::string sysfs_bus_id(std::string_view nvml_id);
/// The NUMA node of a PCI device by its sysfs name; -1 not known.
int numa_node_of(const std::string& bus_id);

}  // namespace ddprun
