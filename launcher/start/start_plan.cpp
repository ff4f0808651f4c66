#include "launcher/start/start_plan.h"

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
#include "launcher/plan/head_choice.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

constexpr std::size_t kHostsInLine = 8;

std::string hosts_in_line(const std::vector<AllocatedHost>& hosts) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < std::min(hosts.size(), kHostsInLine); ++i) names.push_back(hosts[i].name);
    return join(names, ",") + (hosts.size() > kHostsInLine ? ",..." : "");
}

std::string describe(const Allocation& allocation) {
    const std::string job =
        allocation.job_id.empty()
            ? allocation.from
            : fmt::format("{} job {} ({})", name_of(allocation.source), allocation.job_id, allocation.from);
    return fmt::format("{}: {} host{} {}", job, allocation.hosts.size(),
                       allocation.hosts.size() == 1 ? "" : "s", hosts_in_line(allocation.hosts));
}

bool is_of_user(const Allocation& allocation) {
    return allocation.source == AllocationSource::Hosts || allocation.source == AllocationSource::Hostfile;
}

/// The scheduler's own index counts only where the list is the scheduler's too.
std::optional<std::size_t> find_here(const Allocation& allocation, const StartFacts& facts) {
    if (allocation.own_index) return static_cast<std::size_t>(*allocation.own_index);
    for (std::size_t i = 0; i < allocation.hosts.size(); ++i) {
        if (is_same_host(allocation.hosts[i].name, facts.host_name)) return i;
    }
    return facts.find_by_address(allocation.hosts);
}

/// The starters in the order in which they are tried (hpc reference C.3). Those that start tasks of the batch
/// job come first.
std::vector<Starter> candidates(AllocationSource source) {
    using enum Starter;
    switch (source) {
        case AllocationSource::Pbs:
        case AllocationSource::Torque: return {Pbsdsh, Tm, Mpiexec, Ssh};
        case AllocationSource::Slurm: return {Srun};
        case AllocationSource::Lsf: return {Blaunch, Ssh};
        case AllocationSource::Hosts:
        case AllocationSource::Hostfile: break;
    }
    return {Ssh};
}

std::string_view program_of(Starter starter) {
    return starter == Starter::Tm ? "pbs_tmrsh" : name_of(starter);
}

/// Refuses TM without a PBS job, srun without Slurm and blaunch without LSF.
Status check_choice(Starter choice, AllocationSource source) {
    using enum Starter;
    const std::vector<Starter> own = candidates(source);
    if (choice == Mpiexec || choice == Ssh || std::find(own.begin(), own.end(), choice) != own.end())
        return {};
    const std::string_view whose = choice == Srun      ? "Slurm's"
                                   : choice == Blaunch ? "an LSF job's"
                                                       : "a PBS job's";
    return Error{
        Errc::Mismatch,
        fmt::format("--start={}: the hosts are {}'s, not {}", name_of(choice), name_of(source), whose), 0};
}

Result<Starter> choose_starter(const JobSpec& spec, const Allocation& allocation, const StartFacts& facts) {
    const Starter choice = spec.start.starter;
    if (choice == Starter::None) return choice;
    if (choice != Starter::Auto) {
        if (const Status fits = check_choice(choice, allocation.source); !fits) return fits.error();
        if (facts.is_there(program_of(choice))) return choice;
        return Error{Errc::NotFound,
                     fmt::format("--start={}: PATH has no {}", name_of(choice), program_of(choice)), 0};
    }
    std::vector<std::string> missing;
    for (const Starter one : candidates(allocation.source)) {
        if (facts.is_there(program_of(one))) return one;
        missing.emplace_back(program_of(one));
    }
    return Error{
        Errc::NotFound,
        fmt::format(
            "{}: nothing to start them with (PATH has no {}); start one ddprun on each yourself and say "
            "--start=none here, or --nnodes=1 to stay on this host",
            describe(allocation), join(missing, ", ")),
        0};
}

/// True for ssh to the user's hosts and for srun, which reach hosts from anywhere; TM's programs work only
/// within the job. With --start=none the head must be where the others look for node 0.
bool can_be_started_from_elsewhere(const Allocation& allocation, Starter choice) {
    return choice != Starter::None &&
           (is_of_user(allocation) || allocation.source == AllocationSource::Slurm);
}

std::string describe_start(const StartPlan& plan, const std::string& host_name) {
    if (plan.kind == StartPlan::Wait) return "waiting for the ddprun of each, as --start=none says";
    const std::size_t hosts = plan.hosts.size();
    if (plan.is_apart)
        return fmt::format("this host ({}) is none of them and runs no workers; starting ddprun on {} by {}",
                           host_name, hosts == 1 ? "it" : fmt::format("all {}", hosts),
                           name_of(plan.starter));
    return fmt::format("starting ddprun on the other{} by {}",
                       hosts == 2 ? "" : fmt::format(" {}", hosts - 1), name_of(plan.starter));
}

}  // namespace

std::vector<std::string> remarks_on(const Allocation& allocation, bool workers_were_given,
                                    std::optional<int> asked, int cores) {
    using enum AllocationSource;
    std::vector<std::string> remarks;
    if (allocation.other_components > 0) {
        remarks.push_back(fmt::format(
            "this Slurm job has {} more component{} (SLURM_HET_SIZE), whose hosts are not used: ddprun "
            "runs on those of {}",
            allocation.other_components, allocation.other_components == 1 ? "" : "s", allocation.from));
    }
    if (is_of_user(allocation)) return remarks;
    const bool is_pbs = allocation.source == Pbs || allocation.source == Torque;
    const auto crowded =
        std::find_if(allocation.hosts.begin(), allocation.hosts.end(), [&](const AllocatedHost& host) {
            return asked && host.slots.value_or(1) > 1 && host.slots != asked;
        });
    if (is_pbs && crowded != allocation.hosts.end()) {
        remarks.push_back(fmt::format(
            "{} has {} lines in PBS_NODEFILE, which is {} chunks on one host (no place=scatter) or "
            "mpiprocs, and is one node: "
            "--nproc-per-node={} starts {} worker{} there",
            crowded->name, *crowded->slots, *crowded->slots, *asked, *asked, *asked == 1 ? "" : "s"));
    }
    const bool has_slots = std::any_of(allocation.hosts.begin(), allocation.hosts.end(),
                                       [](const AllocatedHost& host) { return host.slots.value_or(1) > 1; });
    if (!workers_were_given && !has_slots && cores > 1) {
        remarks.emplace_back(
            "one worker on each host, because --nproc-per-node is not given (auto: one for each GPU, else "
            "one for each core)");
    }
    return remarks;
}

std::string remark_on_cores(std::string_view scheduler, int workers, int cores) {
    if (scheduler.empty() || workers <= cores) return "";
    const std::string_view way = scheduler == "Slurm" ? "--cpus-per-task=N"
                                 : scheduler == "PBS" ? "ncpus=N in -l select"
                                                      : "more slots of each host";
    return fmt::format("{} workers share {} core{}, all that {} gave this job on this host; {} asks for more",
                       workers, cores, cores == 1 ? "" : "s", scheduler, way);
}

std::string_view name_of(Starter starter) {
    using enum Starter;
    switch (starter) {
        case Auto: return "auto";
        case None: return "none";
        case Pbsdsh: return "pbsdsh";
        case Tm: return "tm";
        case Mpiexec: return "mpiexec";
        case Srun: return "srun";
        case Blaunch: return "blaunch";
        case Ssh: return "ssh";
    }
    return "";
}

std::optional<std::size_t> find_own_place(const std::vector<std::string>& hosts, const OwnPlaces& own) {
    HostFacts facts{"", own.addresses, {}};
    for (std::size_t i = 0; i < hosts.size(); ++i) {
        const auto resolved = own.resolved.find(hosts[i]);
        facts.endpoint_addresses =
            resolved == own.resolved.end() ? std::vector<std::string>{} : resolved->second;
        const auto is_it = [&](const std::string& name) { return is_same_host(hosts[i], name); };
        if (is_this_host(hosts[i], facts) || std::any_of(own.names.begin(), own.names.end(), is_it)) return i;
    }
    return std::nullopt;
}

Result<StartPlan> plan_start(const JobSpec& spec, NodesSaid said, const StartFacts& facts) {
    if (!facts.allocation) {
        if (spec.start.starter == Starter::Auto) return StartPlan{};
        return Error{
            Errc::InvalidArgument,
            fmt::format(
                "--start={}: nothing says which hosts (give --hosts or --hostfile; there is no PBS, Slurm "
                "or LSF job here)",
                name_of(spec.start.starter)),
            0};
    }
    const Allocation& allocation = *facts.allocation;
    if (said == NodesSaid::ByOthers && !is_of_user(allocation)) return StartPlan{};
    // Only MAX of --nnodes=MIN:MAX must agree: the job may go on with fewer nodes later.
    if (said != NodesSaid::Nothing && spec.nodes.max != static_cast<int>(allocation.hosts.size())) {
        return Error{Errc::Mismatch,
                     fmt::format("--nnodes={}, but {}; leave --nnodes out to use all of them",
                                 to_string(spec.nodes), describe(allocation)),
                     0};
    }
    const std::optional<std::size_t> here = find_here(allocation, facts);
    if (!here && !can_be_started_from_elsewhere(allocation, spec.start.starter)) {
        return Error{
            Errc::Mismatch,
            fmt::format(
                "this host ({}) is none of them: {}; run ddprun on one of these, or with --nnodes=1 on "
                "this host alone",
                facts.host_name, describe(allocation)),
            0};
    }
    StartPlan plan;
    plan.why = describe(allocation);
    plan.is_apart = !here;
    plan.slots = here ? allocation.hosts[*here].slots.value_or(0) : 0;
    if (here && allocation.hosts.size() == 1) return plan;
    const Result<Starter> starter = choose_starter(spec, allocation, facts);
    if (!starter) return starter.error();
    plan.starter = *starter;
    plan.kind = plan.starter == Starter::None ? StartPlan::Wait : StartPlan::All;
    plan.hosts = allocation.hosts;
    // This host comes first, because rank 0 runs beside the controller.
    const auto own = plan.hosts.begin() + static_cast<std::ptrdiff_t>(here.value_or(0));
    if (here) std::rotate(plan.hosts.begin(), own, own + 1);
    plan.why += "; " + describe_start(plan, facts.host_name);
    return plan;
}

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
