#include "launcher/start/start_facts.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>

#include "env/io/file.h"
#include "env/io/resolve.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/nodes/meeting_point.h"
#include "env/print.h"
#include "env/text.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostListBytes = 16 << 20;

bool is_in_path(std::string_view program) {
    return !find_executable(program, scheduler_search_path(process_environment)).empty();
}

/// The names of more hosts are not looked up: only the names of our own addresses are.
constexpr std::size_t kMostLookedUp = 64;
constexpr std::size_t kNamedInLine = 4;

std::vector<std::string> own_addresses(bool with_local) {
    std::vector<std::string> addresses;
    for (const InterfaceAddress& one : list_interfaces()) {
        const bool is_of_network = !one.is_loopback && !one.address.starts_with("fe80:");
        if (with_local || is_of_network) addresses.push_back(one.address);
    }
    return addresses;
}

void warn_unanswered(const std::vector<std::string>& asked) {
    ddprun::print(
        stderr,
        "ddprun: {} did not answer within {} for {}: this host ({}) does not count as one of the job's\n",
        printable(name_servers()), format_duration(kResolverPatience),
        printable(join_first(asked, kNamedInLine)), host_name());
}

/// Asks the resolver for the names of our addresses, then for the addresses of `hosts`: each name once, all
/// at the same time.
OwnPlaces ask_resolver(const std::vector<std::string>& hosts) {
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kResolverPatience);
    OwnPlaces own{own_addresses(true), {}, {}};
    std::vector<std::string> unanswered;
    const std::vector<std::string> outside = own_addresses(false);
    const std::vector<ResolverAnswer> names = names_of_all(outside, deadline);
    for (std::size_t i = 0; i < names.size(); ++i) {
        if (names[i]) own.names.insert(own.names.end(), names[i]->begin(), names[i]->end());
        else if (names[i].error().code == Errc::Timeout) unanswered.push_back(outside[i]);
    }
    if (hosts.size() <= kMostLookedUp && unanswered.empty()) {
        const std::vector<ResolverAnswer> addresses = addresses_of_all(hosts, deadline);
        for (std::size_t i = 0; i < hosts.size(); ++i) {
            if (addresses[i]) own.resolved[hosts[i]] = *addresses[i];
            else if (addresses[i].error().code == Errc::Timeout) unanswered.push_back(hosts[i]);
        }
    }
    if (!unanswered.empty()) warn_unanswered(unanswered);
    return own;
}

std::optional<std::size_t> find_by_address(const std::vector<AllocatedHost>& hosts) {
    std::vector<std::string> names;
    for (const AllocatedHost& host : hosts)
        names.push_back(host.name.substr(host.name.find('@') + 1));  // npos + 1 is 0
    if (const std::optional<std::size_t> found = find_own_place(names, {own_addresses(true), {}, {}}))
        return found;
    const StoppableWait wait;
    return find_own_place(names, ask_resolver(names));
}

/// Reads a list of hosts; a pipe, as of --hostfile <(command), to its end.
Result<std::string> read_list(const std::string& path) {
    std::error_code ignored;
    if (!std::filesystem::is_fifo(path, ignored)) return read_regular_file(path, kMostListBytes);
    const StoppableWait wait;
    return read_file(path, kMostListBytes);
}

}  // namespace

Result<StartFacts> look_for_hosts(const StartSpec& asked) {
    const AllocationQuery query{process_environment, read_list, asked.hosts, asked.hostfile};
    Result<std::optional<Allocation>> allocation = find_allocation(query);
    if (!allocation) return allocation.error();
    return StartFacts{*std::move(allocation), host_name(), find_by_address, is_in_path};
}

std::vector<std::string> hosts_by_rank(const JobSpec& spec, const std::vector<AllocatedHost>* start,
                                       const std::string& own_name) {
    std::vector<AllocatedHost> hosts;
    if (start != nullptr) {
        hosts = *start;
    } else if (spec.nodes.max == 1) {
        return {};
    } else if (const Result<StartFacts> facts = look_for_hosts(spec.start); facts && facts->allocation) {
        hosts = facts->allocation->hosts;
        const auto rank = static_cast<std::size_t>(spec.rendezvous.node_rank.value_or(0));
        if (rank >= hosts.size() || !is_same_host(hosts[rank].name, own_name)) hosts.clear();
    }
    std::vector<std::string> names;
    for (const AllocatedHost& host : hosts) names.push_back(host.name);
    return names;
}

}  // namespace ddprun
