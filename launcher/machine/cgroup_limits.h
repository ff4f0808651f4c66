#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

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
