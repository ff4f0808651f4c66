#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "launcher/head/controller.h"
#include "launcher/questions/inquiry.h"

namespace ddprun {

/// "node02 (ranks 4-7)".
std::string describe_node(const WorldNode& node);

/// The time that the head waits for a node that can answer at once.
inline constexpr Duration kNodeTimeout = std::chrono::seconds(2);

/// A node's answer, or the reason why it gave none.
struct NodeAnswer {
    WorldNode node;
    std::string line;     ///< in the form of the control socket's answers; "" none
    std::string trouble;  ///< "no answer in 2 s"; "" when there is a line
};

/// The head's part in questions to the job: asks the nodes, its own too, and joins their answers. Nodes that
/// did not answer in time are named. For the loop's thread.
class Survey {
  public:
    using Gathered = std::function<void(std::vector<NodeAnswer>)>;
    struct Parts {
        os::EventLoop& loop;
        Inquiry& inquiry;  ///< of the head's node: it answers the nodes' questions
        /// False when there is no connection to the node.
        std::function<bool(rdzv::AgentId agent, rdzv::ToAgent)> to_agent;
        std::function<std::vector<WorldNode>()> world;
    };
    explicit Survey(Parts parts) : parts_(std::move(parts)) {}
    ~Survey();
    Survey(const Survey&) = delete;
    Survey& operator=(const Survey&) = delete;

    /// Asks the nodes of the world (or only the node of `rank`) and waits for `timeout`. The answers are in
    /// the world's order; none without a world, or when no node has the rank.
    void ask_nodes(const ControlRequest& request, std::optional<int> rank, Duration timeout,
                   Gathered gathered);

    // Messages from the nodes.
    void from_agent(rdzv::AgentId agent, const rdzv::Question& question);
    void from_agent(rdzv::AgentId agent, const rdzv::Answer& answer);
    void agent_lost(rdzv::AgentId agent);

  private:
    struct Round {
        std::vector<NodeAnswer> answers;
        std::vector<bool> waits;  ///< by answer: not arrived yet
        std::size_t missing = 0;
        Gathered gathered;
        os::EventLoop::TimerId timer = 0;
    };

    void note(std::uint64_t round, rdzv::AgentId agent, std::string line, const std::string& trouble);
    void finish(std::uint64_t round);

    Parts parts_;
    std::map<std::uint64_t, Round> rounds_;
    std::uint64_t next_number_ = 1;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< replies hold it weakly
};

}  // namespace ddprun
