#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/io/socket.h"
#include "env/os/event_loop.h"
#include "env/os/log.h"
#include "launcher/hang/hang_detector.h"
#include "launcher/hang/hang_sample.h"
#include "launcher/hang/stacks.h"
#include "launcher/node/agent.h"
#include "launcher/questions/inquiry.h"

namespace ddprun {

/// Watches the workers of all nodes for hangs (--hang-timeout): samples them a few times per timeout, because
/// the rank that the others wait for may be on another node. On a verdict it logs it with the stacks of all
/// ranks and NCCL's own status of the job (nccl_ras.h), then calls `found`: the job decides what follows.
///
/// Runs on the head, on the event loop's thread. Borrows its parts for its whole life.
class HangWatch {
  public:
    using Found = std::function<void(const HangVerdict&)>;
    /// The endpoint of the RAS service of this job's NCCL; nullopt: it has none.
    using RasAddress = std::function<std::optional<Endpoint>()>;

    /// Recoverable: only jobs in which a rank that hangs starts again in place, and only for an overdue one
    /// (HangVerdict): a job that nobody asked to watch is not ended.
    enum class Which : std::uint8_t { AllJobs, Recoverable };

    HangWatch(os::EventLoop& loop, os::Log& log, const Controller& controller, Survey& survey,
              Duration timeout, Which which, RasAddress ras, Found found);
    ~HangWatch();
    HangWatch(const HangWatch&) = delete;
    HangWatch& operator=(const HangWatch&) = delete;

  private:
    void sample();
    void sample_later();
    void judge(const std::vector<NodeAnswer>& answers);
    bool take(const NodeAnswer& answer);
    void investigate(const HangVerdict& verdict);
    void report(const HangVerdict& verdict, const std::string& stacks);
    void finish(const HangVerdict& verdict);
    [[nodiscard]] bool is_running(std::uint64_t generation) const;

    os::EventLoop& loop_;
    os::Log& log_;
    const Controller& controller_;
    Survey& survey_;
    HangDetector detector_;
    Which which_;
    RasAddress ras_;
    Found found_;
    int awaited_ = 0;  ///< parts of the report that have not arrived
    std::string nccl_status_;
    std::uint64_t generation_ = 0;                 ///< the detector's
    std::map<int, std::vector<HangSample>> last_;  ///< by the node's first rank
    std::vector<std::string> silent_;              ///< nodes that did not answer the last time
    os::EventLoop::TimerId timer_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

/// Makes this node answer with samples of its workers.
void answer_hang_looks(Inquiry& inquiry, Agent& agent, const std::string& host);

/// The time that the head waits for a node's stacks.
inline constexpr Duration kNodeStackTimeout = kStackTimeout + kNodeTimeout;

/// The stacks of all nodes as text, with a line for each node that gave none.
std::string render_node_stacks(const std::vector<NodeAnswer>& answers, bool shows_hosts);

/// All living workers of this node. The targets borrow the agent.
std::vector<StackTarget> stack_targets(Agent& agent);

}  // namespace ddprun
