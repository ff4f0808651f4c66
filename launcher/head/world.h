#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "launcher/head/job_state.h"
#include "rendezvous/serve/membership.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// The address and port that workers get as MASTER_ADDR and MASTER_PORT.
struct MasterAddress {
    std::string host;
    int port = 0;
    bool is_store = false;  ///< our server answers PyTorch's store there
};

/// A node of the running world, as others see it.
struct WorldNode {
    rdzv::AgentId agent = 0;
    std::string host;
    int first_rank = 0;
    int workers = 0;
    bool is_connected = false;
};

/// The agents that are connected to the head, and the nodes of the running world among them. Sends them the
/// job's orders. A node whose agent is lost stays in the world until the next one is formed.
class World {
  public:
    using Send = std::function<void(rdzv::AgentId, const rdzv::ToAgent&)>;
    using Agents = std::map<rdzv::AgentId, rdzv::AgentHello>;
    struct Node {
        rdzv::AgentId peer = 0;
        rdzv::AgentHello hello;
        int place = 0;
    };

    explicit World(Send send) : send_(std::move(send)) {}

    // The connected agents, in the world or waiting.
    [[nodiscard]] const Agents& agents() const { return agents_; }
    /// Null: this agent is not connected.
    [[nodiscard]] const rdzv::AgentHello* find(rdzv::AgentId agent) const;
    void connect(rdzv::AgentId agent, const rdzv::AgentHello& hello) { agents_[agent] = hello; }
    std::optional<rdzv::AgentHello> disconnect(rdzv::AgentId agent);

    // The nodes of the world, by group rank.
    [[nodiscard]] const std::vector<Node>& nodes() const { return nodes_; }
    /// Takes these members as the next world. Returns the connected agents of the last one that are not in
    /// it.
    std::vector<rdzv::AgentId> form(const std::vector<rdzv::Membership::Member>& members,
                                    job_event::WorldFormed& formed);
    /// Notes the ranks of the workers that an agent keeps. False: an agent before it keeps workers of some of
    /// them.
    bool take_kept_ranks(const rdzv::AgentHello& hello);
    /// Takes over the nodes of a lost head's world whose workers wait, with the lost head's own. Returns the
    /// number of that node; 0 as well where no workers wait.
    std::size_t adopt_kept(JobState& state);
    /// The group rank of an agent; -1: it is not in the world.
    [[nodiscard]] int node_of(rdzv::AgentId agent) const;
    [[nodiscard]] int size() const;
    [[nodiscard]] std::vector<WorldNode> describe() const;
    [[nodiscard]] Result<std::vector<rdzv::StartGeneration>> orders(rdzv::StartGeneration order,
                                                                    const MasterAddress& master) const;

    void send(rdzv::AgentId agent, const rdzv::ToAgent& message) const { send_(agent, message); }
    void send_all_agents(const rdzv::ToAgent& message) const;
    /// Sends to the connected nodes of the world.
    void broadcast(const rdzv::ToAgent& message) const;

    // The actions of the job that are nothing but messages. `state` is the job's after the decision.
    void perform(const job_action::Suspend& action, const JobState& state) const;
    void perform(const job_action::StopNode& action, const JobState& state) const;
    void perform(const job_action::EndCollectives& action, const JobState& state) const;
    void perform(const job_action::EndJoining& action, const JobState& state) const;
    void perform(const job_action::Release& action, const JobState& state) const;
    void perform(const job_action::KillRank& action, const JobState& state) const;
    void perform(const job_action::KillNode& action, const JobState& state) const;

  private:
    Send send_;
    Agents agents_;
    std::map<int, int> kept_ranks_;  ///< of take_kept_ranks(): the first rank, and the one behind the last
    std::vector<Node> nodes_;
    std::unordered_map<rdzv::AgentId, int> group_ranks_;
};

}  // namespace ddprun
