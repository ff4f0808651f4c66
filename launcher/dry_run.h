#pragma once

#include <optional>

#include "env/result.h"
#include "launcher/gather/outer_task.h"
#include "launcher/job.h"
#include "launcher/plan/plan.h"

/// What --dry-run shows: the run's own decisions, taken and not carried out.
namespace ddprun {

/// The order that this node would start its workers by, as far as it is known before the nodes have met, and
/// what surrounds it.
struct DryRun {
    rdzv::StartGeneration order;
    PlanSurroundings around;
};

/// How many workers each node has, by its rank: of hosts that we start as `start` says (a host's slots count
/// where
/// --nproc-per-node is not given), of others as many as this node.
std::vector<int> workers_by_node(const JobSetup& setup, bool workers_are_given);

/// Pure but for what is looked up of the program. `choice` says where the controller is; nullopt: `task`'s
/// launcher will. Error: as choose_torch_store.
Result<DryRun> plan_dry_run(const JobSetup& setup, const std::vector<int>& workers,
                            const std::optional<HeadChoice>& choice, const std::optional<OuterTask>& task);

/// Prints the plan. Error: what the run would be refused for.
Status show_plan(const JobSetup& setup, const std::optional<OuterTask>& task, bool workers_are_given);

}  // namespace ddprun
