#include "launcher/questions/hang_watch.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "env/text.h"
#include "launcher/hang/nccl_ras.h"
#include "launcher/hang/stacks.h"

namespace ddprun {
namespace {

constexpr const char* kLook = "hang_look";

NodeLook sample_node(const Agent& agent, const std::string& host) {
    const AgentState& state = agent.state();
    NodeLook look;
    look.host = host;
    look.generation = state.generation;
    look.is_running = state.phase == AgentState::Phase::Running && agent.segment() != nullptr;
    if (!look.is_running) return look;
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        const int local_rank = static_cast<int>(i);
        look.ranks.push_back(sample_rank(agent.first_rank() + local_rank, state.workers[i].pid,
                                         agent.segment()->line(local_rank)));
        look.ranks.back().slowest_unit = agent.slowest_unit(local_rank);
        // The pid of a process that has ended may be another's by now.
        if (state.workers[i].state == WorkerState::Ended) look.ranks.back().alive = false;
    }
    return look;
}

}  // namespace

HangWatch::HangWatch(os::EventLoop& loop, os::Log& log, const Controller& controller, Survey& survey,
                     Duration timeout, Which which, RasAddress ras, Found found)
    : loop_(loop),
      log_(log),
      controller_(controller),
      survey_(survey),
      detector_(timeout),
      which_(which),
      ras_(std::move(ras)),
      found_(std::move(found)) {
    sample_later();
}

HangWatch::~HangWatch() { loop_.cancel(timer_); }

bool HangWatch::is_running(std::uint64_t generation) const {
    // A recovery has its own limit.
    const JobState& state = controller_.state();
    const bool is_meant = which_ == Which::AllJobs || controller_.can_replace_hanging_rank();
    return state.phase == JobState::Phase::Running && state.generation == generation &&
           !state.recovery.in_place && is_meant;
}

void HangWatch::sample_later() {
    timer_ = loop_.call_after(detector_.interval(), [this] { sample(); });
}

void HangWatch::sample() {
    if (!is_running(generation_)) {
        detector_.reset();
        last_.clear();
    }
    generation_ = controller_.state().generation;
    if (!is_running(generation_)) return sample_later();
    survey_.ask_nodes({kLook, {}}, std::nullopt, std::min(kNodeTimeout, detector_.interval()),
                      [this](const std::vector<NodeAnswer>& answers) { judge(answers); });
}

/// False when nothing is known about the node's workers yet.
bool HangWatch::take(const NodeAnswer& answer) {
    Result<NodeLook> look =
        answer.trouble.empty() ? answer_from<NodeLook>(answer.line) : Error{Errc::Timeout, answer.trouble, 0};
    if (look) {
        if (!look->is_running || look->generation != generation_) return false;
        for (HangSample& sample : look->ranks) sample.host = look->host;
        last_[answer.node.first_rank] = std::move(look->ranks);
        return true;
    }
    // A silent node shows no progress: its last samples stay.
    silent_.push_back(fmt::format("{}: {}", describe_node(answer.node), look.error().what));
    return last_.contains(answer.node.first_rank);
}

void HangWatch::judge(const std::vector<NodeAnswer>& answers) {
    silent_.clear();
    bool complete = is_running(generation_) && !answers.empty();
    for (const NodeAnswer& answer : answers) complete = take(answer) && complete;
    if (!complete) {
        detector_.reset();
        return sample_later();
    }
    std::vector<HangSample> samples;
    for (const auto& [first_rank, ranks] : last_) samples.insert(samples.end(), ranks.begin(), ranks.end());
    if (answers.size() == 1) {
        for (HangSample& sample : samples) sample.host.clear();
    }
    const std::optional<HangVerdict> verdict = detector_.feed(samples, MonotonicClock::now());
    if (verdict && (which_ == Which::AllJobs || verdict->is_overdue)) return investigate(*verdict);
    sample_later();
}

void HangWatch::investigate(const HangVerdict& verdict) {
    log_.warning("hang: {}; collecting stacks", verdict.what);
    for (const std::string& node : silent_) log_.warning("hang: {}", node);
    // Ask for both at once; each has its own timeout.
    awaited_ = 1;
    nccl_status_.clear();
    if (const std::optional<Endpoint> where = ras_()) {
        ++awaited_;
        ask_nccl_ras(
            loop_, *where, kRasTimeout,
            [this, alive = std::weak_ptr<bool>(alive_), where, verdict](const Result<std::string>& text) {
                if (alive.expired()) return;
                // A System error means no listener: no NCCL, or one without this service.
                if (text) nccl_status_ = *text;
                else if (text.error().code != Errc::System) nccl_status_ = text.error().what;
                finish(verdict);
            });
    }
    survey_.ask_nodes({"stacks", {}}, std::nullopt, kNodeStackTimeout,
                      [this, verdict](const std::vector<NodeAnswer>& answers) {
                          report(verdict, render_node_stacks(answers, last_.size() > 1));
                      });
}

void HangWatch::report(const HangVerdict& verdict, const std::string& stacks) {
    for (const std::string_view line : split(trim(stacks), '\n')) log_.info("{}", line);
    finish(verdict);
}

/// One part of the report has arrived; after the last one calls `found`.
void HangWatch::finish(const HangVerdict& verdict) {
    if (--awaited_ > 0) return;
    if (!nccl_status_.empty()) {
        log_.info("NCCL's own status of the job (its RAS service):");
        for (const std::string_view line : split(trim(nccl_status_), '\n')) log_.info("    {}", line);
    }
    detector_.reset();
    if (is_running(generation_)) found_(verdict);
    sample_later();
}

void answer_hang_looks(Inquiry& inquiry, Agent& agent, const std::string& host) {
    inquiry.on_node(kLook, [&agent, host](const ControlRequest&, const Inquiry::Answer& answer) {
        answer(answer_of(sample_node(agent, host)));
    });
}

std::vector<StackTarget> stack_targets(Agent& agent) {
    std::vector<StackTarget> targets;
    const AgentState& state = agent.state();
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        if (state.workers[i].pid == 0 || state.workers[i].state == WorkerState::Ended) continue;
        const int local_rank = static_cast<int>(i);
        const auto take = [&agent, local_rank, generation = state.generation] {
            return agent.state().generation == generation ? agent.take_stacks(local_rank) : "";
        };
        targets.push_back(
            {agent.first_rank() + local_rank, state.workers[i].pid, agent.share_line(local_rank), take});
    }
    return targets;
}

std::string render_node_stacks(const std::vector<NodeAnswer>& answers, bool shows_hosts) {
    std::vector<RankStack> all;
    std::string troubles;
    for (const NodeAnswer& answer : answers) {
        const Result<std::vector<RankStack>> stacks =
            answer.trouble.empty() ? answer_from<std::vector<RankStack>>(answer.line, "stacks")
                                   : Error{Errc::Timeout, answer.trouble, 0};
        if (!stacks) troubles += fmt::format("{}: {}\n", describe_node(answer.node), stacks.error().what);
        else all.insert(all.end(), stacks->begin(), stacks->end());
    }
    if (!shows_hosts) {
        for (RankStack& stack : all) stack.host.clear();
    }
    return render_stacks(all) + troubles;
}

}  // namespace ddprun
