#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ddprun {

class Visitor;

/// A process with a CUDA context on a GPU. In a container the driver may number it as the host does, or hide
/// it.
struct GpuProcessUsage {
    pid_t pid = 0;
    std::uint64_t used_bytes = 0;  ///< 0: the driver does not tell
    bool operator==(const GpuProcessUsage&) const = default;
};

/// NVML's figures of one GPU of this host, whichever processes use it.
struct GpuUsage {
    unsigned index = 0;
    std::string uuid = {};
    unsigned busy_percent = 0;  ///< of the last sample period in which a kernel ran
    std::uint64_t used_bytes = 0;
    std::uint64_t total_bytes = 0;
    std::vector<GpuProcessUsage> processes = {};
    bool operator==(const GpuUsage&) const = default;
};

/// Measures all GPUs by NVML, without a CUDA context; empty without a driver. Can take long, for ever when a
/// GPU has fallen off the bus, so a running job has a separate process do it (GpuWatch).
std::vector<GpuUsage> measure_gpus();

/// "GPU 0: 87 % busy, 12 GiB of 80 GiB" lines; "" for none. Pure.
std::string render_gpu_usage(const std::vector<GpuUsage>& gpus);

void describe(Visitor& v, GpuUsage& gpu);

/// A worker and the processes below it.
struct WorkerProcesses {
    int local_rank = 0;
    std::vector<pid_t> pids;
    std::string visible_devices;  ///< its CUDA_VISIBLE_DEVICES ...
    bool limits_devices = false;  ///< ... if it has one
};
/// The GPUs of one worker.
struct WorkerGpus {
    std::vector<unsigned> indices;
    bool is_presumed = false;      ///< known by its local rank only, not by the driver's list of processes
    std::uint64_t used_bytes = 0;  ///< its own, on all of them; 0 not known
    bool operator==(const WorkerGpus&) const = default;
};
/// The GPUs of each worker, in the order of the workers. The driver's lists of processes decide if they have
/// any worker; otherwise the local rank's place among the visible GPUs is presumed. Pure.
std::vector<WorkerGpus> assign_gpu_usage(const std::vector<GpuUsage>& gpus,
                                         const std::vector<WorkerProcesses>& workers);

}  // namespace ddprun
