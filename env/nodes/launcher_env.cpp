#include "env/nodes/launcher_env.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "env/nodes/launcher_families.h"
#include "env/text.h"

namespace ddprun {

namespace {

using F = LauncherFamily;
constexpr F kAll[] = {F::Torchrun, F::OpenMpi, F::Jsm,   F::Pals,     F::Mvapich, F::Pmi,
                      F::Flux,     F::Pmix,    F::Slurm, F::SkyPilot, F::Pbs};

/// Two families of variables that one launcher may set.
struct Relation {
    F one, other;
    bool must_agree;  ///< false: `other` may as well be a launcher around `one`
};
constexpr Relation kRelations[] = {
    {F::OpenMpi, F::Pmix, true}, {F::OpenMpi, F::Jsm, false}, {F::Jsm, F::Pmix, true},
    {F::Pals, F::Pmi, true},     {F::Pals, F::Pmix, true},    {F::Pals, F::Flux, true},
    {F::Mvapich, F::Pmi, true},  {F::Pmi, F::Flux, true},     {F::Pmi, F::Slurm, false},
    {F::Flux, F::Pmix, true},    {F::Pmix, F::Slurm, false},
};

const Relation* relation(F one, F other) {
    for (const Relation& known : kRelations) {
        if (known.one == one && known.other == other) return &known;
    }
    return nullptr;
}

bool disagree(const std::optional<int>& one, const std::optional<int>& other) {
    return one && other && *one != *other;
}

bool agree(const Placement& one, const Placement& other) {
    return one.rank == other.rank && !disagree(one.size, other.size);
}

std::string number_of(const std::optional<int>& index, const std::optional<int>& size) {
    const auto text = [](const std::optional<int>& n) {
        return n ? fmt::format("{}", *n) : std::string("?");
    };
    return text(index) + "/" + text(size);
}

std::string side(const Candidate& candidate) {
    return fmt::format("{} says rank {} ({}={})", name_of(candidate.placement.family),
                       number_of(candidate.placement.rank, candidate.placement.size), candidate.rank_variable,
                       candidate.placement.rank.value_or(0));
}

Error contradiction(const Candidate& one, const Candidate& other) {
    return {Errc::Mismatch,
            fmt::format("{} but {}: unset what is stale, or set DDPRUN_LAUNCHER to {} or {}", side(one),
                        side(other), name_of(one.placement.family), name_of(other.placement.family)),
            0};
}

bool counts(const Candidate& candidate) { return candidate.dropped.empty() && candidate.broken.empty(); }

/// Hydra under Flux sets its own PMI variables.
bool must_agree(const Candidate& chosen, const Candidate& other) {
    const Relation* known = relation(chosen.placement.family, other.placement.family);
    return known != nullptr && known->must_agree && !(chosen.from_hydra && other.placement.family == F::Flux);
}

/// True when RANK was set by hand in a run of several processes and contradicts the launcher.
bool stale_by_hand(const Candidate& chosen, const Candidate& other) {
    return chosen.by_hand && other.placement.size.value_or(1) > 1 &&
           !agree(chosen.placement, other.placement);
}

Status check_contradictions(const Candidate& chosen, const std::vector<Candidate>& all) {
    for (const Candidate& other : all) {
        if (&other == &chosen || !counts(other)) continue;
        const bool differ = must_agree(chosen, other) && !agree(chosen.placement, other.placement);
        if (differ || stale_by_hand(chosen, other)) return contradiction(chosen, other);
    }
    return {};
}

bool is_kin(const Candidate& chosen, const Candidate& other) {
    return relation(chosen.placement.family, other.placement.family) != nullptr && counts(other) &&
           agree(chosen.placement, other.placement);
}

void fill_gaps(Placement& mine, const Placement& kin) {
    for (const auto member : {&Placement::size, &Placement::local_rank, &Placement::local_size,
                              &Placement::node_rank, &Placement::nodes}) {
        if (!(mine.*member)) mine.*member = kin.*member;
    }
    if (mine.job.empty()) mine.job = kin.job;
}

/// Fills in the fields that follow from one node, or from a world of one.
void complete_one_node(Placement& mine) {
    if (mine.size == 1) mine.local_size = 1;
    if (mine.size && mine.local_size == mine.size) mine.nodes = 1;
    if (mine.nodes != 1) return;
    mine.local_size = mine.size;
    if (!mine.local_rank) mine.local_rank = mine.rank;
    mine.node_rank = 0;
}

std::string reason(const Candidate& ignored) {
    if (!ignored.dropped.empty()) return ignored.dropped;
    if (!ignored.broken.empty()) return ignored.broken;
    return "rank " + number_of(ignored.placement.rank, ignored.placement.size);
}

std::string explain(const Candidate* chosen, const Placement& placement, const std::vector<Candidate>& all) {
    std::string text = chosen == nullptr ? "launcher=none" : describe(placement);
    std::vector<std::string> ignored;
    for (const Candidate& other : all) {
        if (&other == chosen || (chosen != nullptr && is_kin(*chosen, other))) continue;
        ignored.push_back(fmt::format("{} ({})", name_of(other.placement.family), reason(other)));
    }
    return ignored.empty() ? text : text + "; ignored: " + join(ignored, ", ");
}

const Candidate* innermost(const std::vector<Candidate>& all) {
    const auto found =
        std::find_if(all.begin(), all.end(), [](const Candidate& c) { return c.dropped.empty(); });
    return found == all.end() ? nullptr : &*found;
}

Error bad_override(std::string_view wanted, std::string_view why) {
    return {Errc::InvalidArgument, fmt::format("DDPRUN_LAUNCHER={}: {}", wanted, why), 0};
}

/// The family that the user named; nullptr for none.
Result<const Candidate*> named(std::string_view wanted, const std::vector<Candidate>& all) {
    if (wanted == "none") return nullptr;
    std::vector<std::string> names{"none"};
    for (const F family : kAll) names.emplace_back(name_of(family));
    if (std::find(names.begin(), names.end(), wanted) == names.end()) {
        return bad_override(wanted, "expected one of " + join(names, ", "));
    }
    for (const Candidate& candidate : all) {
        if (name_of(candidate.placement.family) != wanted) continue;
        if (!candidate.dropped.empty()) return bad_override(wanted, candidate.dropped);
        return &candidate;
    }
    return bad_override(wanted, "its variables are not set");
}

Result<const Candidate*> choose(const EnvironmentLookup& lookup, const std::vector<Candidate>& all) {
    // DDPRUN_LAUNCHER is about ddprun's own launcher, not about its workers.
    const bool ours = lookup("DDPRUN_GENERATION").has_value();
    const std::optional<std::string> wanted = ours ? std::nullopt : lookup("DDPRUN_LAUNCHER");
    if (wanted && !wanted->empty()) return named(*wanted, all);
    const Candidate* const found = innermost(all);
    if (found != nullptr && found->broken.empty()) {
        if (const Status checked = check_contradictions(*found, all); !checked) return checked.error();
    }
    return found;
}

}  // namespace

std::string_view name_of(LauncherFamily family) {
    switch (family) {
        case F::Torchrun: return "torchrun";
        case F::OpenMpi: return "openmpi";
        case F::Jsm: return "jsm";
        case F::Pals: return "pals";
        case F::Mvapich: return "mvapich";
        case F::Pmi: return "pmi";
        case F::Flux: return "flux";
        case F::Pmix: return "pmix";
        case F::Slurm: return "slurm";
        case F::SkyPilot: return "skypilot";
        case F::Pbs: return "pbs";
    }
    return "";
}

std::string describe(const Placement& placement) {
    std::string text = fmt::format("launcher={} rank {}", name_of(placement.family),
                                   number_of(placement.rank, placement.size));
    if (placement.local_rank) text += " local " + number_of(placement.local_rank, placement.local_size);
    if (placement.node_rank) text += " node " + number_of(placement.node_rank, placement.nodes);
    return text;
}

Result<LauncherChoice> choose_launcher(const EnvironmentLookup& lookup) {
    const std::vector<Candidate> all = collect_candidates(lookup);
    const Result<const Candidate*> chosen = choose(lookup, all);
    if (!chosen) return chosen.error();
    LauncherChoice choice;
    choice.has_pmix = lookup("PMIX_NAMESPACE").has_value();
    if (*chosen != nullptr) {
        const Candidate& winner = **chosen;
        // worker_env_from has the best message about a malformed contract.
        if (!winner.broken.empty() && winner.placement.family != F::Torchrun) {
            return Error{Errc::InvalidArgument,
                         fmt::format("launcher={}: {}", name_of(winner.placement.family), winner.broken), 0};
        }
        choice.placement = winner.placement;
        choice.rank_variable = winner.rank_variable;
        for (const Candidate& other : all) {
            if (is_kin(winner, other)) fill_gaps(*choice.placement, other.placement);
        }
        complete_one_node(*choice.placement);
    }
    choice.explanation = explain(*chosen, choice.placement.value_or(Placement{}), all);
    return choice;
}

Result<EnvironmentList> to_contract(const Placement& placement) {
    Placement whole = placement;
    complete_one_node(whole);
    const std::pair<std::string_view, std::optional<int>> needed[] = {{"RANK", whole.rank},
                                                                      {"WORLD_SIZE", whole.size},
                                                                      {"LOCAL_RANK", whole.local_rank},
                                                                      {"LOCAL_WORLD_SIZE", whole.local_size}};
    EnvironmentList contract;
    for (const auto& [name, value] : needed) {
        if (!value) {
            return Error{Errc::NotFound,
                         fmt::format("{} does not say the {}: set RANK, WORLD_SIZE, LOCAL_RANK and "
                                     "LOCAL_WORLD_SIZE, or start it with ddprun",
                                     describe(whole), name),
                         0};
        }
        contract.emplace_back(name, fmt::format("{}", *value));
    }
    if (whole.node_rank && whole.nodes) {
        contract.emplace_back("GROUP_RANK", fmt::format("{}", *whole.node_rank));
        contract.emplace_back("GROUP_WORLD_SIZE", fmt::format("{}", *whole.nodes));
    }
    contract.emplace_back("TORCHELASTIC_RUN_ID", fmt::format("{}-{}", name_of(whole.family), whole.job));
    return contract;
}

bool is_rank_variable(std::string_view variable) {
    if (variable.starts_with("PMIX_MCA_") || variable == "PMIX_DEBUG") return false;
    for (const std::string_view prefix :
         {"OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "OMPI_MCA_ess_", "PMIX_", "PMI_", "HYDI_", "PALS_",
          "MPI_LOCAL", "MV2_COMM_WORLD_", "JSM_NAMESPACE_", "FLUX_TASK_"}) {
        if (variable.starts_with(prefix)) return true;
    }
    for (const std::string_view name :
         {"OMPI_APP_CTX_NUM_PROCS", "OMPI_FIRST_RANKS", "OMPI_UNIVERSE_SIZE", "OMPI_FILE_LOCATION",
          "OMPI_NUM_APP_CTX", "OMPI_MCA_ess", "OMPI_ARGV", "OMPI_COMMAND", "OMPI_MCA_pmix",
          "OMPI_MCA_initial_wdir", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "SLURM_PROCID", "SLURM_LOCALID",
          "SLURM_TASK_PID", "SLURM_PMIX_MAPPING_SERV", "SLURM_GTIDS", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"}) {
        if (variable == name) return true;
    }
    return false;
}

Result<std::optional<NodePlace>> node_place(const LauncherChoice& choice, TaskRole role) {
    const bool has_launcher = choice.placement && choice.placement->family != LauncherFamily::Torchrun;
    if (!has_launcher && role == TaskRole::Rank) {
        return Error{
            Errc::NotFound,
            fmt::format("--per-rank: no mpiexec or srun started this ddprun ({})", choice.explanation), 0};
    }
    if (!has_launcher) return std::optional<NodePlace>{};
    const Placement& mine = *choice.placement;
    if (!mine.rank || mine.size.value_or(1) <= 1) return std::optional<NodePlace>{};
    const bool has_company = mine.local_size.value_or(1) > 1;
    if (has_company && role == TaskRole::Node) {
        return Error{
            Errc::Mismatch,
            fmt::format(
                "{}: {} ddprun were started on this node, and --nproc-per-node would have each of them "
                "start its "
                "workers: start one per node, or leave --nproc-per-node out (each then runs one process, "
                "as with "
                "--per-rank), or say --standalone",
                choice.explanation, *mine.local_size),
            0};
    }
    // With one task per node its rank is the node's; a node index could have gaps.
    return std::optional<NodePlace>(NodePlace{*mine.rank, *mine.size, has_company || role == TaskRole::Rank});
}

}  // namespace ddprun
