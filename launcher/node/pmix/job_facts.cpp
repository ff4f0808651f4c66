#include "launcher/node/pmix/job_facts.h"

#include <fmt/core.h>

#include <limits>
#include <set>
#include <utility>

#include "env/text.h"

namespace ddprun {
namespace {

std::uint32_t count(int value) { return static_cast<std::uint32_t>(value); }

/// The first rank of each node, then the size of the world.
std::vector<int> first_ranks(const std::vector<PmixNode>& nodes) {
    std::vector<int> first = {0};
    for (const PmixNode& node : nodes) first.push_back(first.back() + node.workers);
    return first;
}

std::string list_of_ranks(int first, int workers) {
    std::vector<std::string> ranks;
    for (int rank = first; rank < first + workers; ++rank) ranks.push_back(fmt::format("{}", rank));
    return join(ranks, ",");
}

std::vector<std::string> distinct_hosts(const std::vector<PmixNode>& nodes, std::size_t own) {
    std::set<std::string> taken = {nodes[own].host};
    std::vector<std::string> names;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        const bool is_free = i == own || taken.insert(nodes[i].host).second;
        names.push_back(is_free ? nodes[i].host : fmt::format("{}~{}", nodes[i].host, i));
    }
    return names;
}

std::vector<PmixFact> facts_of_rank(int rank, int local_rank, std::size_t node, const std::string& host,
                                    int restarts) {
    const auto local = static_cast<std::uint16_t>(local_rank);
    return {{pmix_key::kRank, PmixRank{count(rank)}},
            {pmix_key::kGlobalRank, PmixRank{count(rank)}},
            {pmix_key::kLocalRank, local},
            {pmix_key::kNodeRank, local},
            {pmix_key::kNodeId, static_cast<std::uint32_t>(node)},
            {pmix_key::kHostName, host},
            {pmix_key::kAppNumber, std::uint32_t{0}},
            {pmix_key::kReincarnation, count(restarts)}};
}

}  // namespace

std::string encode_nodes(const std::vector<PmixNode>& nodes) {
    std::string text;
    for (const PmixNode& node : nodes) text += fmt::format("{} {}\n", node.host, node.workers);
    return text;
}

Result<std::vector<PmixNode>> decode_nodes(std::string_view text) {
    std::vector<PmixNode> nodes;
    for (const std::string_view line : split(text, '\n')) {
        if (line.empty()) continue;
        const std::size_t space = line.rfind(' ');
        const Result<std::int64_t> workers =
            parse_int_between(space == std::string_view::npos ? "" : line.substr(space + 1), 1,
                              std::numeric_limits<std::uint16_t>::max());
        if (!workers)
            return Error{Errc::Protocol,
                         fmt::format("World: '{}' is not a node and its workers", excerpt(line)), 0};
        nodes.push_back({std::string(line.substr(0, space)), static_cast<int>(*workers)});
    }
    return nodes;
}

Result<PmixJob> describe_job(const rdzv::StartGeneration& order, const std::vector<PmixNode>& nodes,
                             const std::string& job_name, const std::string& directory) {
    const std::vector<int> first = first_ranks(nodes);
    const auto own = static_cast<std::size_t>(order.group_rank);
    const bool fits = own < nodes.size() && first[own] == order.first_rank &&
                      nodes[own].workers == order.local_world_size && first.back() == order.world_size;
    if (!fits)
        return Error{
            Errc::Protocol,
            fmt::format("the head's World and StartGeneration of generation {} differ", order.generation), 0};

    PmixJob job;
    job.name_space = fmt::format("ddprun.{}.{}", job_name, order.generation);
    const std::vector<std::string> names = distinct_hosts(nodes, own);
    std::vector<std::string> ranks;
    for (std::size_t i = 0; i < nodes.size(); ++i) ranks.push_back(list_of_ranks(first[i], nodes[i].workers));
    const std::uint32_t size = count(order.world_size);
    const std::uint32_t local_size = count(order.local_world_size);
    job.facts = {{pmix_key::kJobId, job.name_space},
                 {pmix_key::kJobSize, size},
                 {pmix_key::kUniverseSize, size},
                 {pmix_key::kMaxProcs, size},
                 {pmix_key::kJobApps, std::uint32_t{1}},
                 {pmix_key::kNodes, static_cast<std::uint32_t>(nodes.size())},
                 // Plain lists work with every version; PMIx's own shorter forms cannot always be passed on.
                 {pmix_key::kNodeMap, join(names, ",")},
                 {pmix_key::kProcMap, join(ranks, ";")},
                 {pmix_key::kLocalSize, local_size},
                 {pmix_key::kNodeSize, local_size},
                 {pmix_key::kLocalPeers, ranks[own]},
                 {pmix_key::kLocalLeader, PmixRank{count(order.first_rank)}},
                 {pmix_key::kTopDirectory, directory},
                 {pmix_key::kJobDirectory, directory},
                 {pmix_key::kCleansDirectories, true}};
    for (std::size_t i = 0; i < nodes.size(); ++i) {
        for (int local = 0; local < nodes[i].workers; ++local) {
            job.ranks.push_back(facts_of_rank(first[i] + local, local, i, names[i], order.restart_count));
        }
    }
    return job;
}

}  // namespace ddprun
