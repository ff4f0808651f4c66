#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

/// Where the limits of a cgroup stand: it and those above it, up to the mount point, for one may be set at
/// any of them.
struct CgroupPlaces {
    int version = 0;  ///< 2, 1, or 0: none
    std::vector<std::string> directories;
    bool operator==(const CgroupPlaces&) const = default;
};
/// Of the process with this text of /proc/self/cgroup, for a controller: "memory", "pids", "cpu". Where both
/// versions are mounted, the controller is with version 1. Pure.
CgroupPlaces cgroup_places(std::string_view text, std::string_view controller);

/// The text of memory.max, memory.limit_in_bytes, pids.max; nullopt for "max" and the numbers that mean none.
/// Pure.
std::optional<std::uint64_t> parse_cgroup_limit(std::string_view text);
/// The tightest of the limits in the files of this name; nullopt: there is none.
std::optional<std::uint64_t> tightest_limit(const CgroupPlaces& places, std::string_view file);

}  // namespace ddprun
