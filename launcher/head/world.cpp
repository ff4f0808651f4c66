#include "launcher/head/world.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>
#include <utility>

#include "launcher/head/succession.h"

namespace ddprun {

const rdzv::AgentHello* World::find(rdzv::AgentId agent) const {
    const auto found = agents_.find(agent);
    return found == agents_.end() ? nullptr : &found->second;
}

std::optional<rdzv::AgentHello> World::disconnect(rdzv::AgentId agent) {
    auto gone = agents_.extract(agent);
    return gone.empty() ? std::nullopt : std::optional(std::move(gone.mapped()));
}

std::vector<rdzv::AgentId> World::form(const std::vector<rdzv::Membership::Member>& members,
                                       job_event::WorldFormed& formed) {
    nodes_.clear();
    const std::unordered_map<rdzv::AgentId, int> before = std::exchange(group_ranks_, {});
    for (const rdzv::Membership::Member& member : members) {
        group_ranks_.emplace(member.agent, static_cast<int>(nodes_.size()));
        nodes_.push_back({member.agent, agents_.at(member.agent), member.place});
        const auto known = before.find(member.agent);
        formed.workers.push_back(nodes_.back().hello.slots);
        formed.before.push_back(known == before.end() ? -1 : known->second);
    }
    std::vector<rdzv::AgentId> departing;
    for (const auto& [agent, node] : before) {
        if (agents_.contains(agent) && !group_ranks_.contains(agent)) departing.push_back(agent);
    }
    return departing;
}

bool World::take_kept_ranks(const rdzv::AgentHello& hello) {
    const int begin = hello.kept_first_rank, end = begin + hello.slots;
    const auto next = kept_ranks_.lower_bound(begin);
    if (next != kept_ranks_.end() && next->first < end) return false;
    if (next != kept_ranks_.begin() && std::prev(next)->second > begin) return false;
    kept_ranks_.emplace_hint(next, begin, end);
    return true;
}

std::size_t World::adopt_kept(JobState& state) {
    for (const auto& [agent, hello] : agents_) {
        if (hello.keeps_workers) nodes_.push_back({agent, hello, hello.kept_place.value_or(0)});
    }
    if (nodes_.empty()) return 0;
    std::ranges::stable_sort(nodes_, {}, &Node::place);
    std::vector<KeptNode> kept;
    for (const Node& node : nodes_) kept.push_back({node.hello.kept_first_rank, node.hello.slots});
    const std::size_t lost = adopt(state, kept);
    nodes_.insert(nodes_.begin() + static_cast<std::ptrdiff_t>(lost), Node{});
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (i != lost) group_ranks_.emplace(nodes_[i].peer, static_cast<int>(i));
    }
    return lost;
}

int World::node_of(rdzv::AgentId agent) const {
    const auto found = group_ranks_.find(agent);
    return found == group_ranks_.end() ? -1 : found->second;
}

int World::size() const {
    int size = 0;
    for (const Node& node : nodes_) size += node.hello.slots;
    return size;
}

std::vector<WorldNode> World::describe() const {
    std::vector<WorldNode> world;
    int first_rank = 0;  // ranks are counted through the nodes in order, see RankTable
    for (const Node& node : nodes_) {
        world.push_back(
            {node.peer, node.hello.host, first_rank, node.hello.slots, agents_.contains(node.peer)});
        first_rank += node.hello.slots;
    }
    return world;
}

Result<std::vector<rdzv::StartGeneration>> World::orders(rdzv::StartGeneration order,
                                                         const MasterAddress& master) const {
    std::vector<rdzv::NodeSlots> members;
    for (const Node& node : nodes_) members.push_back({node.hello.host, node.hello.slots, node.hello.role});
    const Result<rdzv::RankTable> table = rdzv::RankTable::from(std::move(members));
    if (!table) return table.error();

    order.group_world_size = table->nodes();
    order.world_size = table->world_size();
    order.master_addr = master.host;
    order.master_port = master.port;
    order.agent_store = master.is_store;

    std::vector<rdzv::StartGeneration> all;
    for (int i = 0; i < table->nodes(); ++i) {
        const rdzv::NodeRanks& ranks = table->node(i);
        order.group_rank = ranks.group_rank;
        order.place = nodes_[static_cast<std::size_t>(i)].place;
        order.first_rank = ranks.first_rank;
        order.local_world_size = ranks.local_world_size;
        order.role_first_rank = ranks.role_first_rank;
        order.role_world_size = ranks.role_world_size;
        all.push_back(order);
    }
    return all;
}

void World::send_all_agents(const rdzv::ToAgent& message) const {
    for (const auto& [agent, hello] : agents_) send_(agent, message);
}

void World::broadcast(const rdzv::ToAgent& message) const {
    for (const Node& node : nodes_) {
        if (agents_.contains(node.peer)) send_(node.peer, message);
    }
}

// ---- actions

void World::perform(const job_action::Suspend& action, const JobState& state) const {
    const rdzv::SuspendGeneration suspend{state.generation, action.failed_rank, action.why};
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (agents_.contains(nodes_[i].peer) && !state.nodes[i].leaving) send_(nodes_[i].peer, suspend);
    }
}

void World::perform(const job_action::StopNode& action, const JobState& state) const {
    const WorldNode node = describe()[static_cast<std::size_t>(action.node)];
    // Nobody answers its workers' collectives any more.
    const rdzv::StopGeneration stop{state.generation, SIGTERM, action.grace.count(), node.first_rank,
                                    action.why};
    if (node.is_connected) send_(node.agent, stop);
}

void World::perform(const job_action::EndCollectives& action, const JobState& /*state*/) const {
    broadcast(rdzv::EndCollectives{action.lost_rank});
}

void World::perform(const job_action::EndJoining& action, const JobState& /*state*/) const {
    broadcast(rdzv::EndJoining{action.absent_rank});
}

void World::perform(const job_action::Release&, const JobState& state) const {
    broadcast(rdzv::Release{state.generation});
}

void World::perform(const job_action::KillRank& action, const JobState& /*state*/) const {
    for (const WorldNode& node : describe()) {
        if (action.rank >= node.first_rank && action.rank < node.first_rank + node.workers &&
            node.is_connected)
            send_(node.agent, rdzv::KillRank{action.rank, action.why});
    }
}

void World::perform(const job_action::KillNode& action, const JobState& state) const {
    const rdzv::AgentId agent = nodes_[static_cast<std::size_t>(action.node)].peer;
    if (agents_.contains(agent)) send_(agent, rdzv::StopGeneration{state.generation, SIGKILL, 0, -1, ""});
}

}  // namespace ddprun
