// A whole job in one process and in simulated time: the real controller, the real decisions of every agent, and between them a
// network that delays, nodes that come, leave, crash and are cut off, and workers that fail. What is drawn follows from a seed
// alone: DDPRUN_SIMULATION_SEED=N runs that one schedule, and tells what happens in it.
#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "env/text.h"
#include "launcher/exit_codes.h"
#include "launcher/supervise/agent_state.h"
#include "launcher/supervise/controller.h"
#include "tests/simulation/simulated_clock.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;

constexpr Duration kStopGrace = 5s, kFailureGrace = 2s, kPreemptGrace = 4s, kHeartbeatTimeout = 3s;
constexpr Duration kLongestJob = 30min; ///< a job that has not ended by then never does

/// All that is random in one schedule.
class Dice {
  public:
    explicit Dice(std::uint64_t seed) : engine_(seed) {}
    /// Both may come.
    int between(int least, int most) { return least + static_cast<int>(engine_() % static_cast<std::uint64_t>(most - least + 1)); }
    bool chance(int percent) { return between(1, 100) <= percent; }
    Duration span(Duration least, Duration most) { return least + Duration(static_cast<Duration::rep>(engine_() % static_cast<std::uint64_t>((most - least).count() + 1))); }

  private:
    std::mt19937_64 engine_;
};

struct Process {
    int agent;
    std::uint64_t generation;
    bool has_exited = false;
};

class SimulatedJob {
  public:
    explicit SimulatedJob(std::uint64_t seed, bool is_told) : dice_(seed), is_told_(is_told) {
        loop_ = *os::EventLoop::create({});
        ControllerConfig config;
        config.spec.nodes.min = dice_.between(1, 4);
        config.spec.nodes.max = config.spec.nodes.min + dice_.between(0, 3);
        config.spec.restart.max_restarts = dice_.between(0, 2);
        config.spec.restart.backoff = dice_.chance(30) ? 2s : 0s;
        config.spec.grow = dice_.chance(70) ? Grow::Now : Grow::Restart;
        config.spec.rendezvous.join_timeout = 120s;
        config.spec.rendezvous.last_call = 3s;
        config.spec.shutdown_timeout = kStopGrace;
        config.spec.failure_grace = kFailureGrace;
        config.spec.preempt_grace = kPreemptGrace;
        config.own_host = "node0";
        config.own_pid = 1;
        config.terms = {"version=1"};
        config.random = 1;
        config.master = [](const rdzv::AgentHello&) -> Result<MasterAddress> { return MasterAddress{"node0", 29500}; };
        nodes_ = config.spec.nodes;
        controller_ = std::make_unique<Controller>(
            *loop_, log_, std::move(config), [this](rdzv::AgentId peer, const rdzv::ToAgent& message) { from_controller(peer, message); }, [this] {
                ended_at_ = clock_.now();
                tell(fmt::format("the job ends with {}", exit_code(controller_->end())));
            });
        controller_->begin();
        const int first = dice_.between(nodes_.min, nodes_.max + 1);
        for (int node = 0; node < first; ++node) start_agent(node);
        draw_faults(first);
    }
    SimulatedJob(const SimulatedJob&) = delete;

    /// What is wrong with this schedule; "" nothing.
    std::string run() {
        const TimePoint limit = clock_.now() + kLongestJob;
        while (wrong_.empty() && (!ended_at_ || !events_.empty())) {
            const TimePoint timer = ended_at_ ? kNever : clock_.next_timer();
            const TimePoint event = events_.empty() ? kNever : events_.begin()->first;
            const TimePoint next = std::max(std::min(timer, event), clock_.now());
            if (next > limit) return fmt::format("stuck: the job has not ended after {}", format_duration(kLongestJob));
            clock_.set(next);
            if (event <= timer) {
                const std::function<void()> happen = std::move(events_.begin()->second);
                events_.erase(events_.begin());
                happen();
            }
            for (int batch = 0; batch < 3; ++batch) (void)loop_->run_once(next);
            look_at_stop();
        }
        if (!wrong_.empty()) return wrong_;
        if (!processes_.empty()) return fmt::format("{} processes are left when the job is over", processes_.size());
        return judge_end();
    }

  private:
    /// One ddprun.
    struct Agent {
        int node = 0;
        rdzv::AgentId peer = 0;
        AgentState state;
        rdzv::StartGeneration order;
        bool is_running = true;     ///< its process
        bool is_connected = false;  ///< as the controller sees it
        bool is_cut = false;        ///< nothing comes through any more
        bool is_leaving = false;    ///< it ends when it is idle
        bool was_signalled = false;
        std::optional<TimePoint> grace_ends;
        TimePoint last_up{}, last_down{};  ///< deliveries: each direction keeps its order
    };

    void at(TimePoint when, std::function<void()> happen) { events_.emplace(when, std::move(happen)); }
    void after(Duration span, std::function<void()> happen) { at(clock_.now() + span, std::move(happen)); }
    void tell(const std::string& what) const {
        if (is_told_) fmt::print("{:9.3f} g{} {}\n", in_seconds(clock_.now().time_since_epoch()) - 1000, controller_->state().generation, what);
    }
    void must(bool holds, const std::string& otherwise) {
        if (!holds && wrong_.empty()) wrong_ = otherwise;
    }
    Duration delay() { return dice_.chance(10) ? dice_.span(50ms, 400ms) : dice_.span(100us, 20ms); }

    // ---- what goes wrong

    void draw_faults(int first) {
        const TimePoint start = clock_.now();
        int nodes = first;
        fails_percent_ = dice_.chance(70) ? 0 : dice_.between(1, 20);
        work_ = dice_.span(1s, 30s);
        for (int n = dice_.between(1, 10); n > 0; --n) {
            const TimePoint when = start + dice_.span(0s, 2 * work_);
            const int kind = dice_.between(1, 100), one = dice_.between(0, 1000);
            if (kind <= 22) at(when, [this, one] { crash(one); });
            else if (kind <= 40) at(when, [this, one] { cut(one); });
            else if (kind <= 60) at(when, [this, one] { signal_node(one); });
            else if (kind <= 95) at(when, [this, node = dice_.chance(50) ? nodes++ : dice_.between(1, nodes)] { come(node); });
            else if (kind <= 97) at(when, [this] { signal_head(); });
            else signal_all(when);
        }
    }
    /// One that runs, and is not the head's.
    Agent* other(int one) {
        std::vector<Agent*> running;
        for (std::size_t i = 1; i < agents_.size(); ++i) {
            if (agents_[i]->is_running && !agents_[i]->is_cut) running.push_back(agents_[i].get());
        }
        return running.empty() ? nullptr : running[static_cast<std::size_t>(one) % running.size()];
    }
    void crash(int one) {
        Agent* const agent = other(one);
        if (agent == nullptr) return;
        tell(fmt::format("node{} crashes", agent->node));
        end_process(*agent);
    }
    void cut(int one) {
        Agent* const agent = other(one);
        if (agent == nullptr) return;
        tell(fmt::format("node{} is cut off", agent->node));
        agent->is_cut = true;
        after(kHeartbeatTimeout + dice_.span(0s, 500ms), [this, agent] { lost(*agent, Errc::Timeout); });
        after(kHeartbeatTimeout + dice_.span(0s, 500ms), [this, agent] { leave(*agent); });
    }
    void signal_node(int one) {
        Agent* const agent = other(one);
        if (agent != nullptr) signal(*agent);
    }
    void signal(Agent& agent) {
        if (!agent.is_running || agent.was_signalled) return;
        agent.was_signalled = true;
        tell(fmt::format("node{} gets SIGTERM", agent.node));
        if (!agent.is_connected) return leave(agent);
        to_controller(agent, rdzv::Notice{"stop", "15"});
    }
    void signal_head() {
        if (agents_[0]->was_signalled) return;
        agents_[0]->was_signalled = true;
        tell("the head gets SIGTERM");
        note_stop();
        controller_->stop(SIGTERM);
    }
    /// As a scheduler does: every node, one after the other.
    void signal_all(TimePoint when) {
        at(when, [this] {
            for (std::size_t i = 0; i < agents_.size(); ++i) {
                after(dice_.span(0s, 2s), [this, i] { i == 0 ? signal_head() : signal(*agents_[i]); });
            }
        });
    }
    void come(int node) {
        for (const auto& agent : agents_) {
            if (agent->is_running && agent->node == node) return;
        }
        start_agent(node);
    }

    // ---- agents and their workers

    void start_agent(int node) {
        agents_.push_back(std::make_unique<Agent>());
        Agent& agent = *agents_.back();
        agent.node = node;
        agent.peer = agents_.size();
        tell(fmt::format("node{} starts its ddprun", node));
        after(delay(), [this, &agent] { join(agent); });
    }
    void join(Agent& agent) {
        if (!agent.is_running || agent.is_cut) return;
        rdzv::AgentHello hello;
        hello.host = fmt::format("node{}", agent.node);
        if (agent.peer == 1) hello.node_rank = 0;
        hello.slots = 1 + agent.node % 2;
        hello.pid = static_cast<int>(agent.peer);
        hello.terms = {"version=1"};
        if (!controller_->agent_joined(agent.peer, hello)) return end_process(agent);
        agent.is_connected = true;
        note_members();
    }
    void lost(Agent& agent, Errc code) {
        if (!agent.is_connected) return;
        agent.is_connected = false;
        note_members();
        controller_->agent_lost(agent.peer, {code, "gone", 0});
    }
    /// The ddprun itself is gone, and its workers with it.
    void end_process(Agent& agent) {
        if (!agent.is_running) return;
        agent.is_running = false;
        std::erase_if(processes_, [&](const auto& process) { return agents_[static_cast<std::size_t>(process.second.agent)].get() == &agent; });
        if (!agent.is_cut) after(delay(), [this, &agent] { lost(agent, Errc::Closed); });
    }
    /// It ends when its workers have.
    void leave(Agent& agent) {
        if (!agent.is_running) return;
        agent.is_leaving = true;
        feed(agent, agent_event::KillRequested{});
        end_if_idle(agent);
    }
    void end_if_idle(Agent& agent) {
        if (agent.is_leaving && agent.state.phase == AgentState::Phase::Idle && agent.peer != 1) end_process(agent);
    }

    void feed(Agent& agent, const AgentEvent& event) {
        for (const AgentAction& action : step(agent.state, event, clock_.now())) {
            std::visit([&](const auto& one) { perform(agent, one); }, action);
        }
    }
    void perform(Agent&, const agent_action::AwaitGpus&) {}
    void perform(Agent& agent, const agent_action::SpawnNext& action) {
        for (const auto& [pid, process] : processes_) {
            const bool is_here = agents_[static_cast<std::size_t>(process.agent)]->node == agent.node;
            must(!is_here || process.generation == agent.order.generation, fmt::format("two generations are alive on node{}", agent.node));
        }
        const pid_t pid = next_pid_++;
        processes_.emplace(pid, Process{static_cast<int>(agent.peer) - 1, agent.order.generation});
        const bool fails = dice_.chance(fails_percent_);
        if (fails) after(dice_.span(1ms, work_), [this, pid] { exits(pid, {pid, false, 1, false}, true); });
        else after(work_ + dice_.span(0s, 300ms), [this, pid] { exits(pid, {pid, false, 0, false}); });
        feed(agent, agent_event::Spawned{action.local_rank, pid});
    }
    void perform(Agent& agent, const agent_action::ReportStarted&) { to_controller(agent, rdzv::WorkersStarted{agent.order.generation}); }
    void perform(Agent& agent, const agent_action::SignalGroup& action) {
        const pid_t pid = action.pid;
        if (action.signal == SIGKILL) {
            must(!agent.grace_ends || clock_.now() >= *agent.grace_ends || agent.is_leaving, fmt::format("a worker of node{} is killed before its grace is over", agent.node));
            return after(1ms, [this, pid] { exits(pid, {pid, true, SIGKILL, false}); });
        }
        if (action.signal != SIGTERM || dice_.chance(15)) return;  // deaf
        const bool saves = dice_.chance(70);
        after(saves ? dice_.span(1ms, 3s) : dice_.span(0s, 5ms), [this, pid, saves] { exits(pid, {pid, !saves, saves ? 0 : SIGTERM, false}); });
    }
    void exits(pid_t pid, os::ChildExit exit, bool is_failure = false) {
        const auto process = processes_.find(pid);
        if (process == processes_.end() || process->second.has_exited) return;
        process->second.has_exited = true;
        Agent& agent = *agents_[static_cast<std::size_t>(process->second.agent)];
        if (is_failure) any_failed_ = true;
        feed(agent, agent_event::Exited{exit});
    }
    void perform(Agent&, const agent_action::BuryGroup& action) { processes_.erase(action.pid); }
    void perform(Agent&, const agent_action::ReapStranger&) {}
    void perform(Agent& agent, const agent_action::ReportExit& action) {
        rdzv::WorkerExited report;
        report.generation = agent.order.generation;
        report.local_rank = action.local_rank;
        report.rank = agent.order.first_rank + action.local_rank;
        report.pid = action.exit.pid;
        report.signaled = action.exit.signaled;
        report.status = action.exit.status;
        report.by_us = action.by_us;
        to_controller(agent, report);
    }
    void perform(Agent& agent, const agent_action::Sweep&) { feed(agent, agent_event::Swept{}); }
    void perform(Agent& agent, const agent_action::SetDeadline& action) {
        if (action.when != kNever) at(action.when, [this, &agent] { if (agent.is_running) feed(agent, agent_event::DeadlinePassed{}); });
    }
    void perform(Agent& agent, const agent_action::ReportDrained& action) {
        must(action.unkillable.empty(), fmt::format("node{} gives up on its workers", agent.node));
        to_controller(agent, rdzv::GenerationDrained{agent.order.generation, {}});
        if (agent.is_leaving) after(delay(), [this, &agent] { end_if_idle(agent); });
    }

    // ---- the network

    void to_controller(Agent& agent, rdzv::FromAgent message) {
        agent.last_up = std::max(agent.last_up, clock_.now() + delay());
        at(agent.last_up, [this, &agent, message = std::move(message)] {
            if (!agent.is_connected || agent.is_cut) return;
            std::visit([&](const auto& one) { hear(agent, one); }, message);
        });
    }
    void hear(Agent& agent, const rdzv::Notice& notice) {
        const int others = members() - 1;
        if (others < nodes_.min) note_stop();
        else leavers_.insert(agent.peer);
        controller_->agent_message(agent.peer, notice);
    }
    template <class Message>
    void hear(Agent& agent, const Message& message) {
        if constexpr (requires { controller_->agent_message(agent.peer, message); }) controller_->agent_message(agent.peer, message);
    }
    void from_controller(rdzv::AgentId peer, const rdzv::ToAgent& message) {
        Agent& agent = *agents_[peer - 1];
        if (const auto* start = std::get_if<rdzv::StartGeneration>(&message)) check(agent, *start);
        agent.last_down = std::max(agent.last_down, clock_.now() + delay());
        at(agent.last_down, [this, &agent, message] {
            if (agent.is_running && !agent.is_cut) std::visit([&](const auto& one) { obey(agent, one); }, message);
        });
    }
    /// Ranks of a generation lie side by side, each node has one share, and nothing of the last one runs where we hear of it.
    void check(const Agent& agent, const rdzv::StartGeneration& start) {
        if (start.generation != checked_generation_) {
            must(start.generation > checked_generation_, "a generation comes again");
            must(next_rank_ == checked_world_, fmt::format("{} of {} ranks were given away", next_rank_, checked_world_));
            checked_generation_ = start.generation;
            checked_world_ = start.world_size;
            next_rank_ = 0;
            must(start.group_world_size >= nodes_.min && start.group_world_size <= nodes_.max, fmt::format("a world of {} nodes", start.group_world_size));
            must(agent.peer == 1, "the first rank is not the head's");
            for (const auto& [pid, process] : processes_) {
                const Agent& of = *agents_[static_cast<std::size_t>(process.agent)];
                must(of.is_cut || !of.is_connected, fmt::format("generation {} begins while node{} has workers of generation {}", start.generation, of.node, process.generation));
            }
        }
        must(start.first_rank == next_rank_, fmt::format("rank {} is given to node{}, the next is {}", start.first_rank, agent.node, next_rank_));
        next_rank_ += start.local_world_size;
        tell(fmt::format("node{} is to start ranks {} to {} of {}", agent.node, start.first_rank, next_rank_ - 1, start.world_size));
    }
    void obey(Agent& agent, const rdzv::StartGeneration& start) {
        agent.order = start;
        agent.grace_ends.reset();
        feed(agent, agent_event::StartRequested{start.generation, start.local_world_size});
    }
    void obey(Agent& agent, const rdzv::StopGeneration& stop) {
        if (stop.generation != agent.order.generation) return;
        if (stop.signal == SIGKILL) return feed(agent, agent_event::KillRequested{});
        if (!agent.grace_ends) agent.grace_ends = clock_.now() + Duration(stop.grace_ns);
        feed(agent, agent_event::StopRequested{stop.signal, Duration(stop.grace_ns)});
    }
    void obey(Agent& agent, const rdzv::Shutdown&) {
        if (agent.peer != 1) leave(agent);
    }
    template <class Message>
    void obey(Agent&, const Message&) {}

    // ---- what must hold

    int members() const {
        int count = 0;
        for (const auto& agent : agents_) count += agent->is_connected && !leavers_.contains(agent->peer) ? 1 : 0;
        return count;
    }
    void note_members() {
        if (controller_->state().generation > 0 && members() < nodes_.min) was_too_few_ = true;
    }
    void note_stop() {
        if (!stop_asked_) stop_asked_ = clock_.now();
    }
    /// A job that is told to end does: all graces, a kill, and the ways there and back.
    void look_at_stop() {
        const bool is_late = stop_asked_ && !ended_at_ && clock_.now() > *stop_asked_ + kStopGrace + kHeartbeatTimeout + 5s;
        must(!is_late, "the job goes on although it was told to end");
    }
    std::string judge_end() const {
        const int code = exit_code(controller_->end());
        const bool may_fail = stop_asked_ || any_failed_ || was_too_few_ || controller_->state().generation == 0;
        return code == 0 || may_fail ? "" : fmt::format("the job ended with {} though enough nodes were there", code);
    }

    SimulatedClock clock_;
    Dice dice_;
    const bool is_told_;
    std::string wrong_;
    UniqueFd null_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    os::Log log_{{}, {is_told_ ? os::LogLevel::Info : os::LogLevel::Error, false, is_told_ ? 1 : null_.get()}};
    std::unique_ptr<os::EventLoop> loop_;
    std::multimap<TimePoint, std::function<void()>> events_;
    std::vector<std::unique_ptr<Agent>> agents_;  ///< by peer, from 1
    std::map<pid_t, Process> processes_;
    pid_t next_pid_ = 100;
    Nodes nodes_;
    Duration work_{};
    int fails_percent_ = 0;
    std::set<rdzv::AgentId> leavers_;
    bool any_failed_ = false, was_too_few_ = false;
    std::optional<TimePoint> stop_asked_, ended_at_;
    std::uint64_t checked_generation_ = 0;
    int checked_world_ = 0, next_rank_ = 0;
    std::unique_ptr<Controller> controller_;
};

constexpr std::uint64_t kSchedules = 3000;

TEST(Simulation, EveryScheduleEndsWithNothingLeftAndNothingTwice) {
    if (const char* const seed = std::getenv("DDPRUN_SIMULATION_SEED")) {
        EXPECT_EQ(SimulatedJob(std::strtoull(seed, nullptr, 10), true).run(), "");
        return;
    }
    for (std::uint64_t seed = 1; seed <= kSchedules; ++seed) {
        const std::string wrong = SimulatedJob(seed, false).run();
        ASSERT_EQ(wrong, "") << "to see how: DDPRUN_SIMULATION_SEED=" << seed;
    }
}

}  // namespace
}  // namespace ddprun::test
