#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/os/event_loop.h"
#include "launcher/ask/control_message.h"
#include "launcher/ask/request_server.h"
#include "launcher/head/control/controller.h"
#include "rendezvous/wire/agent_message.h"

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

/// Carries questions to the whole job, from any node: a node passes them to the head, the head asks the nodes
/// and joins their answers. Every wait has a timeout, and nodes that did not answer are named.
///
/// The head asks its own node through its agent's connection, too: one code path. For the loop's thread.
class Inquiry {
  public:
    using Answer = std::function<void(std::string line)>;
    using Handler = std::function<void(const ControlRequest& request, const Answer& answer)>;
    using Gathered = std::function<void(std::vector<NodeAnswer>)>;

    struct Parts {
        os::EventLoop& loop;
        /// False when there is no connection to the controller.
        std::function<bool(rdzv::FromAgent)> to_controller;
        /// These two are empty on a node that is not the head.
        std::function<bool(rdzv::AgentId agent, rdzv::ToAgent)> to_agent;
        std::function<std::vector<WorldNode>()> world;
    };
    explicit Inquiry(Parts parts) : parts_(std::move(parts)) {}
    ~Inquiry();
    Inquiry(const Inquiry&) = delete;
    Inquiry& operator=(const Inquiry&) = delete;

    /// Sets this node's answer to a request.
    void on_node(const std::string& request, Handler handler) {
        node_handlers_[request] = std::move(handler);
    }
    /// Sets the head's answer for the job. Other nodes wait `timeout` for it.
    void on_job(const std::string& request, Duration timeout, Handler handler);
    /// Sets a node's answer when the head gives none, with the reason; without it the node refuses.
    using Alone =
        std::function<void(const ControlRequest& request, const std::string& why, const Answer& answer)>;
    void on_no_head(const std::string& request, Alone handler) {
        alone_handlers_[request] = std::move(handler);
    }

    /// Asks the job. `answer` is called once, at once or within the request's timeout.
    void ask_job(const ControlRequest& request, const Answer& answer);
    /// Asks the job for a peer of the control socket.
    void ask_job(const ControlRequest& request, const RequestReply& reply);
    /// On the head only: asks the nodes of the world (or only the node of `rank`) and waits for `timeout`.
    /// The answers are in the world's order; none without a world, or when no node has the rank.
    void ask_nodes(const ControlRequest& request, std::optional<int> rank, Duration timeout,
                   Gathered gathered);

    /// Call it when the head is lost: answers its open questions with the reason.
    void head_lost(const std::string& why);
    /// Call it when this node becomes the head, which asks the nodes itself. Handlers and open questions
    /// stay.
    void becomes_head(std::function<bool(rdzv::AgentId agent, rdzv::ToAgent)> to_agent,
                      std::function<std::vector<WorldNode>()> world);

    // Messages from the other side of a connection.
    void from_controller(const rdzv::Question& question);
    void from_controller(const rdzv::Answer& answer);
    void from_agent(rdzv::AgentId agent, const rdzv::Question& question);
    void from_agent(rdzv::AgentId agent, const rdzv::Answer& answer);
    void agent_lost(rdzv::AgentId agent);

  private:
    struct JobHandler {
        Handler handler;
        Duration timeout;
    };
    struct Asked {
        ControlRequest request;
        Answer answer;
        os::EventLoop::TimerId timer = 0;
    };
    struct Round {
        std::vector<NodeAnswer> answers;
        std::vector<bool> waits;  ///< by answer: not arrived yet
        std::size_t missing = 0;
        Gathered gathered;
        os::EventLoop::TimerId timer = 0;
    };

    void answer_alone(const ControlRequest& request, const std::string& why, const Answer& answer) const;
    void pass_to_head(const ControlRequest& request, Duration timeout, const Answer& answer);
    void note(std::uint64_t round, rdzv::AgentId agent, std::string line, const std::string& trouble);
    void finish(std::uint64_t round);

    Parts parts_;
    std::map<std::string, Handler> node_handlers_;
    std::map<std::string, JobHandler> job_handlers_;
    std::map<std::string, Alone> alone_handlers_;
    std::map<std::uint64_t, Asked> asked_;   ///< questions to the head
    std::map<std::uint64_t, Round> rounds_;  ///< questions to the nodes
    std::uint64_t next_number_ = 1;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< replies hold it weakly
};

}  // namespace ddprun
