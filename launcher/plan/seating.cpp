#include "launcher/plan/seating.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "env/text.h"
#include "launcher/plan/binding.h"

namespace ddprun {
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
