#include "launcher/node/pmix/exchange.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "env/text.h"
#include "launcher/node/pmix/job_facts.h"
#include "rendezvous/wire/protocol_limits.h"

namespace ddprun {
namespace {

bool overlap(const RankRanges& ranges, const PmixExchange::Node& node) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) {
        return range.first < node.first_rank + node.workers && range.second >= node.first_rank;
    });
}

bool contain(const RankRanges& ranges, int rank) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const auto& range) { return range.first <= rank && rank <= range.second; });
}

std::string described(const PmixExchange::Node& node) {
    if (node.workers == 1) return fmt::format("{} (rank {})", node.host, node.first_rank);
    return fmt::format("{} (ranks {}-{})", node.host, node.first_rank, node.first_rank + node.workers - 1);
}

rdzv::FenceOver refusal(std::uint64_t generation, const std::string& ranks, std::string failure) {
    return {generation, ranks, std::move(failure), {}};
}

}  // namespace

Result<RankRanges> parse_rank_ranges(std::string_view text) {
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    RankRanges ranges;
    std::int64_t least = 0;
    for (const std::string_view piece : split(text, ',')) {
        const std::string_view range = trim(piece);
        const std::size_t dash = range.find('-');
        const Result<std::int64_t> first = parse_int_between(range.substr(0, dash), least, kMost);
        if (!first) return first.error();
        const Result<std::int64_t> last = dash == std::string_view::npos
                                              ? first
                                              : parse_int_between(range.substr(dash + 1), *first, kMost - 1);
        if (!last) return last.error();
        ranges.emplace_back(static_cast<int>(*first), static_cast<int>(*last));
        least = *last + 1;
    }
    return ranges;
}

PmixExchange::Messages PmixExchange::begin(const std::string& job, std::uint64_t generation,
                                           std::vector<Node> nodes) {
    generation_ = generation;
    nodes_ = std::move(nodes);
    lost_.clear();
    ended_.clear();
    fences_.clear();
    modexes_.clear();
    std::vector<PmixNode> world;
    for (const Node& node : nodes_) world.push_back({node.host, node.workers});
    const rdzv::Blob text(encode_nodes(world));
    Messages messages;
    for (const Node& node : nodes_) messages.push_back({node.agent, rdzv::World{generation, job, text}});
    return messages;
}

const PmixExchange::Node* PmixExchange::node_of(rdzv::AgentId agent) const {
    const auto found =
        std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.agent == agent; });
    return found == nodes_.end() ? nullptr : &*found;
}

const PmixExchange::Node* PmixExchange::node_with(int rank) const {
    const auto found = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& node) {
        return rank >= node.first_rank && rank < node.first_rank + node.workers;
    });
    return found == nodes_.end() ? nullptr : &*found;
}

// ---- fences

PmixExchange::Messages PmixExchange::entered(rdzv::AgentId agent, const rdzv::FenceEntered& entering) {
    const Node* const node = node_of(agent);
    const auto refuse = [&](std::string failure) -> Messages {
        return {{agent, refusal(entering.generation, entering.ranks, std::move(failure))}};
    };
    if (node == nullptr || entering.generation != generation_)
        return refuse(fmt::format("generation {} is over", entering.generation));
    auto found = fences_.find(entering.ranks);
    if (found == fences_.end()) {
        Result<RankRanges> ranges = parse_rank_ranges(entering.ranks);
        if (!ranges) return refuse("a fence of no ranks: " + ranges.error().what);
        if (fences_.size() >= rdzv::kOpenFences)
            return refuse(fmt::format("{} fences are open", fences_.size()));
        Fence fence{*std::move(ranges), {}, {}};
        for (std::size_t i = 0; i < nodes_.size(); ++i) {
            if (overlap(fence.ranges, nodes_[i])) fence.awaited.insert(i);
        }
        found = fences_.emplace(entering.ranks, std::move(fence)).first;
    }
    Fence& fence = found->second;
    const auto place = static_cast<std::size_t>(node - nodes_.data());
    if (!fence.awaited.contains(place))
        return refuse("this node has no part in it, or has entered it already");
    fence.parts[place] = entering.data;
    if (std::string never = why_never(fence); !never.empty()) return close(entering.ranks, never);
    fence.awaited.erase(place);
    if (entering.data.size() > rdzv::kFencePartBytes) {
        return close(entering.ranks, fmt::format("{} brings more than {}", described(*node),
                                                 format_bytes(rdzv::kFencePartBytes)));
    }
    return fence.awaited.empty() ? close(entering.ranks, "") : Messages{};
}

/// The reason why the fence can never complete; "" when it still can.
std::string PmixExchange::why_never(const Fence& fence) const {
    for (const std::size_t place : fence.awaited) {
        const Node& node = nodes_[place];
        if (lost_.contains(node.agent)) return fmt::format("{} is lost", described(node));
        for (auto rank = ended_.lower_bound(node.first_rank);
             rank != ended_.end() && *rank < node.first_rank + node.workers; ++rank) {
            if (contain(fence.ranges, *rank)) return fmt::format("rank {} has ended", *rank);
        }
    }
    return "";
}

PmixExchange::Messages PmixExchange::close(const std::string& ranks, const std::string& failure) {
    const Fence fence = std::move(fences_.extract(ranks).mapped());
    rdzv::FenceOver over{generation_, ranks, failure, {}};
    std::size_t bytes = 0;
    for (const auto& [place, part] : fence.parts) bytes += part.size();
    if (over.failure.empty() && bytes > rdzv::kFenceBytes) {
        over.failure = fmt::format("all nodes together bring {}, more than {}", format_bytes(bytes),
                                   format_bytes(rdzv::kFenceBytes));
    }
    if (over.failure.empty()) {
        std::string all;
        all.reserve(bytes);
        for (const auto& [place, part] : fence.parts) all.append(part.view());
        over.data = rdzv::Blob(std::move(all));
    }
    Messages messages;
    for (const auto& [place, part] : fence.parts) messages.push_back({nodes_[place].agent, over});
    return messages;
}

std::string PmixExchange::missing(const std::string& ranks) const {
    const auto found = fences_.find(ranks);
    std::vector<std::string> names;
    if (found != fences_.end()) {
        for (const std::size_t place : found->second.awaited) names.push_back(described(nodes_[place]));
    }
    return join(names, ", ");
}

// ---- direct modex: the values that one rank has put

PmixExchange::Messages PmixExchange::asked(rdzv::AgentId agent, const rdzv::ModexRequest& request) {
    const Node* const owner = request.generation == generation_ ? node_with(request.rank) : nullptr;
    const bool can_answer = owner != nullptr && node_of(agent) != nullptr && !lost_.contains(owner->agent) &&
                            !ended_.contains(request.rank);
    if (!can_answer || modexes_.size() >= rdzv::kOpenModexes)
        return {{agent, rdzv::ModexReply{request.generation, request.number, false, {}}}};
    const std::uint64_t number = next_number_++;
    modexes_[number] = {agent, request.number, owner->agent, request.rank};
    return {{owner->agent, rdzv::ModexRequest{generation_, number, request.rank}}};
}

PmixExchange::Messages PmixExchange::answered(rdzv::AgentId agent, const rdzv::ModexReply& reply) {
    const auto found = modexes_.find(reply.number);
    if (found == modexes_.end() || found->second.owner != agent) return {};  // already answered
    const Modex modex = found->second;
    modexes_.erase(found);
    return {{modex.asker, rdzv::ModexReply{generation_, modex.number, reply.found, reply.data}}};
}

// ---- ended ranks and lost nodes

/// Answers the modexes for which `is_lost` holds, and closes the fences that can never complete.
PmixExchange::Messages PmixExchange::end_lost(const std::function<bool(const Modex&)>& is_lost) {
    Messages messages;
    std::erase_if(modexes_, [&](const auto& entry) {
        const Modex& modex = entry.second;
        if (!is_lost(modex)) return false;
        messages.push_back({modex.asker, rdzv::ModexReply{generation_, modex.number, false, {}}});
        return true;
    });
    std::map<std::string, std::string> hopeless;
    for (const auto& [ranks, fence] : fences_) {
        if (std::string never = why_never(fence); !never.empty()) hopeless[ranks] = std::move(never);
    }
    for (const auto& [ranks, never] : hopeless)
        std::ranges::move(close(ranks, never), std::back_inserter(messages));
    return messages;
}

PmixExchange::Messages PmixExchange::rank_ended(std::uint64_t generation, int rank) {
    if (generation != generation_) return {};
    ended_.insert(rank);
    return end_lost([&](const Modex& modex) { return modex.rank == rank; });
}

PmixExchange::Messages PmixExchange::node_lost(rdzv::AgentId agent) {
    if (node_of(agent) == nullptr) return {};
    lost_.insert(agent);
    Messages messages = end_lost([&](const Modex& modex) { return modex.owner == agent; });
    std::erase_if(messages, [&](const Outgoing& message) { return message.agent == agent; });
    return messages;
}

}  // namespace ddprun
