#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/worker_env.h"

namespace ddprun {

/// This host's share that the batch system gave the job, as far as its variables tell.
struct Grant {
    std::string by;           ///< "PBS", "Torque", "Slurm", "LSF"; "" no batch system, or not known
    std::optional<int> cpus;  ///< CPUs of this host; under PBS those of the first chunk
    int slots = 1;            ///< lines of this host in PBS' node file: chunks, or mpiprocs of one
    /// OMP_NUM_THREADS when PBS has set it, to the chunk's ncpus or to the directive ompthreads.
    std::optional<int> preset_threads;
    bool operator==(const Grant&) const = default;
};

/// `node_file` is the content of PBS_NODEFILE ("" without one), `host` our name, short or with its domain.
/// Pure.
Grant grant_of(const EnvironmentLookup& env, std::string_view node_file, std::string_view host);
/// Reads the node file and calls grant_of().
Grant read_grant(const EnvironmentLookup& env, std::string_view host);

/// True when a preset OMP_NUM_THREADS is the user's ompthreads rather than ncpus: the host has several slots,
/// and enough cores for that many threads of each worker.
bool preset_is_per_worker(const Grant& grant, int workers, int cores);

/// The directories that can limit a cgroup: its own and those above it, up to the mount point.
struct CgroupPlaces {
    int version = 0;  ///< 2, 1, or 0: none
    std::vector<std::string> directories;
    bool operator==(const CgroupPlaces&) const = default;
};
/// Finds the places for a controller ("memory", "pids", "cpu"); `text` is the process's /proc/self/cgroup.
/// Where both versions are mounted, the controller is with version 1. Pure.
CgroupPlaces cgroup_places(std::string_view text, std::string_view controller);

/// Parses memory.max, memory.limit_in_bytes or pids.max; nullopt for "max" and numbers that mean no limit.
/// Pure.
std::optional<std::uint64_t> parse_cgroup_limit(std::string_view text);
/// The tightest limit in the files of this name; nullopt: no limit is set.
std::optional<std::uint64_t> tightest_limit(const CgroupPlaces& places, std::string_view file);
/// The smallest CPU quota of the places (cpu.max, or version 1's cpu.cfs_quota_us), in CPUs; nullopt: none is
/// set. A quota limits time, not which CPUs run: affinity does not show it.
std::optional<double> cpu_quota(const CgroupPlaces& places);

}  // namespace ddprun
