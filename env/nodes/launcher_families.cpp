#include "env/nodes/launcher_families.h"

#include <fmt/core.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <limits>
#include <string>

#include "env/io/proc.h"
#include "env/nodes/host_lists.h"
#include "env/text.h"

namespace ddprun {
namespace {

using Names = std::array<std::string_view, 2>;  ///< variables, of which the first that is set counts
using Adjust = void (*)(Candidate&, const EnvironmentLookup&);

struct Family {
    LauncherFamily id;
    Names rank, size, local_rank, local_size, node_rank, nodes, job;
    Adjust adjust = nullptr;
};

void mark_incomplete_contract(Candidate& candidate, const EnvironmentLookup& lookup) {
    for (const std::string_view name : {"WORLD_SIZE", "LOCAL_RANK"}) {
        if (!lookup(name)) candidate.dropped = fmt::format("{} is not set", name);
    }
    candidate.by_hand = !lookup("TORCHELASTIC_RUN_ID") && !lookup("DDPRUN_GENERATION");
}

void mark_hydra(Candidate& candidate, const EnvironmentLookup& lookup) {
    candidate.from_hydra = lookup("MPI_LOCALRANKID").has_value();
}

/// True for steps that are no parallel run: the batch script's, the interactive shell's, the extern step.
bool is_special_step(std::string_view step) {
    const Result<std::uint64_t> number = parse_uint(step);
    return number && *number >= 0xfffffff0u;
}

/// Reads the counts of a step whose nodes may run different numbers of tasks.
void read_tasks_per_node(Candidate& candidate, const std::string& value) {
    const Result<std::vector<int>> tasks = parse_tasks_per_node(value);
    if (!tasks) {
        candidate.broken = fmt::format("SLURM_STEP_TASKS_PER_NODE={}", tasks.error().what);
        return;
    }
    Placement& placement = candidate.placement;
    if (!placement.nodes) placement.nodes = static_cast<int>(tasks->size());
    if (!placement.node_rank) return;
    const auto node = static_cast<std::size_t>(*placement.node_rank);
    if (node < tasks->size()) placement.local_size = (*tasks)[node];
}

void read_slurm_step(Candidate& candidate, const EnvironmentLookup& lookup) {
    const std::optional<std::string> step = lookup("SLURM_STEP_ID");
    // Without a step, SLURM_PROCID is the batch script's, 0.
    if (!step) {
        candidate.dropped = "batch script";
        return;
    }
    if (is_special_step(*step)) candidate.dropped = "interactive shell";
    candidate.placement.job += "." + *step;
    if (const auto tasks = lookup("SLURM_STEP_TASKS_PER_NODE")) read_tasks_per_node(candidate, *tasks);
}

void mark_alone_on_node(Candidate& candidate, const EnvironmentLookup&) {
    candidate.placement.local_rank = 0;
    candidate.placement.local_size = 1;
}

void drop_pbs(Candidate& candidate, const EnvironmentLookup&) { candidate.dropped = "gives no ranks"; }

/// Left out: OMPI_COMM_WORLD_NODE_RANK, which counts the node's processes over all jobs, SLURM_NTASKS, which
/// is the allocation's, and OMPI_UNIVERSE_SIZE, which counts slots.
const Family kFamilies[] = {
    {LauncherFamily::Torchrun,
     {"RANK"},
     {"WORLD_SIZE"},
     {"LOCAL_RANK"},
     {"LOCAL_WORLD_SIZE"},
     {"GROUP_RANK"},
     {"GROUP_WORLD_SIZE"},
     {"TORCHELASTIC_RUN_ID"},
     mark_incomplete_contract},
    {LauncherFamily::OpenMpi,
     {"OMPI_COMM_WORLD_RANK"},
     {"OMPI_COMM_WORLD_SIZE"},
     {"OMPI_COMM_WORLD_LOCAL_RANK"},
     {"OMPI_COMM_WORLD_LOCAL_SIZE"},
     {},
     {},
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {LauncherFamily::Jsm,
     {"JSM_NAMESPACE_RANK"},
     {"JSM_NAMESPACE_SIZE"},
     {"JSM_NAMESPACE_LOCAL_RANK"},
     {"JSM_NAMESPACE_LOCAL_SIZE"},
     {},
     {},
     {"PMIX_NAMESPACE"}},
    {LauncherFamily::Pals,
     {"PALS_RANKID"},
     {"PALS_SIZE"},
     {"PALS_LOCAL_RANKID"},
     {"PALS_LOCAL_SIZE"},
     {"PALS_NODEID"},
     {},
     {"PALS_APID", "PMIX_NAMESPACE"}},
    {LauncherFamily::Mvapich,
     {"MV2_COMM_WORLD_RANK"},
     {"MV2_COMM_WORLD_SIZE"},
     {"MV2_COMM_WORLD_LOCAL_RANK"},
     {"MV2_COMM_WORLD_LOCAL_SIZE"},
     {},
     {},
     {}},
    {LauncherFamily::Pmi,
     {"PMI_RANK", "PMI_ID"},
     {"PMI_SIZE"},
     {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
     {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"},
     {},
     {},
     {"PMI_JOBID"},
     mark_hydra},
    {LauncherFamily::Flux,
     {"FLUX_TASK_RANK"},
     {"FLUX_JOB_SIZE"},
     {"FLUX_TASK_LOCAL_ID"},
     {},
     {},
     {"FLUX_JOB_NNODES"},
     {"FLUX_JOB_ID"}},
    {LauncherFamily::Pmix, {"PMIX_RANK"}, {}, {}, {}, {}, {}, {"PMIX_NAMESPACE"}},
    {LauncherFamily::Slurm,
     {"SLURM_PROCID"},
     {"SLURM_STEP_NUM_TASKS"},
     {"SLURM_LOCALID"},
     {},
     {"SLURM_NODEID"},
     {"SLURM_STEP_NUM_NODES"},
     {"SLURM_JOB_ID"},
     read_slurm_step},
    {LauncherFamily::SkyPilot,
     {"SKYPILOT_NODE_RANK"},
     {"SKYPILOT_NUM_NODES"},
     {},
     {},
     {"SKYPILOT_NODE_RANK"},
     {"SKYPILOT_NUM_NODES"},
     {"SKYPILOT_TASK_ID"},
     mark_alone_on_node},
    {LauncherFamily::Pbs, {"PBS_JOBID"}, {}, {}, {}, {}, {}, {"PBS_JOBID"}, drop_pbs},
};

struct Variable {
    std::string name, value;
};

std::optional<Variable> first_set(const Names& names, const EnvironmentLookup& lookup) {
    for (const std::string_view name : names) {
        if (name.empty()) continue;
        if (auto value = lookup(name)) return Variable{std::string(name), *std::move(value)};
    }
    return std::nullopt;
}

std::optional<int> read_number(const Names& names, const EnvironmentLookup& lookup, std::string& broken) {
    const std::optional<Variable> variable = first_set(names, lookup);
    if (!variable) return std::nullopt;
    const auto number = parse_int_between(variable->value, 0, std::numeric_limits<int>::max());
    if (number) return static_cast<int>(*number);
    broken = fmt::format("{}={}", variable->name, number.error().what);
    return std::nullopt;
}

void require_below(std::string_view what, std::optional<int> index, std::optional<int> size,
                   Candidate& candidate) {
    if (!index || !size || *index < *size || !candidate.broken.empty()) return;
    candidate.broken = fmt::format("{} {} of {}", what, *index, *size);
}

std::optional<Candidate> read_family(const Family& family, const EnvironmentLookup& lookup) {
    const std::optional<Variable> present = first_set(family.rank, lookup);
    if (!present) return std::nullopt;
    Candidate found;
    found.rank_variable = present->name;
    Placement& placement = found.placement;
    placement.family = family.id;
    if (family.id != LauncherFamily::Pbs) placement.rank = read_number(family.rank, lookup, found.broken);
    placement.size = read_number(family.size, lookup, found.broken);
    placement.local_rank = read_number(family.local_rank, lookup, found.broken);
    placement.local_size = read_number(family.local_size, lookup, found.broken);
    placement.node_rank = read_number(family.node_rank, lookup, found.broken);
    placement.nodes = read_number(family.nodes, lookup, found.broken);
    if (const auto job = first_set(family.job, lookup)) placement.job = job->value;
    if (family.adjust != nullptr) family.adjust(found, lookup);
    require_below("rank", placement.rank, placement.size, found);
    require_below("local rank", placement.local_rank, placement.local_size, found);
    require_below("node", placement.node_rank, placement.nodes, found);
    return found;
}

}  // namespace

std::vector<Candidate> collect_candidates(const EnvironmentLookup& lookup) {
    std::vector<Candidate> found;
    for (const Family& family : kFamilies) {
        if (auto candidate = read_family(family, lookup)) found.push_back(*std::move(candidate));
    }
    return found;
}

namespace {

/// False also for a process that we may not read: a daemon of another user.
bool has_variable(pid_t pid, std::string_view name) {
    std::ifstream file(fmt::format("{}/{}/environ", own_proc(), pid));
    const std::string wanted = std::string(name) + "=";
    for (std::string entry; std::getline(file, entry, '\0');) {
        if (entry.starts_with(wanted)) return true;
    }
    return false;
}

struct Launcher {
    pid_t pid;
    ProcStat stat;
};
Launcher find_launcher(std::string_view rank_variable) {
    pid_t pid = ::getppid();
    ProcStat stat = proc_stat_of(pid).value_or(ProcStat{});
    while (stat.parent > 1 && has_variable(pid, rank_variable)) {
        pid = stat.parent;
        stat = proc_stat_of(pid).value_or(ProcStat{});
    }
    return {pid, stat};
}

}  // namespace

std::string launcher_process(std::string_view rank_variable) {
    const Launcher launcher = find_launcher(rank_variable);
    return fmt::format("{}-{}", launcher.pid, launcher.stat.start_ticks);
}

std::string hydra_job(std::string_view rank_variable) {
    std::ifstream file(fmt::format("{}/{}/cmdline", own_proc(), find_launcher(rank_variable).pid));
    std::string before;
    for (std::string word; std::getline(file, word, '\0'); before = word) {
        if (before == "--control-port") return word;
    }
    return "";
}

}  // namespace ddprun
