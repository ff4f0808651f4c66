#include "launcher/launch.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include <optional>

#include "env/print.h"
#include "env/text.h"
#include "launcher/ends/report.h"
#include "launcher/node/pmix/server.h"
#include "launcher/node/pmix/wish.h"
#include "launcher/plan/plan.h"
#include "launcher/start/meet.h"
#include "launcher/start/start_plan.h"

namespace ddprun {
namespace {

constexpr std::size_t kMostHostLines = 16;

std::string describe_ranks(int first, int count) {
    return count == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {}-{}", first, first + count - 1);
}

/// One line for each host that ddprun starts: its ranks, and what starts its ddprun.
std::vector<std::string> describe_hosts(const HostStart& start, const std::vector<int>& workers) {
    std::vector<std::string> lines;
    int first = 0;
    for (std::size_t node = 0; node < start.hosts.size(); ++node) {
        if (lines.size() == kMostHostLines) {
            lines.push_back(fmt::format("and {} more", start.hosts.size() - node));
            break;
        }
        const bool is_here = static_cast<int>(node) < start.nodes.first;
        lines.push_back(fmt::format(
            "{}: node {}, {}, {}", start.hosts[node].name, node, describe_ranks(first, workers[node]),
            is_here ? "this host" : fmt::format("ddprun started by {}", name_of(start.starter))));
        first += workers[node];
    }
    return lines;
}

/// Says where the controller is. This node finds it as torchrun would.
std::string describe_controller(const HeadChoice& choice) {
    const std::string port =
        choice.endpoint.port == 0 ? "any free port" : fmt::format("port {}", choice.endpoint.port);
    const char* const unless = choice.contested ? "; where that is taken, at the ddprun that has it" : "";
    if (choice.is_head) return fmt::format("on this node, {}{} ({})", port, unless, choice.why);
    return fmt::format("at {} ({})", to_string(choice.endpoint), choice.why);
}

/// MASTER_ADDR as far as it is known before the nodes have met; its host is "" otherwise.
MasterChoice choose_master_before(const JobSetup& setup, bool serves_torch,
                                  const std::optional<HeadChoice>& choice, bool is_first) {
    JobSpec spec = setup.spec;
    RendezvousSpec& rendezvous = spec.rendezvous;
    if (!choice) {
        const std::string host = is_first ? rendezvous.local_addr.value_or("") : "";
        return {rendezvous.master_addr.value_or(host), serves_torch ? 0 : rendezvous.master_port.value_or(0)};
    }
    int port = choice->endpoint.port;
    if (serves_torch && spec.nodes.max == 1) port = rendezvous.master_port.value_or(0);
    const bool others_know_more = !choice->is_head && rendezvous.local_addr && !rendezvous.master_addr;
    const bool first_is_elsewhere = rendezvous.head_is_apart && !serves_torch && !rendezvous.master_addr;
    // When the controller is on another node, assume that its command line is the same as this one.
    if (!choice->is_head) rendezvous.local_addr.reset();
    MasterChoice master =
        choose_master(spec, serves_torch, static_cast<std::uint16_t>(port), false, true, {});
    if (others_know_more || first_is_elsewhere) master.host.clear();
    return master;
}

/// The number of workers of each node, by node rank. A host that we start has as many as `start` says, or its
/// slots if --nproc-per-node is not given. Any other node has as many as this one.
std::vector<int> workers_by_node(const JobSetup& setup, bool workers_are_given) {
    std::vector<int> workers(static_cast<std::size_t>(setup.spec.nodes.max), setup.workers);
    if (!setup.start) return workers;
    const std::vector<int>& slots = setup.start->order.slots;
    for (std::size_t node = 0; node < std::min(slots.size(), workers.size()); ++node) {
        if (slots[node] > 1 && !workers_are_given) workers[node] = slots[node];
    }
    return workers;
}

/// The order by which this node would start its workers, as far as it is known before the nodes have met, and
/// its surroundings.
struct DryRun {
    rdzv::StartGeneration order;
    PlanSurroundings around;
};

/// `choice` says where the controller is; nullopt: the outer launcher will say it.
Result<DryRun> plan_dry_run(const JobSetup& setup, const std::vector<int>& workers,
                            const std::optional<HeadChoice>& choice) {
    const JobSpec& spec = setup.spec;
    const std::optional<OuterTask>& task = setup.task;
    const Result<TorchStoreChoice> store = choose_torch_store(spec, is_run_by_python(setup.program));
    if (!store) return store.error();
    DryRun dry;
    const bool is_head = choice ? choice->is_head : task && task->place.node_rank == 0;
    const bool is_numbered = spec.nodes.max == 1 || spec.rendezvous.node_rank || is_head;
    const int node = spec.rendezvous.node_rank.value_or(is_head ? 0 : 1);
    if (!is_numbered)
        dry.around.node =
            fmt::format("shown as node {}: all but the first are numbered when they have met", node);
    if (spec.rendezvous.head_is_apart)
        dry.around.node = "none: this host runs no workers; shown is node 0, as if it were like this host";
    rdzv::StartGeneration& order = dry.order;
    order.local_world_size = setup.workers;
    order.group_world_size = spec.nodes.max;
    order.group_rank = std::min(node, spec.nodes.max - 1);
    order.world_size = std::accumulate(workers.begin(), workers.end(), 0);
    order.first_rank = std::accumulate(workers.begin(), workers.begin() + order.group_rank, 0);
    order.role_first_rank = order.first_rank;
    order.role_world_size = order.world_size;
    order.generation = 1;
    order.agent_store = store->is_served;
    const MasterChoice master = choose_master_before(setup, store->is_served, choice, is_head);
    order.master_addr = master.host;
    order.master_port = master.port;

    const PmixWish wish = decide_pmix(spec, setup.program.path);
    dry.around.has_pmix = wish.wanted;
    if (wish.wanted) dry.around.mpi = fmt::format("ddprun is the PMIx server of the workers ({})", wish.why);
    if (!wish.warning.empty() && order.world_size > 1) dry.around.mpi = wish.warning;
    if (setup.start) dry.around.hosts = describe_hosts(*setup.start, workers);
    if (spec.nodes.max > 1 || spec.rendezvous.head_is_apart) {
        dry.around.controller = choice
                                    ? describe_controller(*choice)
                                    : "where the launcher around us lets the nodes meet: " + describe(*task);
    }
    return dry;
}

}  // namespace

Status show_plan(const JobSetup& setup, bool workers_are_given) {
    const std::optional<OuterTask>& task = setup.task;
    const bool is_met_by_launcher = task && !shared_endpoint(setup.spec);
    std::optional<HeadChoice> choice;
    if (!is_met_by_launcher) {
        Result<HeadChoice> chosen = choose_head(setup.spec, detect_host(shared_endpoint(setup.spec)));
        if (!chosen) return chosen.error();
        choice = *std::move(chosen);
    }
    if (choice && choice->is_head) {
        if (const Status possible = check_places(setup.spec); !possible) return possible;
        const std::optional<int> port = setup.spec.rendezvous.master_port;
        if (port && !shared_endpoint(setup.spec)) {
            if (const Status free = MasterPort::check(*port); !free) return free;
        }
    }
    if (setup.spec.pmix == PmixUse::On) {
        const Status possible = PmixServer::check(process_environment("DDPRUN_PMIX_LIBRARY").value_or(""));
        if (!possible) return possible.error().with("--pmix on");
    }
    Result<DryRun> dry = plan_dry_run(setup, workers_by_node(setup, workers_are_given), choice);
    if (!dry) return dry.error();
    JobSpec spec = setup.spec;
    if (task && task->place.is_rank) {
        if (Result<OuterRank> rank = outer_rank_of(*task); rank) spec.outer_rank = *rank;
    }
    const Result<std::vector<WorkerPlan>> plans =
        plan_workers(spec, setup.program, setup.machine, dry->order);
    if (!plans) return plans.error();
    ddprun::print("{}", printable_lines(render_plan(spec, setup.program, setup.machine, dry->order, *plans,
                                                    dry->around)));
    return {};
}

}  // namespace ddprun
