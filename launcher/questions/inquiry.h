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
#include "launcher/questions/request_server.h"
#include "launcher/talk/control.h"
#include "rendezvous/wire/agent_message.h"

namespace ddprun {

/// The most questions of one kind that are open at once.
inline constexpr std::size_t kMostQuestions = 256;

/// A node's part in questions to the job: answers those for which it has a handler, as the head has for the
/// job (Survey), and passes the others to the head. Every wait has a timeout. For the loop's thread.
class Inquiry {
  public:
    using Answer = std::function<void(std::string line)>;
    using Handler = std::function<void(const ControlRequest& request, const Answer& answer)>;
    /// Sends to the head. False when there is no connection.
    using ToHead = std::function<bool(rdzv::FromAgent)>;

    /// `loop` must outlive the inquiry.
    Inquiry(os::EventLoop& loop, ToHead to_head) : loop_(loop), to_head_(std::move(to_head)) {}
    ~Inquiry();
    Inquiry(const Inquiry&) = delete;
    Inquiry& operator=(const Inquiry&) = delete;

    /// Sets this node's answer to a request.
    void on_node(const std::string& request, Handler handler) {
        node_handlers_[request] = std::move(handler);
    }
    /// Makes a request known that the head answers for the job, within `timeout`.
    void takes(const std::string& request, Duration timeout) { timeouts_[request] = timeout; }
    /// Sets the answer for the job. Call it on the head.
    void on_job(const std::string& request, Handler handler) { job_handlers_[request] = std::move(handler); }
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

    /// Call it when the head is lost: answers its open questions with the reason.
    void head_lost(const std::string& why);

    // Messages from the head.
    void from_head(const rdzv::Question& question);
    void from_head(const rdzv::Answer& answer);

  private:
    struct Asked {
        ControlRequest request;
        Answer answer;
        os::EventLoop::TimerId timer = 0;
    };

    void answer_alone(const ControlRequest& request, const std::string& why, const Answer& answer) const;
    void pass_to_head(const ControlRequest& request, Duration timeout, const Answer& answer);

    os::EventLoop& loop_;
    ToHead to_head_;
    std::map<std::string, Handler> node_handlers_, job_handlers_;
    std::map<std::string, Duration> timeouts_;
    std::map<std::string, Alone> alone_handlers_;
    std::map<std::uint64_t, Asked> asked_;  ///< questions to the head
    std::uint64_t next_number_ = 1;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< replies hold it weakly
};

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
