#include "launcher/start/outer_task.h"

#include "env/nodes/host_lists.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "launcher/plan/head_choice.h"

namespace ddprun {
namespace {

constexpr std::chrono::seconds kPmixTimeout{10};

TaskRole role_in(const CommandLine& line) {
    if (line.spec.per_rank) return TaskRole::Rank;
    return line.sources.contains("nproc-per-node") ? TaskRole::Node : TaskRole::Auto;
}

/// True when the user's options replace all that an outer launcher could tell.
bool ignores_launcher(const CommandLine& line) {
    if (line.spec.per_rank) return false;
    for (const char* said : {"standalone", "node-rank", "hosts", "hostfile", "start"}) {
        if (line.sources.contains(said)) return true;
    }
    return line.sources.contains("nnodes") && (line.spec.nodes.max == 1 || shared_endpoint(line.spec));
}

Status check_node_count(const CommandLine& line, const OuterTask& task) {
    const Nodes& nodes = line.spec.nodes;
    const int started = task.place.nodes;
    if (!line.sources.contains("nnodes") || (started >= nodes.min && started <= nodes.max)) return {};
    return Error{Errc::Mismatch,
                 fmt::format("--nnodes={} but {} ddpruns were started: {}; give one of the two",
                             line.values.at("nnodes"), started, task.launcher.explanation),
                 0};
}

}  // namespace

std::string describe(const OuterTask& task) {
    return fmt::format("{} {} of {}: {}", task.place.is_rank ? "rank" : "node", task.place.node_rank,
                       task.place.nodes, task.launcher.explanation);
}

Result<std::optional<OuterTask>> find_outer_task(const CommandLine& line, const EnvironmentLookup& lookup) {
    if (ignores_launcher(line)) return std::optional<OuterTask>{};
    Result<LauncherChoice> choice = choose_launcher(lookup);
    if (!choice) return choice.error();
    if (choice->placement) fill_from_apinfo(*choice->placement, lookup);
    PmixSession pmix;
    if (choice->placement && choice->has_pmix && choice->placement->family != LauncherFamily::Torchrun) {
        Result<PmixSession> filled = fill_from_pmix(*choice->placement, kPmixTimeout);
        if (!filled) return filled.error();
        pmix = *std::move(filled);
    }
    const Result<std::optional<NodePlace>> place = node_place(*choice, role_in(line));
    if (!place) return place.error();
    if (!choice->placement) return std::optional<OuterTask>{};
    OuterTask task{*std::move(choice), place->value_or(NodePlace{}), std::move(pmix)};
    if (*place) {
        if (const Status counted = check_node_count(line, task); !counted) return counted.error();
    }
    return std::optional(std::move(task));
}

Result<OuterRank> outer_rank_of(const OuterTask& task) {
    const Placement& told = *task.launcher.placement;
    if (!told.local_rank || !told.local_size) {
        return Error{
            Errc::NotFound,
            fmt::format("--per-rank: {} does not say the local rank, and no channel was asked for it: leave "
                        "--rdzv-endpoint out",
                        describe(told)),
            0};
    }
    return OuterRank{*told.local_rank, *told.local_size, told.node_rank.value_or(0), told.nodes.value_or(1)};
}

}  // namespace ddprun
