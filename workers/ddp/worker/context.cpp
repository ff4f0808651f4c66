#include "ddp/context.h"

#include <fmt/core.h>

#include <chrono>

#include "ddp/types.h"
#include "env/nodes/launcher_env.h"
#include "env/nodes/launcher_process.h"
#include "env/nodes/pmix_source.h"

namespace ddp {

namespace {

using ddprun::EnvironmentList;
using ddprun::EnvironmentLookup;
using ddprun::LauncherChoice;
using ddprun::LauncherFamily;
using ddprun::Placement;
using ddprun::Result;
using ddprun::Status;

constexpr std::chrono::seconds kPmixPatience{10};

/// The variables of the contract, made from what the launcher said.
Result<EnvironmentList> contract_of(const LauncherChoice& choice) {
    Placement placement = *choice.placement;
    if (choice.has_pmix) {
        if (const Status filled = ddprun::fill_from_pmix(placement, kPmixPatience); !filled) return filled.error();
    }
    if (placement.job.empty()) placement.job = ddprun::launcher_process(choice.rank_variable);
    return ddprun::to_contract(placement);
}

EnvironmentLookup laid_over(const EnvironmentLookup& below, const EnvironmentList& list) {
    return [&below, &list](std::string_view name) -> std::optional<std::string> {
        for (const auto& [known, value] : list) {
            if (known == name) return value;
        }
        return below(name);
    };
}

/// This process's place in its world, from ddprun's or torchrun's variables, else from those of mpirun, mpiexec, srun or
/// flux; a PMIx server is asked only for what these do not say. Nobody's variables: a world of one. Error: what the
/// variables lack or contradict, ready to be shown.
Result<Context> read_launcher(const EnvironmentLookup& lookup) {
    const Result<LauncherChoice> choice = ddprun::choose_launcher(lookup);
    if (!choice) return choice.error();
    EnvironmentList contract;
    if (choice->placement && choice->placement->family != LauncherFamily::Torchrun) {
        Result<EnvironmentList> made = contract_of(*choice);
        if (!made) return made.error();
        contract = *std::move(made);
    }
    Result<ddprun::WorkerEnv> env = ddprun::worker_env_from(laid_over(lookup, contract));
    if (!env) return contract.empty() ? env.error() : env.error().with(choice->explanation);
    return Context(*std::move(env), choice->explanation);
}

}  // namespace

Context Context::from_env() {
    Result<Context> found = read_launcher(ddprun::process_environment);
    if (!found) throw InvalidInput("reading the worker's environment: " + found.error().what);
    return *std::move(found);
}

}  // namespace ddp
