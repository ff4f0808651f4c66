#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/machine/gpu/nvidia.h"
#include "launcher/machine/grant.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// A CPU we may use, and its place. Numbers are the kernel's.
struct Cpu {
    int id = 0;
    int numa_node = 0;
    int package = 0;
    int core = 0;          ///< the lowest CPU of the same physical core
    int core_complex = 0;  ///< the lowest CPU that shares the last-level cache
    bool operator==(const Cpu&) const = default;
};

/// The parts of this machine that the plan needs.
struct Machine {
    int cpus = 1;                 ///< usable CPUs, by our affinity
    std::optional<double> quota;  ///< CPUs' worth of time that our cgroups leave; nullopt: no limit
    int gpus = 0;                 ///< visible GPUs, by CUDA_VISIBLE_DEVICES
    int hidden_gpus = 0;          ///< NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves out
    int host_cpus = 0;  ///< online CPUs of the host; 0: not known. More than `cpus`: we are confined
    std::vector<Cpu> cpu_places;  ///< by id
    /// The kernel's: 10 from a node to itself, 20 and more to another socket.
    std::map<int, std::map<int, int>> numa_distances;
    std::optional<std::set<int>> memory_nodes;  ///< NUMA nodes with memory we may use; nullopt: not known
    Grant grant;                                ///< of the batch system
    std::vector<Gpu> gpu_places;                ///< in CUDA's order
    std::string gpus_from;  ///< "NVML", "/proc/driver/nvidia", "/dev", or why they were not looked for
    FabricProfile fabric;   ///< the network between nodes; empty unless Probe::network
};

/// The parts that detect_machine reads. Some cost milliseconds (NVML) or thousands of files (caches).
struct Probe {
    bool caches = true;  ///< packages, cores and core complexes of every CPU
    enum class Gpus : std::uint8_t { No, WithSeveralNumaNodes, Yes } gpus = Gpus::Yes;
    bool network = false;               ///< the fabric
    std::optional<Fabric> fabric = {};  ///< the fabric that the user asked for
    bool is_one_host = false;           ///< the nodes meet on the loopback, so all are on this host
};
/// The least probe that this job's plan needs.
Probe probe_for(const JobSpec& spec);

/// Reads this machine. GPUs are counted without creating a CUDA context: through NVML when it can be loaded,
/// else from /proc/driver/nvidia, else from /dev. Fields that cannot be read keep their defaults.
Machine detect_machine(const EnvironmentLookup& env, const Probe& probe = {});

/// The number of workers of this node. Error: NotFound ("--nproc-per-node: gpu: this machine has no NVIDIA
/// GPU (use cpu or a count)"), naming CUDA_VISIBLE_DEVICES where it hides them.
Result<int> resolve_worker_count(const WorkerCount& count, const Machine& machine);

/// Parses "0-3,8" to {0,1,2,3,8}; leaves out malformed pieces (the kernel writes the list).
std::vector<int> parse_cpu_list(std::string_view text);
/// The distances between NUMA nodes, from a /sys tree; empty for a single node.
std::map<int, std::map<int, int>> read_numa_distances(const std::string& sys);
/// The NUMA nodes with memory, from a /sys tree, limited to those that `process_status` (/proc/PID/status)
/// allows in a cpuset or container; nullopt: not known.
std::optional<std::set<int>> read_memory_nodes(const std::string& sys, std::string_view process_status);
/// Physical cores that we may use.
int core_count(const Machine& machine);
/// A number of cores that are ours without being known one by one.
struct CoreShare {
    int cores = 0;
    std::string_view by;  ///< borrowed from the Machine
};
/// The cores that the batch system or a cgroup's quota gave us when that is a part of the host and nothing
/// confines us to it; nullopt: all usable cores are ours.
std::optional<CoreShare> granted_share(const Machine& machine);
/// The number of CPUs that can run all the time: the usable ones, or the quota where that is less.
int cpus_in_quota(const Machine& machine);
/// The places of `usable` CPUs from a /sys tree ("/sys"; another root in tests).
std::vector<Cpu> read_cpu_places(const std::string& sys, const std::vector<int>& usable, bool caches);

}  // namespace ddprun
