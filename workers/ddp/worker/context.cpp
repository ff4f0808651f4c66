#include "ddp/context.h"

#include <fmt/core.h>

#include <chrono>
#include <utility>

#include "ddp/types.h"
#include "ddp/worker/rank_rendezvous.h"
#include "env/nodes/host_lists.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/launcher_families.h"
#include "env/nodes/pmix_source.h"
#include "env/worker_env.h"

namespace ddp {

namespace {

using ddprun::EnvironmentList;
using ddprun::EnvironmentLookup;
using ddprun::LauncherChoice;
using ddprun::LauncherFamily;
using ddprun::Placement;
using ddprun::Result;

constexpr std::chrono::seconds kPmixTimeout{10};

/// The variables of the environment contract, and their origin.
struct Contract {
    EnvironmentList variables;
    std::string origin;
};

/// Built from the launcher's variables, and from the rendezvous of the ranks where they are on several hosts.
Result<Contract> contract_of(const LauncherChoice& choice, const EnvironmentLookup& lookup) {
    LauncherChoice launcher = choice;
    Placement& placement = *launcher.placement;
    ddprun::fill_from_apinfo(placement, lookup);
    ddprun::PmixSession pmix;
    if (choice.has_pmix) {
        Result<ddprun::PmixSession> filled = ddprun::fill_from_pmix(placement, kPmixTimeout);
        if (!filled) return filled.error();
        pmix = *std::move(filled);
    }
    Contract contract{{}, choice.explanation};
    if (needs_rendezvous(placement) && !lookup("DDPRUN_STORE")) {
        Result<RankRendezvous> met = rendezvous_of_ranks(launcher, lookup);
        if (!met) return met.error();
        contract.variables = met->variables;
        contract.origin += "; " + met->how;
        placement = met->placement;
    }
    if (placement.job.empty()) placement.job = ddprun::launcher_process(choice.rank_variable);
    Result<EnvironmentList> variables = ddprun::to_contract(placement);
    if (!variables) return variables.error();
    // Variables from the rendezvous come first: the first value of a name counts.
    contract.variables.insert(contract.variables.end(), variables->begin(), variables->end());
    return contract;
}

EnvironmentLookup laid_over(const EnvironmentLookup& below, const EnvironmentList& list) {
    return [&below, &list](std::string_view name) -> std::optional<std::string> {
        for (const auto& [known, value] : list) {
            if (known == name) return value;
        }
        return below(name);
    };
}

/// Reads this process's place in its world from ddprun's or torchrun's variables, else from those of mpirun,
/// mpiexec, srun or flux; asks a PMIx server only for facts that these lack. Without any such variables: a
/// world of one. Error: a missing or contradictory variable, ready to be shown.
Result<Context> read_launcher(const EnvironmentLookup& lookup) {
    const Result<LauncherChoice> choice = ddprun::choose_launcher(lookup);
    if (!choice) return choice.error();
    Contract contract{{}, choice->explanation};
    if (choice->placement && choice->placement->family != LauncherFamily::Torchrun) {
        Result<Contract> made = contract_of(*choice, lookup);
        if (!made) return made.error();
        contract = *std::move(made);
    }
    Result<ddprun::WorkerEnv> env = ddprun::worker_env_from(laid_over(lookup, contract.variables));
    if (!env) return contract.variables.empty() ? env.error() : env.error().with(contract.origin);
    return Context(*env, contract.origin);
}

}  // namespace

Context::Context(const ddprun::WorkerEnv& env, std::string origin)
    : env_(std::make_shared<const ddprun::WorkerEnv>(env)), origin_(std::move(origin)) {}

int Context::rank() const { return env_->rank; }
int Context::local_rank() const { return env_->local_rank; }
int Context::world_size() const { return env_->world_size; }
int Context::local_world_size() const { return env_->local_world_size; }
int Context::restart_count() const { return env_->restart_count; }
std::uint64_t Context::generation() const { return env_->generation; }
bool Context::has_store() const { return !env_->store.empty(); }

Context Context::from_env() {
    Result<Context> found = read_launcher(ddprun::process_environment);
    if (!found) throw InvalidInput("reading the worker's environment: " + found.error().what);
    return *std::move(found);
}

}  // namespace ddp
