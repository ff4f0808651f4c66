#include "launcher/machine/grant.h"

#include <fmt/core.h>

#include <algorithm>

#include "env/io/file.h"
#include "env/text.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxNodeFile = 4 << 20;
constexpr std::int64_t kMostCpus = 1 << 20;

std::optional<int> positive(const std::optional<std::string>& text) {
    if (!text) return std::nullopt;
    const Result<std::int64_t> number = parse_int_between(*text, 1, kMostCpus);
    return number ? std::optional(static_cast<int>(*number)) : std::nullopt;
}

std::string_view short_name(std::string_view host) { return host.substr(0, host.find('.')); }

int lines_of(std::string_view node_file, std::string_view host) {
    int lines = 0;
    for (const std::string_view line : split(node_file, '\n')) {
        if (const std::string_view name = trim(line); !name.empty() && short_name(name) == short_name(host))
            ++lines;
    }
    return lines;
}

Grant pbs_grant(const EnvironmentLookup& env, std::string_view node_file, std::string_view host) {
    Grant grant;
    grant.slots = std::max(1, lines_of(node_file, host));
    if (env("PBS_VERSION").value_or("").starts_with("TORQUE")) {
        grant.by = "Torque";
        grant.cpus = positive(env("PBS_NUM_PPN"));
        grant.slots = 1;  // its node file has a line for each CPU
        return grant;
    }
    grant.by = "PBS";
    grant.cpus = positive(env("NCPUS"));
    const std::optional<int> threads = positive(env("OMP_NUM_THREADS"));
    if (threads && threads == grant.cpus) grant.preset_threads = threads;
    return grant;
}

}  // namespace

Grant grant_of(const EnvironmentLookup& env, std::string_view node_file, std::string_view host) {
    if (env("PBS_JOBID")) return pbs_grant(env, node_file, host);
    Grant grant;
    if (env("SLURM_JOB_ID")) {
        grant.by = "Slurm";
        grant.cpus = positive(env("SLURM_CPUS_ON_NODE"));
    } else if (env("LSB_JOBID")) {
        grant.by = "LSF";  // LSF's variables count the slots of all hosts; the affinity has ours
    }
    return grant;
}

Grant read_grant(const EnvironmentLookup& env, std::string_view host) {
    const std::optional<std::string> path = env("PBS_JOBID") ? env("PBS_NODEFILE") : std::nullopt;
    const std::string node_file = path ? read_regular_file(*path, kMaxNodeFile).value_or("") : "";
    return grant_of(env, node_file, host);
}

bool preset_is_per_worker(const Grant& grant, int workers, int cores) {
    return grant.preset_threads && grant.slots > 1 &&
           static_cast<std::int64_t>(*grant.preset_threads) * workers <= cores;
}

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
