#include "launcher/machine/machine.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include <fmt/core.h>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/text.h"
#include "launcher/machine/grant.h"

namespace ddprun {
namespace {

constexpr std::size_t kMaxSysFile = 64 * 1024;
constexpr int kMaxCpus = 8192;  // the kernel's largest configuration
constexpr int kMaxNumaNodes = 1024;

std::string read_sys(const std::string& path) {
    const Result<std::string> text = read_file(path, kMaxSysFile);
    return text ? std::string(trim(*text)) : "";
}

std::vector<int> usable_cpus() {
    std::vector<int> cpus;
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(kMaxCpus),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const std::size_t bytes = CPU_ALLOC_SIZE(kMaxCpus);
    if (!set || ::sched_getaffinity(0, bytes, set.get()) != 0) return {0};
    for (int cpu = 0; cpu < kMaxCpus; ++cpu) {
        if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
    }
    return cpus;
}

/// The lowest CPU of a list file, or `fallback`.
int first_cpu(const std::string& path, int fallback) {
    const std::vector<int> cpus = parse_cpu_list(read_sys(path));
    return cpus.empty() ? fallback : cpus.front();
}

/// CPUs that share the cache of the highest level with this one.
int core_complex_of(const std::string& cpu_directory, int fallback) {
    for (int index = 4; index >= 2; --index) {
        const int first =
            first_cpu(fmt::format("{}/cache/index{}/shared_cpu_list", cpu_directory, index), -1);
        if (first >= 0) return first;
    }
    return fallback;
}

void read_caches(const std::string& sys, Cpu& cpu) {
    const std::string directory = fmt::format("{}/devices/system/cpu/cpu{}", sys, cpu.id);
    const Result<std::int64_t> package = parse_int(read_sys(directory + "/topology/physical_package_id"));
    if (package && *package >= 0) cpu.package = static_cast<int>(*package);
    cpu.core = first_cpu(directory + "/topology/thread_siblings_list", cpu.id);
    cpu.core_complex = core_complex_of(directory, cpu.core_complex);
}

std::map<int, int> numa_nodes_of_cpus(const std::string& sys) {
    std::map<int, int> node_of;
    for (const int node : parse_cpu_list(read_sys(sys + "/devices/system/node/online"))) {
        if (node >= kMaxNumaNodes) continue;
        for (const int cpu :
             parse_cpu_list(read_sys(fmt::format("{}/devices/system/node/node{}/cpulist", sys, node)))) {
            node_of[cpu] = node;
        }
    }
    return node_of;
}

bool has_several_numa_nodes(const std::vector<Cpu>& cpus) {
    return std::any_of(cpus.begin(), cpus.end(),
                       [&](const Cpu& cpu) { return cpu.numa_node != cpus.front().numa_node; });
}

bool wants_gpus(const Probe& probe, const Machine& machine) {
    switch (probe.gpus) {
        case Probe::Gpus::No: return false;
        case Probe::Gpus::WithSeveralNumaNodes: return has_several_numa_nodes(machine.cpu_places);
        case Probe::Gpus::Yes: return true;
    }
    return true;
}

}  // namespace

Probe probe_for(const JobSpec& spec) {
    const bool counts_gpus =
        spec.workers.kind == WorkerCount::Kind::Auto || spec.workers.kind == WorkerCount::Kind::Gpu;
    const bool assigns_gpus = spec.virtual_local_rank || spec.narrow_gpus;
    const bool binds = spec.binding != NumaBinding::None;
    Probe probe;
    probe.caches = binds && spec.binding != NumaBinding::Auto && spec.binding != NumaBinding::Node;
    if (counts_gpus || assigns_gpus || spec.dry_run) probe.gpus = Probe::Gpus::Yes;
    else probe.gpus = binds ? Probe::Gpus::WithSeveralNumaNodes : Probe::Gpus::No;
    probe.network = wants_fabric(spec);
    probe.fabric = spec.fabric;
    const std::string endpoint = spec.rendezvous.endpoint ? spec.rendezvous.endpoint->host : "";
    probe.is_one_host = endpoint == "localhost" || endpoint == "::1" || endpoint.starts_with("127.");
    return probe;
}

Machine detect_machine(const EnvironmentLookup& env, const Probe& probe) {
    Machine machine;
    const std::vector<int> usable = usable_cpus();
    machine.cpus = static_cast<int>(usable.size());
    machine.host_cpus = static_cast<int>(parse_cpu_list(read_sys("/sys/devices/system/cpu/online")).size());
    machine.quota = cpu_quota(cgroup_places(read_file("/proc/self/cgroup", kMaxSysFile).value_or(""), "cpu"));
    machine.grant = read_grant(env, host_name());
    // Grants mostly count cores; without the caches' files every thread would count as one.
    machine.cpu_places = read_cpu_places("/sys", usable, probe.caches || machine.grant.cpus || machine.quota);
    machine.numa_distances = read_numa_distances("/sys");
    if (has_several_numa_nodes(machine.cpu_places))
        machine.memory_nodes = read_memory_nodes("/sys", read_sys("/proc/self/status"));
    if (probe.network) {
        NetworkFacts network = detect_network();
        if (probe.is_one_host) network.own_name_at.clear();
        machine.fabric = choose_fabric(probe.fabric, network);
    }
    if (!wants_gpus(probe, machine)) {
        machine.gpus_from = "not looked for";
        return machine;
    }
    const PhysicalGpus physical = find_nvidia_gpus();
    machine.gpu_places = visible_gpus(physical.gpus, env("CUDA_VISIBLE_DEVICES"));
    machine.gpus = static_cast<int>(machine.gpu_places.size());
    machine.hidden_gpus = std::max(0, static_cast<int>(physical.gpus.size()) - machine.gpus);
    machine.gpus_from = physical.from;
    return machine;
}

Result<int> resolve_worker_count(const WorkerCount& count, const Machine& machine) {
    const std::optional<CoreShare> share = granted_share(machine);
    const int cpus = share ? share->cores : cpus_in_quota(machine);
    switch (count.kind) {
        case WorkerCount::Kind::Number: return count.number;
        case WorkerCount::Kind::Cpu: return cpus;
        case WorkerCount::Kind::Auto: return machine.gpus > 0 ? machine.gpus : cpus;
        case WorkerCount::Kind::Gpu: break;
    }
    if (machine.gpus > 0) return machine.gpus;
    if (machine.hidden_gpus > 0)
        return Error{
            Errc::NotFound,
            fmt::format("--nproc-per-node: gpu: CUDA_VISIBLE_DEVICES shows none of this machine's {} "
                        "NVIDIA GPUs (unset it, or use cpu or a count)",
                        machine.hidden_gpus)};
    return Error{Errc::NotFound,
                 "--nproc-per-node: gpu: this machine has no NVIDIA GPU (use cpu or a count)"};
}

std::vector<int> parse_cpu_list(std::string_view text) {
    std::vector<int> cpus;
    for (const std::string_view piece : split(trim(text), ',')) {
        const std::size_t dash = piece.find('-');
        const Result<std::int64_t> first = parse_int_between(piece.substr(0, dash), 0, kMaxCpus - 1);
        if (!first) continue;
        const Result<std::int64_t> last = dash == std::string_view::npos
                                              ? first
                                              : parse_int_between(piece.substr(dash + 1), 0, kMaxCpus - 1);
        if (!last) continue;
        for (std::int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    }
    return cpus;
}

std::map<int, std::map<int, int>> read_numa_distances(const std::string& sys) {
    const std::vector<int> nodes = parse_cpu_list(read_sys(sys + "/devices/system/node/online"));
    std::map<int, std::map<int, int>> distances;
    if (nodes.size() < 2 || nodes.size() > kMaxNumaNodes) return distances;
    for (const int from : nodes) {
        const std::string row = read_sys(fmt::format("{}/devices/system/node/node{}/distance", sys, from));
        std::size_t at = 0;
        for (const std::string_view piece : split(row, ' ')) {
            const Result<std::int64_t> distance = parse_int(piece);
            if (distance && at < nodes.size()) distances[from][nodes[at++]] = static_cast<int>(*distance);
        }
    }
    return distances;
}

std::optional<std::set<int>> read_memory_nodes(const std::string& sys, std::string_view process_status) {
    constexpr std::string_view kAllowed = "\nMems_allowed_list:";
    std::optional<std::set<int>> nodes;
    const auto keep_those_in = [&nodes](std::string_view list) {
        const std::vector<int> listed = parse_cpu_list(list);
        if (listed.empty()) return;
        if (!nodes) nodes.emplace(listed.begin(), listed.end());
        std::erase_if(
            *nodes, [&](int node) { return std::find(listed.begin(), listed.end(), node) == listed.end(); });
    };
    keep_those_in(read_sys(sys + "/devices/system/node/has_memory"));
    if (const std::size_t at = process_status.find(kAllowed); at != process_status.npos) {
        const std::string_view rest = process_status.substr(at + kAllowed.size());
        keep_those_in(rest.substr(0, rest.find('\n')));
    }
    return nodes;
}

int core_count(const Machine& machine) {
    std::set<int> cores;
    for (const Cpu& cpu : machine.cpu_places) cores.insert(cpu.core);
    return static_cast<int>(cores.size());
}

std::optional<CoreShare> granted_share(const Machine& machine) {
    const bool confined = machine.host_cpus > machine.cpus;
    const int cores = core_count(machine);
    CoreShare share{cores, ""};
    if (!confined && machine.grant.cpus) {
        const std::int64_t granted = static_cast<std::int64_t>(*machine.grant.cpus) * machine.grant.slots;
        if (granted < cores) share = {static_cast<int>(granted), machine.grant.by};
    }
    if (cpus_in_quota(machine) < share.cores) share = {cpus_in_quota(machine), "the cgroup's CPU quota"};
    return share.cores < cores ? std::optional(share) : std::nullopt;
}

int cpus_in_quota(const Machine& machine) {
    return std::max(1,
                    static_cast<int>(std::min<double>(machine.cpus, machine.quota.value_or(machine.cpus))));
}

std::vector<Cpu> read_cpu_places(const std::string& sys, const std::vector<int>& usable, bool caches) {
    const std::map<int, int> node_of = numa_nodes_of_cpus(sys);
    std::vector<Cpu> places;
    for (const int id : usable) {
        Cpu cpu;
        cpu.id = cpu.core = id;
        if (const auto node = node_of.find(id); node != node_of.end()) cpu.numa_node = node->second;
        if (caches) read_caches(sys, cpu);
        places.push_back(cpu);
    }
    return places;
}

}  // namespace ddprun
