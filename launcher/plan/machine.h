#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "env/worker_env.h"
#include "launcher/fabric/fabric.h"
#include "launcher/gpu/nvidia.h"
#include "launcher/job_spec.h"
#include "launcher/plan/grant.h"

namespace ddprun {

/// One CPU we may use, and what it shares with others. Numbers are the kernel's.
struct Cpu {
    int id = 0;
    int numa_node = 0;
    int package = 0;
    int core = 0;          ///< the lowest CPU of the same physical core
    int core_complex = 0;  ///< the lowest CPU that shares the last-level cache
    bool operator==(const Cpu&) const = default;
};

/// What of this machine matters to the plan.
struct Machine {
    int cpus = 1;       ///< usable ones: those of our affinity
    int gpus = 0;       ///< visible ones: CUDA_VISIBLE_DEVICES has been applied
    int host_cpus = 0;  ///< online in the whole host; 0 not known. More than `cpus`: we are confined to those
    std::vector<Cpu> cpu_places;  ///< by id
    std::map<int, std::map<int, int>>
        numa_distances;  ///< the kernel's: 10 to itself, 20 and more to another socket
    std::optional<std::set<int>>
        memory_nodes;             ///< NUMA nodes that have memory which we may use; nullopt: not known
    Grant grant;                  ///< of the batch system
    std::vector<Gpu> gpu_places;  ///< in CUDA's order
    std::string gpus_from;        ///< "NVML", "/proc/driver/nvidia", "/dev", or why they were not looked for
    FabricProfile fabric;         ///< what connects it with others; none where nobody asked (wants_fabric)
};

/// What detect_machine has to look at; the rest costs milliseconds (NVML) or thousands of files (caches).
struct Probe {
    bool caches = true;  ///< packages, cores and core complexes of every CPU
    enum class Gpus : std::uint8_t { No, WithSeveralNumaNodes, Yes } gpus = Gpus::Yes;
    bool network = false;               ///< the fabric
    std::optional<Fabric> fabric = {};  ///< the one that was asked for
    bool is_one_host = false;           ///< the nodes meet on the loopback, so all are on this host
};
/// The least that this job's plan needs.
Probe probe_for(const JobSpec& spec);

/// Looks at this machine. GPUs are counted without creating a CUDA context: through NVML when it can be
/// loaded, else from /proc/driver/nvidia, else from /dev. What cannot be read is left at its default.
Machine detect_machine(const EnvironmentLookup& env, const Probe& probe = {});

/// The number of workers of this node. Error: NotFound ("--nproc-per-node: gpu: this machine has no NVIDIA
/// GPU (use cpu or a count)").
Result<int> resolve_worker_count(const WorkerCount& count, const Machine& machine);

/// "0-3,8" as {0,1,2,3,8}; malformed pieces are left out (the kernel writes it).
std::vector<int> parse_cpu_list(std::string_view text);
/// Between NUMA nodes, from a /sys tree; nothing for a single one.
std::map<int, std::map<int, int>> read_numa_distances(const std::string& sys);
/// The NUMA nodes that have memory, of a /sys tree, as far as a process whose /proc/PID/status this is may
/// use it (a cpuset, a container); nullopt: neither tells.
std::optional<std::set<int>> read_memory_nodes(const std::string& sys, std::string_view process_status);
/// Physical cores that we may use.
int core_count(const Machine& machine);
/// The places of `usable` CPUs from a /sys tree ("/sys"; another root in tests).
std::vector<Cpu> read_cpu_places(const std::string& sys, const std::vector<int>& usable, bool caches);

}  // namespace ddprun
