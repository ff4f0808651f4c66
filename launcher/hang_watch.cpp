#include "launcher/hang_watch.h"

#include <utility>

#include "env/text.h"
#include "launcher/hang_sample.h"

namespace ddprun {

HangWatch::HangWatch(os::EventLoop& loop, os::System& system, os::Log& log, Agent& agent, Duration timeout, Found found)
    : loop_(loop), system_(system), log_(log), agent_(agent), detector_(timeout), found_(std::move(found)) {
    look_again();
}

HangWatch::~HangWatch() { loop_.cancel(timer_); }

bool HangWatch::is_running(std::uint64_t generation) const {
    return agent_.state().phase == AgentState::Phase::Running && agent_.state().generation == generation;
}

void HangWatch::look_again() {
    timer_ = loop_.call_after(detector_.interval(), [this] { look(); });
}

void HangWatch::look() {
    const AgentState& state = agent_.state();
    if (!is_running(generation_)) detector_.reset();
    generation_ = state.generation;
    if (state.phase != AgentState::Phase::Running || agent_.segment() == nullptr) return look_again();
    std::vector<HangSample> samples;
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        const int local_rank = static_cast<int>(i);
        samples.push_back(sample_rank(agent_.first_rank() + local_rank, state.workers[i].pid, agent_.segment()->line(local_rank)));
        // The number of a process that has ended may be another's by now.
        if (state.workers[i].state == WorkerState::Ended) samples.back().alive = false;
    }
    if (const std::optional<HangVerdict> verdict = detector_.feed(samples, MonotonicClock::now())) return investigate(*verdict);
    look_again();
}

void HangWatch::investigate(const HangVerdict& verdict) {
    log_.warning("hang: {}; collecting stacks", verdict.what);
    collect_stacks(loop_, system_, stack_targets(agent_), kStackPatience, [this, verdict, generation = generation_](const std::vector<RankStack>& stacks) {
        const std::string text = render_stacks(stacks);
        for (const std::string_view line : split(trim(text), '\n')) log_.info("{}", line);
        detector_.reset();
        if (is_running(generation)) found_(verdict);
        look_again();
    });
}

std::vector<StackTarget> stack_targets(Agent& agent) {
    std::vector<StackTarget> targets;
    const AgentState& state = agent.state();
    for (std::size_t i = 0; i < state.workers.size(); ++i) {
        if (state.workers[i].pid == 0 || state.workers[i].state == WorkerState::Ended) continue;
        const int local_rank = static_cast<int>(i);
        targets.push_back({agent.first_rank() + local_rank, state.workers[i].pid, &agent.segment()->line(local_rank),
                           [&agent, local_rank] { return agent.take_stacks(local_rank); }});
    }
    return targets;
}

}  // namespace ddprun
