#include "launcher/plan/binding.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "env/text.h"

namespace ddprun {
namespace {

/// The CPUs of each core, complex or node, in order.
using Groups = std::map<int, std::vector<int>>;

/// A worker's NUMA node, and its position among the workers of that node.
struct Home {
    int node = 0;
    int position = 0;
    int neighbours = 0;  ///< workers of that node, this one included
};

std::set<int> numa_nodes(const Machine& machine) {
    std::set<int> nodes;
    for (const Cpu& cpu : machine.cpu_places) nodes.insert(cpu.numa_node);
    return nodes;
}

bool each_has_gpu_with_node(const Machine& machine, int workers) {
    if (machine.gpus < workers) return false;
    const std::set<int> nodes = numa_nodes(machine);
    return std::all_of(machine.gpu_places.begin(), machine.gpu_places.begin() + workers,
                       [&](const Gpu& gpu) { return nodes.contains(gpu.numa_node); });
}

std::vector<Home> homes_of(const Machine& machine, int workers) {
    const std::set<int> node_set = numa_nodes(machine);
    const std::vector<int> nodes(node_set.begin(), node_set.end());
    const bool by_gpu = each_has_gpu_with_node(machine, workers);
    std::vector<Home> homes(static_cast<std::size_t>(workers));
    std::map<int, int> count;
    for (std::size_t i = 0; i < homes.size(); ++i) {
        homes[i].node = by_gpu ? machine.gpu_places[i].numa_node : nodes[i * nodes.size() / homes.size()];
        homes[i].position = count[homes[i].node]++;
    }
    for (Home& home : homes) home.neighbours = count[home.node];
    return homes;
}

std::vector<int> cpus_where(const Machine& machine, const auto& wanted) {
    std::vector<int> cpus;
    for (const Cpu& cpu : machine.cpu_places) {
        if (wanted(cpu)) cpus.push_back(cpu.id);
    }
    return cpus;
}

std::vector<int> cpus_of_node(const Machine& machine, int node) {
    return cpus_where(machine, [&](const Cpu& cpu) { return cpu.numa_node == node; });
}

/// The kernel's default distance to another socket.
constexpr int kOtherSocket = 20;

int numa_distance(const Machine& machine, int from, int to) {
    const auto row = machine.numa_distances.find(from);
    if (row == machine.numa_distances.end()) return kOtherSocket;
    const auto found = row->second.find(to);
    return found == row->second.end() ? kOtherSocket : found->second;
}

/// For each NUMA node, the node whose workers use it: itself when it has a GPU's worker, else the nearest
/// such node of the socket (of equally near ones, that with the fewest nodes). Nodes without an entry are
/// unused.
std::map<int, int> keepers_of_nodes(const Machine& machine, const std::vector<Home>& homes) {
    std::map<int, int> keeper, kept;
    for (const Home& home : homes) keeper[home.node] = home.node, kept[home.node] = 1;
    for (const int node : numa_nodes(machine)) {
        if (keeper.contains(node)) continue;
        const auto better = [&](const auto& a, const auto& b) {
            return std::pair(numa_distance(machine, a.first, node), a.second) <
                   std::pair(numa_distance(machine, b.first, node), b.second);
        };
        const auto nearest = std::min_element(kept.begin(), kept.end(), better);
        if (numa_distance(machine, nearest->first, node) >= kOtherSocket) continue;
        keeper[node] = nearest->first;
        ++nearest->second;
    }
    return keeper;
}

/// Auto gives each worker whole NUMA nodes: those near its GPU on the socket, else blocks of nodes.
std::vector<std::vector<int>> auto_cpus(const Machine& machine, const std::vector<Home>& homes) {
    std::vector<std::vector<int>> cpus;
    if (each_has_gpu_with_node(machine, static_cast<int>(homes.size()))) {
        std::map<int, int> keeper;
        if (homes.size() > 1) keeper = keepers_of_nodes(machine, homes);
        else keeper[homes.front().node] = homes.front().node;
        for (const Home& home : homes) {
            cpus.push_back(cpus_where(machine, [&](const Cpu& cpu) {
                const auto found = keeper.find(cpu.numa_node);
                return found != keeper.end() && found->second == home.node;
            }));
        }
        return cpus;
    }
    const std::set<int> node_set = numa_nodes(machine);
    const std::vector<int> nodes(node_set.begin(), node_set.end());
    for (std::size_t i = 0; i < homes.size(); ++i) {
        const std::size_t first = i * nodes.size() / homes.size();
        const std::size_t last = std::max(first + 1, (i + 1) * nodes.size() / homes.size());
        const std::set<int> mine(nodes.begin() + static_cast<std::ptrdiff_t>(first),
                                 nodes.begin() + static_cast<std::ptrdiff_t>(last));
        cpus.push_back(cpus_where(machine, [&](const Cpu& cpu) { return mine.contains(cpu.numa_node); }));
    }
    return cpus;
}

std::vector<int> cpus_of_socket(const Machine& machine, int node) {
    std::set<int> packages;
    for (const Cpu& cpu : machine.cpu_places) {
        if (cpu.numa_node == node) packages.insert(cpu.package);
    }
    return cpus_where(machine, [&](const Cpu& cpu) { return packages.contains(cpu.package); });
}

Groups groups_of_node(const Machine& machine, int node, int Cpu::*by) {
    Groups groups;
    for (const Cpu& cpu : machine.cpu_places) {
        if (cpu.numa_node == node) groups[cpu.*by].push_back(cpu.id);
    }
    return groups;
}

/// When the cores do not divide evenly, the first workers of a node get one more.
Result<std::vector<int>> exclusive_cpus(const Machine& machine, const Home& home) {
    const Groups cores = groups_of_node(machine, home.node, &Cpu::core);
    const int count = static_cast<int>(cores.size());
    if (count < home.neighbours) {
        return Error{Errc::InvalidArgument,
                     fmt::format("--numa-binding: exclusive: NUMA node {} has {} usable cores for {} workers",
                                 home.node, count, home.neighbours)};
    }
    const int share = count / home.neighbours;
    const int extra = count % home.neighbours;
    const int first = home.position * share + std::min(home.position, extra);
    const int last = first + share + (home.position < extra ? 1 : 0);
    std::vector<int> cpus;
    int index = 0;
    for (const auto& [core, members] : cores) {
        if (index >= first && index < last) cpus.insert(cpus.end(), members.begin(), members.end());
        ++index;
    }
    std::sort(cpus.begin(), cpus.end());
    return cpus;
}

/// Large complexes are given first. More workers than complexes share them in turn.
std::vector<int> core_complex_cpus(const Machine& machine, const Home& home) {
    const Groups complexes = groups_of_node(machine, home.node, &Cpu::core_complex);
    std::vector<std::vector<int>> ordered;
    for (const auto& [first, members] : complexes) ordered.push_back(members);
    std::stable_sort(ordered.begin(), ordered.end(),
                     [](const auto& a, const auto& b) { return a.size() > b.size(); });
    return ordered[static_cast<std::size_t>(home.position) % ordered.size()];
}

Result<std::vector<int>> cpus_for(NumaBinding policy, const Machine& machine, const Home& home) {
    switch (policy) {
        case NumaBinding::None: return std::vector<int>{};
        case NumaBinding::Auto:
        case NumaBinding::Node: return cpus_of_node(machine, home.node);
        case NumaBinding::Socket: return cpus_of_socket(machine, home.node);
        case NumaBinding::Exclusive: return exclusive_cpus(machine, home);
        case NumaBinding::CoreComplex: return core_complex_cpus(machine, home);
    }
    return std::vector<int>{};
}

std::vector<int> memory_nodes_of(const Machine& machine, const std::vector<int>& cpus) {
    if (numa_nodes(machine).size() < 2) return {};
    const std::set<int> wanted(cpus.begin(), cpus.end());
    std::set<int> nodes;
    for (const Cpu& cpu : machine.cpu_places) {
        if (wanted.contains(cpu.id)) nodes.insert(cpu.numa_node);
    }
    // Drop nodes whose memory we may not use. When none is left, the kernel takes the nearest memory.
    if (machine.memory_nodes)
        std::erase_if(nodes, [&](int node) { return !machine.memory_nodes->contains(node); });
    return {nodes.begin(), nodes.end()};
}

int cores_of(const Machine& machine, const std::vector<int>& cpus) {
    const std::set<int> wanted(cpus.begin(), cpus.end());
    std::set<int> cores;
    for (const Cpu& cpu : machine.cpu_places) {
        if (wanted.empty() || wanted.contains(cpu.id)) cores.insert(cpu.core);
    }
    return static_cast<int>(cores.size());
}

/// Workers that are bound to the same CPUs share their cores, and all workers share the quota.
void share_cores(const Machine& machine, std::vector<Binding>& workers) {
    std::map<std::vector<int>, int> sharers;
    for (const Binding& worker : workers) ++sharers[worker.cpus];
    const std::optional<CoreShare> granted = granted_share(machine);
    for (Binding& worker : workers) {
        int cores = cores_of(machine, worker.cpus);
        if (worker.cpus.empty() && granted) cores = std::min(cores, granted->cores);
        cores /= sharers[worker.cpus];
        if (machine.quota) cores = std::min(cores, cpus_in_quota(machine) / static_cast<int>(workers.size()));
        worker.cores = std::max(1, cores);
    }
}

/// The reason why Auto does not bind; "" when it does.
std::string ambiguity(const Machine& machine, int workers) {
    const int nodes = static_cast<int>(numa_nodes(machine).size());
    if (nodes < 2) return "one NUMA node";
    if (const std::optional<CoreShare> share = granted_share(machine)) {
        return fmt::format("{} gave {} of {} cores, and which ones is not known", share->by, share->cores,
                           core_count(machine));
    }
    if (machine.gpus > 0) {
        if (machine.gpus != workers) return fmt::format("{} workers for {} GPUs", workers, machine.gpus);
        return each_has_gpu_with_node(machine, workers) ? "" : "the GPUs' NUMA nodes are not known";
    }
    const bool divides = workers % nodes == 0 || (workers > 1 && nodes % workers == 0);
    return divides ? "" : fmt::format("{} workers do not divide over {} NUMA nodes", workers, nodes);
}

std::string describe(NumaBinding policy, const Machine& machine, int workers) {
    const std::string_view whose = each_has_gpu_with_node(machine, workers) ? "its GPU's" : "a";
    switch (policy) {
        case NumaBinding::None: return "none";
        case NumaBinding::Auto:
        case NumaBinding::Node: return fmt::format("node: the CPUs of {} NUMA node", whose);
        case NumaBinding::Socket: return fmt::format("socket: the CPUs of {} package", whose);
        case NumaBinding::Exclusive: return fmt::format("exclusive: own cores of {} NUMA node", whose);
        case NumaBinding::CoreComplex:
            return fmt::format("core-complex: cores that share a cache of {} NUMA node", whose);
    }
    return "";
}

}  // namespace

Result<Bindings> bind_workers(NumaBinding policy, const Machine& machine, int workers) {
    Bindings bindings;
    bindings.workers.resize(static_cast<std::size_t>(workers));
    bindings.why = describe(policy, machine, workers);
    if (policy == NumaBinding::Auto) {
        if (const std::string why = ambiguity(machine, workers); !why.empty()) {
            policy = NumaBinding::None;
            bindings.why = "none: " + why;
        }
    }
    if (policy != NumaBinding::None && !machine.cpu_places.empty()) {
        const std::vector<Home> homes = homes_of(machine, workers);
        std::vector<std::vector<int>> chosen;
        if (policy == NumaBinding::Auto) chosen = auto_cpus(machine, homes);
        for (std::size_t i = 0; i < homes.size(); ++i) {
            Result<std::vector<int>> cpus =
                policy == NumaBinding::Auto ? std::move(chosen[i]) : cpus_for(policy, machine, homes[i]);
            if (!cpus) return cpus.error();
            bindings.workers[i].cpus = *std::move(cpus);
            bindings.workers[i].memory_nodes = memory_nodes_of(machine, bindings.workers[i].cpus);
        }
    }
    share_cores(machine, bindings.workers);
    return bindings;
}

namespace {

constexpr int kMostSeats = 256;        ///< workers of one node that a table is made for
constexpr std::size_t kMostNamed = 4;  ///< hosts in a list without "..."

std::string seat(const Binding& binding, const std::string& gpu) {
    std::string text = fmt::format("CPUs {}", binding.cpus.empty() ? "any" : format_ranges(binding.cpus));
    if (!binding.memory_nodes.empty()) text += fmt::format(", NUMA {}", format_ranges(binding.memory_nodes));
    if (!gpu.empty()) text += fmt::format(", GPU {}", gpu);
    return text;
}

std::string named(const std::vector<std::string>& all) {
    if (all.size() <= kMostNamed) return join(all, ", ");
    return fmt::format("{}, {}, ... {} ({} in all)", all[0], all[1], all.back(), all.size());
}

}  // namespace

std::vector<std::string> seats_of(const JobSpec& spec, const Machine& machine, int workers) {
    if (spec.outer_rank) return {};  // placed by the outer launcher
    if (workers > kMostSeats || (spec.nodes.max == 1 && machine.grant.by.empty())) return {};
    const Result<Bindings> bindings = bind_workers(spec.binding, machine, workers);
    if (!bindings) return {};  // plan_workers() reports this error
    const auto is_bound = [](const Binding& one) { return !one.cpus.empty(); };
    if (std::none_of(bindings->workers.begin(), bindings->workers.end(), is_bound)) return {};
    std::vector<std::string> seats;
    for (std::size_t i = 0; i < bindings->workers.size(); ++i) {
        const bool has_own = machine.gpu_places.size() >= bindings->workers.size();
        seats.push_back(seat(bindings->workers[i], has_own ? machine.gpu_places[i].id : ""));
    }
    return seats;
}

std::vector<std::string> render_seating(const std::vector<NodeSeats>& nodes) {
    std::map<std::vector<std::string>, std::size_t> group_of;
    std::vector<std::vector<const NodeSeats*>> alike;  // in the order of the nodes
    for (const NodeSeats& node : nodes) {
        if (node.seats.empty()) continue;
        const auto [group, is_new] = group_of.emplace(node.seats, alike.size());
        if (is_new) alike.emplace_back();
        alike[group->second].push_back(&node);
    }
    std::vector<std::string> lines;
    for (const std::vector<const NodeSeats*>& members : alike) {
        const std::vector<std::string>& seats = members.front()->seats;
        std::vector<std::string> hosts;
        for (const NodeSeats* node : members) hosts.push_back(node->host);
        lines.push_back(fmt::format("seats on {}:", named(hosts)));
        for (std::size_t local = 0; local < seats.size(); ++local) {
            std::vector<std::string> ranks;
            for (const NodeSeats* node : members)
                ranks.push_back(std::to_string(node->first_rank + static_cast<int>(local)));
            lines.push_back(fmt::format("  rank {}: {}", named(ranks), seats[local]));
        }
    }
    return lines;
}

}  // namespace ddprun
