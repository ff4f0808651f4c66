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
#include "launcher/supervise/controller.h"
#include "rendezvous/agent_message.h"

namespace ddprun {

/// "node02 (ranks 4-7)".
std::string describe_node(const WorldNode& node);

/// How long the head waits for a node that has only to say what it knows.
inline constexpr Duration kNodePatience = std::chrono::seconds(2);

/// What a node said of itself, or why it did not.
struct NodeAnswer {
    WorldNode node;
    std::string line;     ///< as a control socket answers; "" when there is none
    std::string trouble;  ///< "no answer in 2 s"; "" when there is a line
};

/// Questions to the whole job, from whichever node they come: a node passes them to the head, the head asks
/// the nodes that it has to and puts their answers together. Every wait has an end, and who did not answer is
/// named.
///
/// The head asks its own node through its agent's connection too: one code path. Lives on the loop's thread.
class Inquiry {
  public:
    using Answer = std::function<void(std::string line)>;
    using Handler = std::function<void(const ControlRequest& request, const Answer& answer)>;
    using Gathered = std::function<void(std::vector<NodeAnswer>)>;

    struct Parts {
        os::EventLoop& loop;
        /// False: there is no connection to the controller.
        std::function<bool(rdzv::FromAgent)> to_controller;
        /// These two are empty on a node that is not the head.
        std::function<bool(rdzv::AgentId agent, rdzv::ToAgent)> to_agent;
        std::function<std::vector<WorldNode>()> world;
    };
    explicit Inquiry(Parts parts) : parts_(std::move(parts)) {}
    ~Inquiry();
    Inquiry(const Inquiry&) = delete;
    Inquiry& operator=(const Inquiry&) = delete;

    /// What this node says of itself.
    void on_node(const std::string& request, Handler handler) {
        node_handlers_[request] = std::move(handler);
    }
    /// What the head says of the job. `patience`: how long another node waits for it.
    void on_job(const std::string& request, Duration patience, Handler handler);
    /// What a node says when the head does not, with the reason; a plain refusal without such a handler.
    using Alone =
        std::function<void(const ControlRequest& request, const std::string& why, const Answer& answer)>;
    void on_no_head(const std::string& request, Alone handler) {
        alone_handlers_[request] = std::move(handler);
    }

    /// Asks the job. `answer` is called once, at once or after the request's patience at the latest.
    void ask_job(const ControlRequest& request, const Answer& answer);
    /// The same for a peer of the control socket.
    void ask_job(const ControlRequest& request, const RequestReply& reply);
    /// On the head only: asks the nodes of the world (`rank` given: the one that has it), waits for
    /// `patience`. The answers are in the world's order. Without a world, or when nobody has the rank: no
    /// answers.
    void ask_nodes(const ControlRequest& request, std::optional<int> rank, Duration patience,
                   Gathered gathered);

    /// The head is lost: answers what it was asked and has not answered, with the reason.
    void head_lost(const std::string& why);
    /// This node becomes the head: from now on it asks the nodes itself. Handlers and open questions stay.
    void becomes_head(std::function<bool(rdzv::AgentId agent, rdzv::ToAgent)> to_agent,
                      std::function<std::vector<WorldNode>()> world);

    // What arrives from the other side of a connection.
    void from_controller(const rdzv::Question& question);
    void from_controller(const rdzv::Answer& answer);
    void from_agent(rdzv::AgentId agent, const rdzv::Question& question);
    void from_agent(rdzv::AgentId agent, const rdzv::Answer& answer);
    void agent_lost(rdzv::AgentId agent);

  private:
    struct JobHandler {
        Handler handler;
        Duration patience;
    };
    struct Asked {
        ControlRequest request;
        Answer answer;
        os::EventLoop::TimerId timer = 0;
    };
    struct Round {
        std::vector<NodeAnswer> answers;
        std::vector<bool> waits;  ///< for this answer
        std::size_t missing = 0;
        Gathered gathered;
        os::EventLoop::TimerId timer = 0;
    };

    void answer_alone(const ControlRequest& request, const std::string& why, const Answer& answer) const;
    void pass_to_head(const ControlRequest& request, Duration patience, const Answer& answer);
    void note(std::uint64_t round, rdzv::AgentId agent, std::string line, const std::string& trouble);
    void finish(std::uint64_t round);

    Parts parts_;
    std::map<std::string, Handler> node_handlers_;
    std::map<std::string, JobHandler> job_handlers_;
    std::map<std::string, Alone> alone_handlers_;
    std::map<std::uint64_t, Asked> asked_;   ///< of the head
    std::map<std::uint64_t, Round> rounds_;  ///< of the nodes
    std::uint64_t next_number_ = 1;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< replies hold it weakly
};

}  // namespace ddprun
