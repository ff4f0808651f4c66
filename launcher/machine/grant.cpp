#include "launcher/machine/grant.h"

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

}  // namespace ddprun
