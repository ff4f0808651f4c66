#include "env/nodes/allocation.h"

#include <fmt/core.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "env/nodes/host_lists.h"
#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::int64_t kMostSlots = 1 << 20;
constexpr std::size_t kMostHosts = 65536;
constexpr std::size_t kShownHosts = 6;
constexpr std::size_t kMostNameBytes = 253;  // RFC 1035

std::vector<std::string_view> words_of(std::string_view line) {
    std::vector<std::string_view> words;
    for (std::size_t at = 0; at < line.size();) {
        const std::size_t begin = line.find_first_not_of(" \t\r", at);
        if (begin == line.npos) break;
        at = std::min(line.find_first_of(" \t\r", begin), line.size());
        words.push_back(line.substr(begin, at - begin));
    }
    return words;
}

/// Refuses names that are no host names, or that a starter would take for an option.
Status check_name(std::string_view name) {
    const auto is_fit = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               std::string_view("-_.@:").find(c) != std::string_view::npos;
    };
    if (name.empty() || name.size() > kMostNameBytes || name.front() == '-' ||
        !std::all_of(name.begin(), name.end(), is_fit)) {
        return Error::invalid(fmt::format("'{}' is not the name of a host", excerpt(name)));
    }
    return {};
}

/// Hosts in the order of their first mention.
class HostList {
  public:
    /// Adds a host; one that is already listed gets its slots added.
    Status add(AllocatedHost host) {
        if (const Status checked = check_name(host.name); !checked) return checked;
        const auto [place, is_new] = places_.emplace(host.name, hosts_.size());
        if (!is_new) {
            AllocatedHost& same = hosts_[place->second];
            same.slots = same.slots.value_or(1) + host.slots.value_or(1);
            return {};
        }
        if (hosts_.size() == kMostHosts)
            return Error{Errc::Limit, fmt::format("more than {} hosts", kMostHosts), 0};
        hosts_.push_back(std::move(host));
        return {};
    }
    [[nodiscard]] std::vector<AllocatedHost> take() { return std::move(hosts_); }

  private:
    std::vector<AllocatedHost> hosts_;
    std::unordered_map<std::string, std::size_t> places_;
};

struct NamedSlots {
    std::string_view name;
    std::optional<int> slots;
};
/// Splits "host:4"; an IPv6 address has several colons and no slots.
Result<NamedSlots> split_slots(std::string_view word) {
    const std::size_t colon = word.find(':');
    if (colon == word.npos || word.find(':', colon + 1) != word.npos) return NamedSlots{word, std::nullopt};
    const Result<std::int64_t> slots = parse_int_between(word.substr(colon + 1), 1, kMostSlots);
    if (!slots)
        return Error::invalid(fmt::format("'{}': expected a count of slots after the colon", excerpt(word)));
    return NamedSlots{word.substr(0, colon), static_cast<int>(*slots)};
}

Status add_named(HostList& hosts, const NamedSlots& named) {
    const Result<std::vector<std::string>> names = expand_hostlist(named.name);
    if (!names)
        return Error::invalid(fmt::format("'{}' is not a host or a range of hosts", excerpt(named.name)));
    for (const std::string& name : *names) {
        if (const Status added = hosts.add({name, named.slots, std::nullopt, 0}); !added) return added;
    }
    return {};
}

/// The pieces between commas outside brackets: "a[1,3],b" gives a[1,3] and b.
std::vector<std::string_view> split_list(std::string_view text) {
    std::vector<std::string_view> pieces;
    std::size_t begin = 0;
    int depth = 0;
    for (std::size_t at = 0; at <= text.size(); ++at) {
        if (at < text.size() && text[at] == '[') ++depth;
        if (at < text.size() && text[at] == ']') --depth;
        if (at < text.size() && (text[at] != ',' || depth > 0)) continue;
        pieces.push_back(text.substr(begin, at - begin));
        begin = at + 1;
    }
    return pieces;
}

/// The names of a host's count in host files.
constexpr std::string_view kSlotWords[] = {"slots", "cpu", "cpus", "count"};
bool is_slot_word(std::string_view word) {
    return std::ranges::find(kSlotWords, word) != std::end(kSlotWords);
}

/// The count of "slots=4", or of "cpu=4" or "count=4", which Open MPI takes for the same. Other words
/// ("max_slots=8", "port=22") are ignored.
Result<std::optional<int>> slots_of_word(std::string_view word) {
    const std::size_t equals = word.find('=');
    if (equals == word.npos)
        return Error::invalid(fmt::format("'{}' is neither a host nor NAME=VALUE", excerpt(word)));
    if (!is_slot_word(word.substr(0, equals))) return std::optional<int>();
    const Result<std::int64_t> slots = parse_int_between(word.substr(equals + 1), 1, kMostSlots);
    if (!slots) return Error::invalid(fmt::format("slots: {}", slots.error().what));
    return std::optional<int>(static_cast<int>(*slots));
}

/// Refuses words of other formats that would be taken for hosts: "slots" of "slots = 4", and the count of
/// Grid Engine's "host 4 queue UNDEFINED".
Status check_is_no_count(std::string_view word) {
    const bool is_number = word.find_first_not_of("0123456789") == word.npos;
    if (!is_number && !is_slot_word(word) && word != "max_slots" && word != "max-slots") return {};
    return Error::invalid(
        fmt::format("'{}' is not a host; a count is written as slots=4, without blanks", excerpt(word)));
}

Status add_hostfile_line(HostList& hosts, std::string_view line) {
    line = line.substr(0, line.find_first_of("#;"));
    std::vector<NamedSlots> named;
    for (const std::string_view word : words_of(line)) {
        if (named.empty() || word.find('=') == word.npos) {
            if (const Status host = check_is_no_count(word); !host) return host;
            Result<NamedSlots> one = split_slots(word);
            if (!one) return one.error();
            named.push_back(*one);
            continue;
        }
        const Result<std::optional<int>> slots = slots_of_word(word);
        if (!slots) return slots.error();
        if (*slots) named.back().slots = *slots;
    }
    for (const NamedSlots& one : named) {
        if (const Status added = add_named(hosts, one); !added) return added;
    }
    return {};
}

std::string shown(const std::vector<AllocatedHost>& hosts) {
    std::vector<std::string> names;
    for (const AllocatedHost& host : hosts) names.push_back(excerpt(host.name, 40));
    return join_first(std::move(names), kShownHosts, ",");
}

// ---- the sources

using Found = Result<std::optional<Allocation>>;

Result<std::string> text_of(const AllocationQuery& query, const std::string& path, std::string_view what) {
    Result<std::string> text = query.read_file(path);
    return text ? std::move(text) : Result<std::string>(text.error().with(what));
}

Status expect_hosts(const Allocation& allocation) {
    if (!allocation.hosts.empty()) return {};
    return Error::invalid(fmt::format("{}: no host is named", allocation.from));
}

/// Compares with the count that the same source gives under another name.
Status expect_count(const Allocation& allocation, const EnvironmentLookup& variable, const char* name) {
    const std::optional<std::string> text = variable(name);
    if (!text) return {};
    const Result<std::uint64_t> count = parse_uint(*text);
    if (count && *count == allocation.hosts.size()) return {};
    return Error{Errc::Mismatch,
                 fmt::format("{} has {} hosts ({}), but {}={}", allocation.from, allocation.hosts.size(),
                             shown(allocation.hosts), name, excerpt(*text)),
                 0};
}

Found from_user(const AllocationQuery& query) {
    if (query.hosts.empty() && query.hostfile.empty()) return std::optional<Allocation>();
    if (!query.hosts.empty() && !query.hostfile.empty()) {
        return Error{Errc::Mismatch,
                     fmt::format("--hosts={} and --hostfile={} both name the hosts: give one of them",
                                 excerpt(query.hosts), excerpt(query.hostfile)),
                     0};
    }
    Allocation found;
    const bool is_file = query.hosts.empty();
    found.source = is_file ? AllocationSource::Hostfile : AllocationSource::Hosts;
    found.from = is_file ? "--hostfile " + excerpt(query.hostfile) : "--hosts";
    Result<std::string> text =
        is_file ? text_of(query, query.hostfile, "--hostfile") : Result<std::string>(query.hosts);
    if (!text) return text.error();
    Result<std::vector<AllocatedHost>> hosts = is_file ? parse_hostfile(*text) : parse_hosts(*text);
    if (!hosts) return hosts.error().with(found.from);
    found.hosts = *std::move(hosts);
    if (const Status some = expect_hosts(found); !some) return some.error();
    return std::optional(std::move(found));
}

/// Takes the tasks of each host from "2(x3),1". Slurm sets it from the CPUs by default, so it counts only
/// when the user asked for tasks.
void take_slurm_tasks(std::vector<AllocatedHost>& hosts, const EnvironmentLookup& variable) {
    if (!variable("SLURM_NTASKS") && !variable("SLURM_NTASKS_PER_NODE")) return;
    const std::string told = variable("SLURM_TASKS_PER_NODE").value_or("");
    std::vector<int> tasks;
    for (const std::string_view piece : split(told, ',')) {
        const std::size_t times = piece.find("(x");
        const Result<std::int64_t> count = parse_int_between(piece.substr(0, times), 1, kMostSlots);
        const Result<std::int64_t> repeated =
            times == piece.npos || !piece.ends_with(')')
                ? Result<std::int64_t>(1)
                : parse_int_between(piece.substr(times + 2, piece.size() - times - 3), 1, kMostHosts);
        if (!count || !repeated) return;
        tasks.insert(tasks.end(), static_cast<std::size_t>(*repeated), static_cast<int>(*count));
        if (tasks.size() > hosts.size()) return;
    }
    if (tasks.size() != hosts.size()) return;
    for (std::size_t i = 0; i < hosts.size(); ++i) hosts[i].slots = tasks[i];
}

/// The ending of the names of a Slurm job's variables: salloc tells those of a heterogeneous job by component
/// only, and srun starts in the first one.
std::string ending_of_slurm(const EnvironmentLookup& variable) {
    const bool is_by_component =
        !variable("SLURM_JOB_NODELIST") && variable("SLURM_JOB_NODELIST_HET_GROUP_0");
    return is_by_component ? "_HET_GROUP_0" : "";
}

Found from_slurm(const EnvironmentLookup& told) {
    const std::string ending = ending_of_slurm(told);
    const EnvironmentLookup variable = [&](std::string_view name) {
        std::optional<std::string> value = told(std::string(name) + ending);
        return value ? value : told(name);
    };
    const std::optional<std::string> list = variable("SLURM_JOB_NODELIST");
    const std::optional<std::string> job = variable("SLURM_JOB_ID");
    if (!list || !job) return std::optional<Allocation>();
    Allocation found;
    found.source = AllocationSource::Slurm;
    found.job_id = *job;
    const std::string list_name = "SLURM_JOB_NODELIST" + ending;
    found.from = fmt::format("{}={}", list_name, excerpt(*list));
    const Result<std::vector<std::string>> names = expand_hostlist(*list);
    if (!names) return Error::invalid(fmt::format("{}: {}", list_name, names.error().what));
    HostList hosts;
    for (const std::string& name : *names) {
        if (const Status added = hosts.add({name, std::nullopt, std::nullopt, 0}); !added)
            return added.error().with(list_name);
    }
    found.hosts = hosts.take();
    if (const Status agreed = expect_count(found, variable, "SLURM_JOB_NUM_NODES"); !agreed)
        return agreed.error();
    take_slurm_tasks(found.hosts, variable);
    if (const Result<std::int64_t> components =
            parse_int_between(variable("SLURM_HET_SIZE").value_or(""), 1, kMostHosts)) {
        found.other_components = static_cast<int>(*components) - 1;
    }
    if (const auto own = variable("SLURMD_NODENAME")) {
        for (std::size_t i = 0; i < found.hosts.size(); ++i) {
            if (found.hosts[i].name == *own) found.own_index = static_cast<int>(i);
        }
    }
    return std::optional(std::move(found));
}

/// Counts the GPUs in Torque's PBS_GPUFILE, a line "host-gpu0" each.
Status count_gpus(Allocation& found, std::string_view text) {
    for (const std::string_view line : split(text, '\n')) {
        const std::string_view gpu = trim(line);
        const std::size_t dash = gpu.rfind("-gpu");
        if (gpu.empty()) continue;
        const auto host = std::find_if(found.hosts.begin(), found.hosts.end(), [&](const AllocatedHost& one) {
            return one.name == gpu.substr(0, dash);
        });
        if (dash == gpu.npos || host == found.hosts.end())
            return Error::invalid(
                fmt::format("PBS_GPUFILE: '{}' is no GPU of a host of PBS_NODEFILE", excerpt(gpu)));
        host->gpus = host->gpus.value_or(0) + 1;
    }
    return {};
}

Status take_torque(Allocation& found, const AllocationQuery& query) {
    found.source = AllocationSource::Torque;
    if (const Status agreed = expect_count(found, query.variable, "PBS_NUM_NODES"); !agreed) return agreed;
    const std::optional<std::string> gpus = query.variable("PBS_GPUFILE");
    if (!gpus) return {};
    const Result<std::string> text = text_of(query, *gpus, "PBS_GPUFILE");
    return text ? count_gpus(found, *text) : Status(text.error());
}

Found from_pbs(const AllocationQuery& query) {
    const std::optional<std::string> path = query.variable("PBS_NODEFILE");
    const std::optional<std::string> job = query.variable("PBS_JOBID");
    if (!path || !job) return std::optional<Allocation>();
    Allocation found;
    found.source = AllocationSource::Pbs;
    found.job_id = *job;
    found.from = "PBS_NODEFILE=" + excerpt(*path);
    const Result<std::string> text = text_of(query, *path, "PBS_NODEFILE");
    if (!text) return text.error();
    Result<std::vector<AllocatedHost>> hosts = parse_node_file(*text);
    if (!hosts) return hosts.error().with(found.from);
    found.hosts = *std::move(hosts);
    if (const Status some = expect_hosts(found); !some) return some.error();
    if (query.variable("PBS_VERSION").value_or("").starts_with("TORQUE")) {
        if (const Status taken = take_torque(found, query); !taken) return taken.error();
    }
    const Result<std::uint64_t> own = parse_uint(query.variable("PBS_NODENUM").value_or(""));
    if (own && *own < found.hosts.size()) found.own_index = static_cast<int>(*own);
    return std::optional(std::move(found));
}

/// Parses "h1 4 h2 4". The first host may only run the script: it then has one slot, and jsrun does not use
/// it.
Result<std::vector<AllocatedHost>> parse_mcpu_hosts(std::string_view text) {
    const std::vector<std::string_view> words = words_of(text);
    if (words.size() % 2 != 0)
        return Error::invalid(
            fmt::format("LSB_MCPU_HOSTS: '{}' is no list of hosts and counts", excerpt(text)));
    HostList hosts;
    for (std::size_t i = 0; i < words.size(); i += 2) {
        const Result<std::int64_t> slots = parse_int_between(words[i + 1], 1, kMostSlots);
        if (!slots) return slots.error().with("LSB_MCPU_HOSTS");
        if (const Status added =
                hosts.add({std::string(words[i]), static_cast<int>(*slots), std::nullopt, 0});
            !added)
            return added.error().with("LSB_MCPU_HOSTS");
    }
    return hosts.take();
}

Found from_lsf(const AllocationQuery& query) {
    const std::optional<std::string> job = query.variable("LSB_JOBID");
    const std::optional<std::string> list = query.variable("LSB_MCPU_HOSTS");
    const std::optional<std::string> path = query.variable("LSB_DJOB_HOSTFILE");
    if (!job || (!list && !path)) return std::optional<Allocation>();
    Allocation found;
    found.source = AllocationSource::Lsf;
    found.job_id = *job;
    found.from = path ? "LSB_DJOB_HOSTFILE=" + excerpt(*path) : "LSB_MCPU_HOSTS";
    Result<std::string> text = path ? text_of(query, *path, "LSB_DJOB_HOSTFILE") : Result<std::string>(*list);
    if (!text) return text.error();
    Result<std::vector<AllocatedHost>> hosts = path ? parse_node_file(*text) : parse_mcpu_hosts(*text);
    if (!hosts) return hosts.error();
    found.hosts = *std::move(hosts);
    if (const Status some = expect_hosts(found); !some) return some.error();
    return std::optional(std::move(found));
}

Found from_scheduler(const AllocationQuery& query) {
    std::optional<Allocation> first;
    for (Found found : {from_slurm(query.variable), from_pbs(query), from_lsf(query)}) {
        if (!found) return found;
        if (!*found) continue;
        if (!first) {
            first = **std::move(found);
            continue;
        }
        const bool agree =
            std::equal(first->hosts.begin(), first->hosts.end(), (*found)->hosts.begin(),
                       (*found)->hosts.end(), [](const AllocatedHost& one, const AllocatedHost& other) {
                           return is_same_host(one.name, other.name);
                       });
        if (agree) continue;
        return Error{
            Errc::Mismatch,
            fmt::format(
                "two schedulers say where this job runs: {} ({}: {}) and {} ({}: {}); unset the variables "
                "of the one that is left over, or give --hosts",
                name_of(first->source), first->from, shown(first->hosts), name_of((*found)->source),
                (*found)->from, shown((*found)->hosts)),
            0};
    }
    return first;
}

/// Matches --hosts with the scheduler's allocation: each must be one of its hosts, and is started as such.
Status place_within(Allocation& chosen, const Allocation& scheduler) {
    for (AllocatedHost& host : chosen.hosts) {
        const auto known =
            std::find_if(scheduler.hosts.begin(), scheduler.hosts.end(),
                         [&](const AllocatedHost& one) { return is_same_host(one.name, host.name); });
        if (known == scheduler.hosts.end()) {
            return Error{Errc::Mismatch,
                         fmt::format("{}: {} is not a host of this job ({}: {})", chosen.from,
                                     excerpt(host.name), scheduler.from, shown(scheduler.hosts)),
                         0};
        }
        if (!host.slots) host.slots = known->slots;
        host.gpus = known->gpus;
        host.line = known->line;
        host.name = known->name;
    }
    chosen.source = scheduler.source;
    chosen.job_id = scheduler.job_id;
    return {};
}

}  // namespace

std::string_view name_of(AllocationSource source) {
    switch (source) {
        case AllocationSource::Hosts: return "--hosts";
        case AllocationSource::Hostfile: return "--hostfile";
        case AllocationSource::Slurm: return "Slurm";
        case AllocationSource::Torque: return "Torque";
        case AllocationSource::Pbs: return "PBS";
        case AllocationSource::Lsf: return "LSF";
    }
    return "";
}

Result<std::vector<AllocatedHost>> parse_hosts(std::string_view text) {
    HostList hosts;
    for (const std::string_view piece : split_list(text)) {
        const Result<NamedSlots> named = split_slots(trim(piece));
        if (!named) return named.error();
        if (const Status added = add_named(hosts, *named); !added) return added.error();
    }
    return hosts.take();
}

Result<std::vector<AllocatedHost>> parse_hostfile(std::string_view text) {
    constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // some editors write it
    if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
    HostList hosts;
    int number = 0;
    for (const std::string_view line : split(text, '\n')) {
        ++number;
        if (const Status added = add_hostfile_line(hosts, line); !added)
            return added.error().with(fmt::format("line {}", number));
    }
    return hosts.take();
}

Result<std::vector<AllocatedHost>> parse_node_file(std::string_view text) {
    HostList hosts;
    int number = 0;
    for (const std::string_view line : split(text, '\n')) {
        const std::string_view name = trim(line);
        if (name.empty()) continue;
        if (const Status added = hosts.add({std::string(name), 1, std::nullopt, number}); !added)
            return added.error().with(fmt::format("line {}", number + 1));
        ++number;
    }
    return hosts.take();
}

bool is_same_host(std::string_view one, std::string_view other) {
    if (one == other) return true;
    const std::size_t dot = one.find('.'), other_dot = other.find('.');
    if ((dot == one.npos) == (other_dot == other.npos)) return false;
    return one.substr(0, dot) == other.substr(0, other_dot);
}

Result<std::optional<Allocation>> find_allocation(const AllocationQuery& query) {
    Found chosen = from_user(query);
    if (!chosen) return chosen;
    Found scheduler = from_scheduler(query);
    if (!*chosen || !scheduler || !*scheduler) {
        // When the user names the hosts, a scheduler's malformed variables do not matter.
        return *chosen ? chosen : scheduler;
    }
    if (const Status placed = place_within(**chosen, **scheduler); !placed) return placed.error();
    return chosen;
}

}  // namespace ddprun
