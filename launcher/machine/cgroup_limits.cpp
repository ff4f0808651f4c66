#include "launcher/machine/cgroup_limits.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxLimitFile = 4096;
/// Version 1 writes "no limit" as a number above any machine's memory.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;

std::string limit_in(const std::string& directory, std::string_view file) {
    return std::string(trim(read_file(fmt::format("{}/{}", directory, file), kMaxLimitFile).value_or("")));
}

}  // namespace

CgroupPlaces cgroup_places(std::string_view text, std::string_view controller) {
    std::optional<std::string> one, two;
    for (const std::string_view line : split(text, '\n')) {
        const std::vector<std::string_view> parts = split(line, ':');
        if (parts.size() < 3) continue;
        const std::string path(line.substr(parts[0].size() + parts[1].size() + 2));
        if (parts[0] == "0" && parts[1].empty()) two = path;
        for (const std::string_view name : split(parts[1], ',')) {
            if (name == controller) one = path;
        }
    }
    if (!one && !two) return {};
    const std::string root = one ? fmt::format("/sys/fs/cgroup/{}", controller) : "/sys/fs/cgroup";
    CgroupPlaces places{one ? 1 : 2, {}};
    for (std::string path = one ? *one : *two; path.size() > 1; path.erase(path.rfind('/')))
        places.directories.push_back(root + path);
    places.directories.push_back(root);  // in a container its own cgroup may be mounted here
    return places;
}

std::optional<std::uint64_t> parse_cgroup_limit(std::string_view text) {
    const Result<std::uint64_t> limit = parse_uint(trim(text));
    if (!limit || *limit >= kNoLimit) return std::nullopt;
    return *limit;
}

std::optional<std::uint64_t> tightest_limit(const CgroupPlaces& places, std::string_view file) {
    std::optional<std::uint64_t> found;
    for (const std::string& directory : places.directories) {
        const std::optional<std::uint64_t> limit = parse_cgroup_limit(limit_in(directory, file));
        if (limit && (!found || *limit < *found)) found = limit;
    }
    return found;
}

std::optional<double> cpu_quota(const CgroupPlaces& places) {
    std::optional<double> found;
    for (const std::string& directory : places.directories) {
        // Microseconds granted per period: "200000 100000".
        const std::string quota = places.version == 2 ? limit_in(directory, "cpu.max")
                                                      : limit_in(directory, "cpu.cfs_quota_us") + ' ' +
                                                            limit_in(directory, "cpu.cfs_period_us");
        const std::size_t space = std::min(quota.find(' '), quota.size());
        const Result<double> granted = parse_double(quota.substr(0, space));
        const Result<double> period = parse_double(trim(std::string_view(quota).substr(space)));
        if (!granted || !period || *granted <= 0 || *period <= 0) continue;
        found = std::min(found.value_or(*granted / *period), *granted / *period);
    }
    return found;
}

}  // namespace ddprun
