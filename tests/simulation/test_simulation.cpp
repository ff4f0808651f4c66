// The simulation of a whole job in one process and in simulated time: with the real controller, the real
// decisions of every agent and node, and sessions over a network that delays, breaks connections and falls
// silent. Nodes, also the head, come, leave, crash, are cut off and come back; workers fail and hang; there
// are signals, preemption, the walltime and questions to the job. A seed determines each schedule:
// DDPRUN_SIMULATION_SEED=N runs one schedule and prints what happens in it.
#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "env/text.h"
#include "launcher/head/controller.h"
#include "launcher/head/succession.h"
#include "launcher/node/agent_state.h"
#include "launcher/questions/inquiry.h"
#include "launcher/spec/exit_codes.h"
#include "tests/simulation/dice.h"
#include "tests/simulation/simulated_clock.h"
#include "tests/simulation/simulated_session.h"

namespace ddprun::test {
namespace {

using namespace std::chrono_literals;

constexpr Duration kStopGrace = 5s, kFailureGrace = 2s, kPreemptGrace = 4s, kHeartbeatTimeout = 3s;
constexpr Duration kOutageToSurvive = kHeartbeatTimeout * 2 / 3;
constexpr Duration kQuestionPatience = 3s;
constexpr Duration kRecoverWithin = 4s;
constexpr Duration kLongestJob = 30min;  ///< a longer job counts as stuck

/// What happens to a job: anything; nothing but workers that are killed; or what a job with enough nodes
/// recovers in place from: nodes crash or leave, with and without spares, links break, workers are killed.
enum class Faults : std::uint8_t { All, KilledWorkers, LostNodes, LostHeads };
constexpr Duration kLongestRecovery = 4s;  ///< of nodes that nobody disturbs, with workers that are in time
constexpr Duration kLongUnit = 5s;         ///< of workers that compute while the others wait

class SimulatedJob {
  public:
    explicit SimulatedJob(std::uint64_t seed, bool is_told, Faults faults = Faults::All)
        : dice_(seed), is_told_(is_told), faults_(faults) {
        loop_ = *os::EventLoop::create({});
        spec_.nodes.min = dice_.between(1, 4);
        spec_.nodes.max = spec_.nodes.min + dice_.between(0, 3);
        spec_.restart.max_restarts = dice_.between(0, 2);
        spec_.restart.backoff = dice_.chance(30) ? 2s : 0s;
        spec_.grow = dice_.chance(70) ? Grow::Now : Grow::Restart;
        spec_.rendezvous.join_timeout = 120s;
        spec_.rendezvous.last_call = 3s;
        spec_.shutdown_timeout = kStopGrace;
        spec_.failure_grace = kFailureGrace;
        spec_.preempt_grace = kPreemptGrace;
        nodes_ = spec_.nodes;
        outlives_head_ = dice_.chance(60);
        most_slots_ = dice_.between(1, 2);
        recovers_ = faults_ != Faults::All || seed % 2 == 0;
        spec_.recover.within = kRecoverWithin;
        if (faults_ == Faults::KilledWorkers) nodes_ = spec_.nodes = {3, 3};
        if (nodes_are_lost()) {
            nodes_ = spec_.nodes = {2, 5};
            outlives_head_ = outlives_head_ || faults_ == Faults::LostHeads;
            spec_.restart.max_restarts = 0;
            spec_.grow = dice_.chance(50) ? Grow::Now : Grow::Restart;
        }
        add_agent(0);
        build_controller(add_head(*agents_[0])).begin();
        start(*agents_[0]);
        const int first = faults_ == Faults::KilledWorkers ? nodes_.max
                          : nodes_are_lost()               ? dice_.between(4, 7)
                                                           : dice_.between(nodes_.min, nodes_.max + 1);
        for (int node = 1; node < first; ++node) start(add_agent(node));
        draw_faults(first);
    }
    SimulatedJob(const SimulatedJob&) = delete;

    /// Runs the schedule and returns what is wrong with it; "" nothing.
    std::string run() {
        const TimePoint limit = clock_.now() + kLongestJob;
        while (wrong_.empty() && (!is_over() || !events_.empty())) {
            const TimePoint timer = is_over() ? kNever : clock_.next_timer();
            const TimePoint event = events_.empty() ? kNever : events_.begin()->first;
            const TimePoint next = std::max(std::min(timer, event), clock_.now());
            if (next > limit)
                return fmt::format("stuck: the job has not ended after {}", format_duration(kLongestJob));
            clock_.set(next);
            if (event <= timer) {
                const std::function<void()> happen = std::move(events_.begin()->second);
                events_.erase(events_.begin());
                happen();
            }
            for (int batch = 0; batch < 3; ++batch) (void)loop_->run_once(next);
            check_stop();
        }
        if (!wrong_.empty()) return wrong_;
        if (!processes_.empty())
            return fmt::format("{} processes are left when the job is over", processes_.size());
        return judge_end();
    }

  private:
    using Joined = std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>;
    struct Agent;
    /// The listener of a head or a standby.
    struct Head {
        Agent& agent;  ///< the agent in the same process
        std::unique_ptr<Controller> controller = {};
        std::unique_ptr<Survey> survey = {};
        bool is_dead = false;    ///< its process has ended
        bool has_ended = false;  ///< its controller has ended the job
        bool is_outnumbered = false;
        bool has_begun = false;                ///< it has begun a generation
        std::set<rdzv::AgentId> members = {};  ///< connected as far as it knows
        std::map<rdzv::AgentId, SimulatedSession*> sessions = {};
    };
    /// One ddprun.
    struct Agent {
        [[nodiscard]] bool keeps_workers() const { return state.is_left() && state.alive() > 0; }

        int node = 0;
        std::uint16_t port = 0;  ///< that `own` listens on
        Head* own = nullptr;     ///< null: it does not listen
        FollowerState follower;
        os::EventLoop::TimerId timer = 0;  ///< of `follower`
        std::unique_ptr<Inquiry> inquiry;
        // Of its session.
        rdzv::AgentId peer = 0;
        Head* head = nullptr;
        SimulatedSession* session = nullptr;
        bool is_linked = false;
        rdzv::AgentHello hello;
        // Of its workers.
        AgentState state;
        rdzv::StartGeneration order;
        ForwardedSignals forwarded;
        std::optional<TimePoint> grace_ends;
        TimePoint work_ends{};                    ///< of its workers that recover in place
        std::uint64_t highest = 0, accepted = 0;  ///< steps of its ranks, and the stop that they will find
        bool is_running = true;                   ///< its process lives
        bool is_cut = false;                      ///< its network is down
        bool is_leaving = false;                  ///< it ends when it is idle
        bool was_signalled = false;
    };
    struct Process {
        Agent* agent;
        std::uint64_t generation;
        int local_rank = 0;
        bool is_deaf = false;      ///< it never leaves a generation
        bool has_arrived = false;  ///< it waits for the others of its generation
        bool has_joined = false;
        bool has_state = false;  ///< it has joined a world since it was started
        bool has_left = false;   ///< it has left its generation
        bool is_out = false;     ///< its agent knows that
        bool has_finished = false;
        bool has_exited = false;
        int signals = 0;  ///< the number passed on to it
    };

    void at(TimePoint when, std::function<void()> happen) { events_.emplace(when, std::move(happen)); }
    void after(Duration span, std::function<void()> happen) { at(clock_.now() + span, std::move(happen)); }
    void tell(const std::string& what) const {
        if (is_told_)
            fmt::print("{:9.3f} g{} {}\n", in_seconds(clock_.now().time_since_epoch()) - 1000,
                       latest().controller->state().generation, what);
    }
    void must(bool holds, const std::string& otherwise) {
        if (!holds && wrong_.empty()) wrong_ = otherwise;
    }
    Duration delay() { return dice_.chance(10) ? dice_.span(50ms, 400ms) : dice_.span(100us, 20ms); }

    // ---- heads

    Head& add_head(Agent& agent) {
        heads_.push_back(std::make_unique<Head>(Head{agent}));
        return *(agent.own = heads_.back().get());
    }
    Controller& build_controller(Head& head) {
        ControllerConfig config;
        config.own_host = fmt::format("node{}", head.agent.node);
        config.own_instance = head.agent.hello.instance;
        config.terms = {"version=1"};
        config.random = 1;
        config.succession = {
            .can_be_succeeded = outlives_head_, .is_successor = &head != heads_[0].get(), .spec = spec_};
        config.master = [](const rdzv::AgentHello& first) -> Result<MasterAddress> {
            return MasterAddress{first.host, 29500};
        };
        head.controller = std::make_unique<Controller>(
            *loop_, log_, spec_, std::move(config),
            [this, &head](rdzv::AgentId peer, const rdzv::ToAgent& message) {
                from_controller(head, peer, message);
            },
            [this, &head] { end(head); });
        head.controller->on_event([this, &head](const JobEvent& event) {
            if (std::holds_alternative<job_event::Outnumbered>(event)) head.is_outnumbered = true;
            if (std::holds_alternative<job_event::NodeEnded>(event) &&
                std::exchange(is_standby_failing_, false)) {
                if (Agent* const agent = standby()) {
                    agent->session->fall_silent(kOutageToSurvive * 95 / 100, false);
                    crashes_at_next_start_ = true;
                }
            }
            // The head may crash after it has told its next decision to some nodes only.
            if (std::holds_alternative<job_event::WorkerEnded>(event) && dice_.chance(crashes_percent_))
                after(dice_.span(0s, 20ms), [this] { crash_head(); });
        });
        head.survey = std::make_unique<Survey>(
            Survey::Parts{*loop_, *head.agent.inquiry,
                          [this, &head](rdzv::AgentId peer, const rdzv::ToAgent& message) {
                              from_controller(head, peer, message);
                              return true;
                          },
                          [&head] { return head.controller->world(); }});
        head.agent.inquiry->on_job(
            "status", [&head](const ControlRequest& request, const Inquiry::Answer& answer) {
                head.survey->ask_nodes(request, {}, kNodeTimeout, [answer](const auto&) { answer("we"); });
            });
        head.controller->on_recovered([this](const job_action::Recovered& recovery) {
            tell("recovered from: " + recovery.cause);
            const bool is_late = faults_ != Faults::All && recovery.took > kLongestRecovery &&
                                 !std::exchange(has_slow_worker_, false);
            must(!is_late, fmt::format("a recovery took {}", format_duration(recovery.took)));
        });
        latest_ = &head;
        if (walltime_) meet_walltime();
        return *head.controller;
    }
    Head& latest() const { return *latest_; }
    /// The agent beside the current controller; null: there is no controller at the moment.
    Agent* head_agent() const { return latest().is_dead || latest().has_ended ? nullptr : &latest().agent; }
    void end(Head& head) {
        if (head.is_dead) return;
        head.has_ended = true;
        const int code = exit_code(head.controller->end());
        tell(fmt::format("the job ends with {} on node{}", code, head.agent.node));
        must(code != 0 || !has_succeeded_, "two controllers ended the job with success");
        has_succeeded_ = has_succeeded_ || code == 0;
    }
    static bool is_heads(const Agent& agent) { return agent.own != nullptr && agent.own->controller; }
    /// True when the job has no controller and no other ddprun runs.
    bool is_over() const {
        for (const auto& head : heads_) {
            if (head->controller && !head->is_dead && !head->has_ended) return false;
        }
        return std::none_of(agents_.begin(), agents_.end(),
                            [&](const auto& agent) { return agent->is_running && !is_heads(*agent); });
    }
    static bool hear_each_other(const Agent& agent, const Head& head) {
        return &agent == &head.agent || (!agent.is_cut && !head.agent.is_cut);
    }
    static bool is_member(const Agent& agent) {
        return agent.head != nullptr && agent.head->members.contains(agent.peer);
    }

    // ---- succession

    [[nodiscard]] FollowerState begin_following(const Agent& agent) const {
        FollowerState state;
        state.is_head = agents_.size() == 1;
        state.own_host = agent.hello.host;
        state.has_restarts = spec_.restart.max_restarts > 0 || nodes_.min < nodes_.max;
        state.arrival_timeout = kFailureGrace + kHeartbeatTimeout;
        state.head_notices = head_notices_within({kHeartbeatTimeout});
        state.return_timeout = 10 * kHeartbeatTimeout;
        return state;
    }
    /// As HeadLink does.
    void follow(Agent& agent, const FollowerEvent& event) {
        const FollowerActions actions = step(agent.follower, event, MonotonicClock::now());
        loop_->cancel(agent.timer);
        if (agent.follower.timer != kNever)
            agent.timer = loop_->call_at(agent.follower.timer,
                                         [this, &agent] { follow(agent, follower_event::TimerFired{}); });
        if (actions.send) to_controller(agent, *actions.send);
        if (!actions.stop_workers.empty()) stop_workers(agent, actions.stop_workers);
        for (const auto& [peer, why] : actions.refuse) refuse(*agent.own, peer, why.code);
        if (actions.renew) renew(agent);
        const bool ends_workers = actions.renew || !actions.stop_workers.empty();
        if (ends_workers && (is_idle(agent) || agent.keeps_workers()))
            follow(agent, follower_event::WorkersEnded{});
        if (!actions.join.empty()) {
            agent.hello.keeps_workers = agent.keeps_workers();
            dial(agent, actions.join.front(), actions.join_by);
        }
        if (actions.take_over) take_over(agent, *actions.take_over, actions.joined);
        if (!actions.give_up.empty() || actions.end || actions.leave) leave(agent);
    }
    void stop_workers(Agent& agent, const std::string& why) {
        agent.inquiry->head_lost(why);
        if (!agent.state.may_be_left() || agent.state.alive() == 0) return end_workers(agent);
        const bool is_slow = dice_.chance(10) && (faults_ == Faults::All || may_lose(agent.hello.slots));
        let_go_of_all(agent, is_slow ? 2 * kHeartbeatTimeout : 60ms);
        feed(agent, agent_event::SuspendRequested{kHeartbeatTimeout});
    }
    void end_workers(Agent& agent) {
        if (!agent.grace_ends) agent.grace_ends = clock_.now() + kFailureGrace;
        feed(agent, agent_event::StopRequested{SIGTERM, kFailureGrace});
    }
    void renew(Agent& agent) {
        tell(fmt::format("node{} was lost, and joins again", agent.node));
        agent.hello.rejoins =
            std::exchange(agent.hello.instance, fmt::format("{}.{}", agent.port, agent.follower.instances));
        feed(agent, agent_event::KillRequested{});
    }
    void dial(Agent& agent, const Endpoint& where, TimePoint by) {
        agent.head = agents_[where.port]->own;
        after(delay(), [this, &agent, by] { join(agent, by); });
    }
    void refuse(Head& head, rdzv::AgentId peer, Errc code) {
        end_session(head, peer);
        after(delay(), [this, &head, &agent = *by_peer_[peer], code] { lose_head(agent, head, code); });
    }
    void take_over(Agent& agent, const JobState& state, const Joined& joined) {
        tell(fmt::format("node{} takes over", agent.node));
        stop_asked_.reset();  // a request to the lost head has to be repeated
        Controller& controller = build_controller(*agent.own);
        for (const auto& [peer, why] : controller.succeed(state, joined, agent.follower.why))
            refuse(*agent.own, peer, why.code);
    }
    void lose_head(Agent& agent, Head& head, Errc code) {
        if (!agent.is_running || agent.head != &head || agent.is_leaving || &agent == &head.agent) return;
        tell(fmt::format("node{} has lost its head", agent.node));
        const bool was_linked = std::exchange(agent.is_linked, false);
        if (agent.session != nullptr) agent.session->agent_ends();
        const bool is_dead = head.is_dead && hear_each_other(agent, head);
        follow(agent,
               follower_event::LinkLost{{"", head.agent.port}, {code, "gone", 0}, was_linked, is_dead});
    }

    // ---- faults

    void draw_faults(int first) {
        const TimePoint start = clock_.now();
        int nodes = first;
        if (faults_ == Faults::KilledWorkers) {
            work_ = 30s;
            for (int n = 0; n < 4; ++n)
                at(start + 4s + n * 6s + dice_.span(0s, 1s),
                   [this, one = dice_.between(0, 1000)] { kill_worker(one); });
            return;
        }
        if (nodes_are_lost()) {
            const Duration pause = faults_ == Faults::LostHeads ? 12s : 6s;
            work_ = 10s + 5 * pause;
            for (int n = 0; n < 5; ++n) {
                const TimePoint when = start + 5s + n * pause + dice_.span(0s, 1s);
                at(when, [this] {
                    if (const JobState& state = latest().controller->state(); !state.recovery.in_place) {
                        lost_ranks_ = 0;
                        world_ranks_ = state.ranks();
                    }
                    if (faults_ != Faults::LostHeads || !lose_head()) lose_something();
                });
                // Another loss at any instant of the recovery.
                if (dice_.chance(60)) at(when + dice_.span(0s, 1s), [this] { lose_something(); });
                if (dice_.chance(30)) at(when + dice_.span(0s, 6s), [this, n] { come(10 + n); });
            }
            return;
        }
        fails_percent_ = dice_.chance(70) ? 0 : dice_.between(1, 20);
        crashes_percent_ = dice_.chance(5) ? 20 : 0;
        work_ = dice_.span(1s, 30s);
        for (int n = recovers_ ? dice_.between(0, 5) : 0; n > 0; --n)
            at(start + dice_.span(0s, 2 * work_), [this, one = dice_.between(0, 1000)] {
                kill_worker(one);
                // Another one at any instant of the recovery.
                if (dice_.chance(40)) after(dice_.span(0s, 100ms), [this, one] { kill_worker(one / 2); });
            });
        for (int n = dice_.between(1, 10); n > 0; --n) {
            const TimePoint when = start + dice_.span(0s, 2 * work_);
            const int kind = dice_.between(1, 100), one = dice_.between(0, 1000);
            if (kind <= 18) at(when, [this, one] { crash(one); });
            else if (kind <= 22) at(when, [this] { crash_head(); });
            else if (kind <= 34) at(when, [this, one] { cut(one); });
            else if (kind <= 37) at(when, [this] { cut_head(); });
            else if (kind <= 55) at(when, [this, one] { ask_to_end(one, {15, false}); });
            else if (kind <= 57) at(when, [this, one] { ask_to_end(one, {15, true}); });
            else if (kind <= 90)
                at(when, [this, node = dice_.chance(50) ? nodes++ : dice_.between(1, nodes)] { come(node); });
            else if (kind <= 92) at(when, [this] { signal_head(); });
            else if (kind <= 93) at(when, [this] { preempt("drained", {}); });
            else if (kind <= 95) at(when, [this] { hang(); });
            else if (kind <= 97) at(when, [this] { set_walltime(); });
            else signal_all(when);
        }
        if (dice_.chance(20)) forward_to_all(start + dice_.span(0s, work_));
        for (int n = dice_.between(0, 4); n > 0; --n)
            at(start + dice_.span(0s, 2 * work_), [this, one = dice_.between(0, 1000)] { ask(one); });
        if (dice_.chance(10))
            at(start + dice_.span(0s, work_),
               [this, node = nodes, times = dice_.between(10, 400)] { flap(node, times); });
        for (int n = dice_.between(0, 6); n > 0; --n)
            at(start + dice_.span(0s, 2 * work_), [this, one = dice_.between(0, 1000)] { disturb(one); });
        const int around_standby = dice_.between(1, 100);
        const TimePoint when = start + dice_.span(3s, 3s + work_);
        if (around_standby <= 8) at(when, [this] { isolate_head(); });
        else if (around_standby <= 20) at(when, [this] { fail_standby(); });
        else if (around_standby <= 28)
            at(when, [this, node = nodes] {
                crashes_behind_newcomer_ = true;
                come(node);
            });
    }
    /// A running node that takes itself for the standby; null: none.
    Agent* standby() {
        for (const auto& agent : agents_) {
            if (agent->is_running && agent->follower.is_standby() && is_member(*agent)) return agent.get();
        }
        return nullptr;
    }
    /// Parts a node from its head, and the standby a little later: those two still hear each other.
    void isolate_head() {
        Agent* const next = standby();
        const auto first = std::ranges::find_if(agents_, [&](const auto& one) {
            return one.get() != next && one->is_running && !is_heads(*one) && is_member(*one);
        });
        if (next == nullptr || first == agents_.end() || (*first)->head != next->head) return;
        part(**first);
        after(dice_.span(3s, 8s), [this, next] { part(*next); });
    }
    void part(Agent& agent) {
        if (!agent.is_running || agent.head == agent.own || !is_member(agent) || agent.head->is_dead ||
            !hear_each_other(agent, *agent.head))
            return;
        tell(fmt::format("node{} and its head do not hear each other", agent.node));
        is_disturbed_ = may_fail_ = true;
        agent.session->may_end();
        note_lost_session();
        agent.session->fall_silent(5s, false);
    }
    /// A worker of the standby fails. Then the standby's network is silent: the next generation begins, and
    /// the head crashes, before the standby has heard that a restart is used up.
    void fail_standby() {
        const Agent* const agent = standby();
        const auto process = std::ranges::find_if(
            processes_, [&](const auto& one) { return one.second.agent == agent && !one.second.has_exited; });
        if (agent == nullptr || process == processes_.end()) return;
        tell(fmt::format("a worker of node{}, the standby, fails", agent->node));
        is_disturbed_ = may_fail_ = is_standby_failing_ = true;
        exits(process->first, {process->first, false, 1, false}, true);
    }
    [[nodiscard]] bool nodes_are_lost() const {
        return faults_ == Faults::LostNodes || faults_ == Faults::LostHeads;
    }
    /// False: the job would not outlive its head now.
    bool lose_head() {
        const Agent* const head = head_agent();
        const bool all_know = std::ranges::all_of(agents_, [](const auto& one) {
            return !one->is_running || is_heads(*one) || !one->follower.successor.host.empty();
        });
        if (head == nullptr || standby() == nullptr || !all_know || living() <= nodes_.min + 1) return false;
        if (!may_lose(head->hello.slots)) return false;
        crash_head();
        return true;
    }
    /// One of the losses that do not end a job whose workers recover in place.
    void lose_something() {
        const int kind = dice_.between(1, 100), one = dice_.between(0, 1000);
        Agent* const agent = other(one);
        const bool is_in_world = agent != nullptr && is_member(*agent) && !is_idle(*agent);
        // Without a head the job needs its standby, and most nodes.
        const bool is_needed = latest().is_dead && agent == standby();
        const bool can_go = is_in_world && !agent->was_signalled && !is_needed && living() > nodes_.min &&
                            may_lose(agent->hello.slots);
        if (kind <= 40 && can_go) crash(one);
        else if (kind <= 60 && can_go) ask_to_end(*agent, {15, false});
        else if (kind <= 80) break_link();
        else if (may_lose(1)) kill_worker(one);
    }
    /// Notes the loss of so many ranks; false: more than half would be lost at once.
    bool may_lose(int ranks) {
        // Ranks of nodes that are being taken in have no state yet.
        const auto& recovery = latest().controller->state().recovery.in_place;
        const int with_state = std::min(world_ranks_, recovery ? recovery->ranks : world_ranks_);
        if (2 * (lost_ranks_ + ranks) > with_state) return false;
        lost_ranks_ += ranks;
        return true;
    }
    /// Some ranks, or all, find their connections broken, and leave their generation.
    void break_link() {
        tell("a link breaks");
        const int percent = dice_.between(1, 100);
        for (auto& [pid, process] : processes_) {
            if (process.has_exited || !process.has_joined || process.has_left || process.has_finished ||
                !dice_.chance(percent))
                continue;
            process.has_left = true;
            after(dice_.span(0s, 20ms),
                  [this, pid = pid, generation = process.generation] { let_go(pid, generation); });
        }
    }
    void kill_worker(int one) {
        std::vector<pid_t> living;
        for (const auto& [pid, process] : processes_) {
            if (!process.has_exited) living.push_back(pid);
        }
        if (living.empty()) return;
        const pid_t pid = living[static_cast<std::size_t>(one) % living.size()];
        tell(fmt::format("a worker of node{} is killed", processes_.at(pid).agent->node));
        ++killed_;
        exits(pid, {pid, true, SIGKILL, false}, true);
    }
    /// A node whose ddprun dies or leaves soon after it has joined, and is started again each time.
    void flap(int node, int times) {
        if (times == 0 || head_agent() == nullptr) return;
        come(node);
        after(dice_.span(100ms, 8s), [this, node, times] {
            for (const auto& agent : agents_) {
                if (!agent->is_running || agent->is_cut || agent->node != node || is_heads(*agent)) continue;
                const bool leaves = dice_.chance(30);
                tell(fmt::format("node{} {}, and will come again", node, leaves ? "leaves" : "crashes"));
                note_fault();
                if (leaves) ask_to_end(*agent, {15, false});
                else end_process(*agent);
            }
            after(dice_.span(0s, 2s), [this, node, times] { flap(node, times - 1); });
        });
    }
    /// Disturbs the network between a node and its head for a while.
    void disturb(int one) {
        Agent* const agent = other(one);
        if (agent == nullptr || !is_member(*agent) || agent->head->is_dead ||
            !hear_each_other(*agent, *agent->head))
            return;
        SimulatedSession& session = *agent->session;
        const int kind = dice_.between(1, 100);
        // A head takes a connection that breaks and does not come back in time for the process's end. With
        // another loss these would be two at a time.
        const bool is_taken_for_dead = kind > 93;
        if (kind > 85 && (was_taken_for_dead_ || (is_taken_for_dead && cut_off_ > 0))) return;
        was_taken_for_dead_ = was_taken_for_dead_ || is_taken_for_dead;
        is_disturbed_ = true;
        if (kind > 85) {
            session.may_end();
            note_lost_session();
        }
        if (kind > 93) session.answer_slowly();
        tell(fmt::format("the network of node{} is disturbed{}", agent->node, kind > 85 ? " for long" : ""));
        if (kind <= 30 || kind > 93) return session.reset();
        if (kind > 60)
            return session.fall_silent(kind > 85 ? dice_.span(2s, 5s) : dice_.span(10ms, kOutageToSurvive),
                                       dice_.chance(30));
        for (int again = dice_.between(1, 3); again > 0; --again)
            after(dice_.span(0s, 4ms), [&session] { session.reset(); });
    }
    /// The nodes that have lost the head may be the larger part, which goes on.
    void note_lost_session() {
        note_fault();
        if (outlives_head_ && ++cut_off_ > 1) may_fail_ = true;
    }
    /// A running node other than the head's.
    Agent* other(int one) {
        std::vector<Agent*> running;
        for (const auto& agent : agents_) {
            if (agent->is_running && !agent->is_cut && !is_heads(*agent)) running.push_back(agent.get());
        }
        return running.empty() ? nullptr : running[static_cast<std::size_t>(one) % running.size()];
    }
    void crash(int one) {
        Agent* const agent = other(one);
        if (agent == nullptr) return;
        tell(fmt::format("node{} crashes", agent->node));
        note_fault();
        end_process(*agent);
    }
    void crash_head() {
        Agent* const agent = head_agent();
        if (agent == nullptr || agent->is_cut) return;
        tell(fmt::format("node{}, the head, crashes", agent->node));
        note_head_lost();
        end_process(*agent);
    }
    void cut_head() {
        Agent* const agent = head_agent();
        if (agent == nullptr || agent->is_cut) return;
        tell(fmt::format("node{}, the head, is cut off", agent->node));
        may_fail_ = true;  // the smaller part ends
        agent->is_cut = true;
        fall_silent(latest());
    }
    /// Lets a head and its agents lose each other by timeouts.
    void fall_silent(Head& head) {
        for (const auto& one : agents_) {
            if (one.get() == &head.agent || one->head != &head) continue;
            after(kHeartbeatTimeout + dice_.span(0s, head_notices_within({kHeartbeatTimeout})),
                  [this, &head, peer = one->peer] { lost(head, peer, Errc::Timeout); });
            after(kHeartbeatTimeout + dice_.span(0s, 500ms),
                  [this, &head, other = one.get()] { lose_head(*other, head, Errc::Timeout); });
        }
    }
    /// Lets the job fail unless it must survive: it outlives one loss at a time once all know the standby.
    void note_head_lost() {
        const bool comes_alone = clock_.now() > last_fault_ + 6s;
        bool all_know = true;
        for (const auto& agent : agents_) {
            if (agent->is_running && !is_heads(*agent) && agent->follower.successor.host.empty())
                all_know = false;
        }
        if (!comes_alone || !all_know || members() - 1 < nodes_.min || stop_asked_) may_fail_ = true;
        head_lost_at_ = clock_.now();
    }
    void note_fault() {
        last_fault_ = clock_.now();
        if (head_lost_at_ && clock_.now() < *head_lost_at_ + 15s) may_fail_ = true;
    }
    void cut(int one) {
        Agent* const agent = other(one);
        if (agent == nullptr) return;
        tell(fmt::format("node{} is cut off", agent->node));
        note_fault();
        agent->is_cut = true;
        ++cut_off_;
        if (outlives_head_ && cut_off_ > 1) may_fail_ = true;  // the nodes cut off may be the larger part
        if (agent->own != nullptr) fall_silent(*agent->own);
        Head* const head = agent->head;
        if (head == agent->own) return;  // no network parts an orphan from its own listener
        after(kHeartbeatTimeout + dice_.span(0s, 500ms),
              [this, head, peer = agent->peer] { lost(*head, peer, Errc::Timeout); });
        after(kHeartbeatTimeout + dice_.span(0s, 500ms),
              [this, agent, head] { lose_head(*agent, *head, Errc::Timeout); });
        if (dice_.chance(50)) after(dice_.span(4s, 30s), [agent] { agent->is_cut = false; });
    }
    void ask_to_end(int one, const rdzv::StopRequest& how) {
        if (Agent* const agent = other(one)) ask_to_end(*agent, how);
    }
    void ask_to_end(Agent& agent, const rdzv::StopRequest& how) {
        if (!agent.is_running || agent.is_leaving || std::exchange(agent.was_signalled, true)) return;
        tell(fmt::format("node{} is asked to end: {}", agent.node, how.preempts ? "preempt" : "stop"));
        note_fault();
        follow(agent, follower_event::EndAsked{how, agent.is_linked});
    }
    void signal_head() {
        Agent* const agent = head_agent();
        if (agent == nullptr || std::exchange(agent->was_signalled, true)) return;
        tell("the head gets SIGTERM");
        if (!agent->is_cut) note_stop();
        latest().controller->stop(SIGTERM);
    }
    /// Signals every node, one after the other, as a scheduler does.
    void signal_all(TimePoint when) {
        at(when, [this] {
            for (std::size_t i = 0; i < agents_.size(); ++i) {
                after(dice_.span(0s, 2s), [this, &agent = *agents_[i]] {
                    is_heads(agent) ? signal_head() : ask_to_end(agent, {15, false});
                });
            }
        });
    }
    void preempt(const std::string& why, std::optional<Duration> left) {
        const Agent* const agent = head_agent();
        if (agent == nullptr) return;
        tell("the job is preempted: " + why);
        if (!agent->is_cut) note_stop();
        latest().controller->preempt(SIGTERM, why, left);
    }
    void hang() {
        if (head_agent() == nullptr) return;
        tell("the workers hang");
        any_failed_ = true;
        latest().controller->hang_found("rank 0 hangs", 0, true);
    }
    /// Sets a walltime. From now on any end of a generation may end the job.
    void set_walltime() {
        may_fail_ = true;
        walltime_ = clock_.now() + dice_.span(1s, 100s);
        meet_walltime();
    }
    void meet_walltime() {
        latest().controller->walltime_known(*walltime_);
        at(std::max(*walltime_, clock_.now()), [this, head = &latest()] {
            if (head == &latest()) preempt("walltime", 2s);
        });
    }
    /// Signals every node at about the same time, as a scheduler does. Each worker gets the signal once.
    void forward_to_all(TimePoint when) {
        at(when, [this] {
            for (const auto& agent : agents_) {
                after(dice_.span(0s, 500ms), [this, &one = *agent] {
                    if (!is_heads(one)) return forward(one, SignalFrom::Here);
                    if (!one.own->is_dead && !one.own->has_ended) one.own->controller->forward(SIGUSR1);
                });
            }
        });
    }
    void forward(Agent& agent, SignalFrom from) {
        if (!agent.is_running || !agent.forwarded.is_new(SIGUSR1, from, clock_.now())) return;
        for (auto& [pid, process] : processes_) {
            if (process.agent == &agent && ++process.signals > 1)
                must(is_disturbed_, fmt::format("a worker of node{} gets a signal twice", agent.node));
        }
    }
    /// Checks that a question is answered once and in time, whatever happens to the head.
    void ask(int one) {
        Agent& agent = *agents_[static_cast<std::size_t>(one) % agents_.size()];
        if (!agent.is_running) return;
        const auto answers = std::make_shared<int>(0);
        agent.inquiry->ask_job({"status", {}}, [answers](const std::string&) { ++*answers; });
        after(kQuestionPatience + 2s, [this, &agent, answers] {
            must(*answers <= 1, "a question is answered twice");
            const bool has_gone =
                !agent.is_running || is_over() || (agent.own != nullptr && agent.own->has_ended);
            must(*answers == 1 || has_gone, fmt::format("a question at node{} is not answered", agent.node));
        });
    }
    void come(int node) {
        for (const auto& agent : agents_) {
            if (agent->is_running && agent->node == node) return;
        }
        start(add_agent(node));
    }

    // ---- agents and their workers

    Agent& add_agent(int node) {
        agents_.push_back(std::make_unique<Agent>());
        Agent& agent = *agents_.back();
        agent.node = node;
        agent.port = static_cast<std::uint16_t>(agents_.size() - 1);
        agent.hello.host = fmt::format("node{}", node);
        if (agents_.size() == 1) agent.hello.node_rank = 0;
        agent.hello.slots = 1 + node % most_slots_;
        agent.hello.pid = 1;  // as in containers
        agent.hello.instance = fmt::format("{}", agent.port);
        agent.hello.terms = {"version=1"};
        agent.follower = begin_following(agent);
        agent.inquiry = make_inquiry(agent);
        return agent;
    }
    std::unique_ptr<Inquiry> make_inquiry(Agent& agent) {
        const auto to_head = [this, &agent](rdzv::FromAgent message) {
            return to_controller(agent, std::move(message));
        };
        auto inquiry = std::make_unique<Inquiry>(*loop_, to_head);
        inquiry->on_node("status", [](const ControlRequest&, const Inquiry::Answer& answer) { answer("I"); });
        inquiry->takes("status", kQuestionPatience);
        return inquiry;
    }
    void start(Agent& agent) {
        tell(fmt::format("node{} starts its ddprun", agent.node));
        agent.head = &latest();
        after(delay(), [this, &agent] { join(agent, clock_.now()); });
    }
    void join(Agent& agent, TimePoint by) {
        Head& head = *agent.head;
        if (!agent.is_running || agent.is_leaving) return;
        if (head.is_dead || !hear_each_other(agent, head)) {
            if (clock_.now() >= by) return lose_head(agent, head, Errc::Timeout);
            return after(100ms, [this, &agent, by] { join(agent, by); });
        }
        const rdzv::AgentId earlier = std::exchange(agent.peer, by_peer_.size());
        by_peer_.push_back(&agent);
        open_session(agent, head);
        agent.is_linked = true;
        if (!head.controller) {
            head.members.insert(agent.peer);
            return follow(head.agent, follower_event::AgentCame{agent.peer, agent.hello});
        }
        const Status joined = head.controller->agent_joined(agent.peer, agent.hello);
        if (head.members.contains(earlier)) end_session(head, earlier);
        if (!joined) return lose_head(agent, head, joined.error().code);
        head.members.insert(agent.peer);
        note_members();
        if (!std::exchange(crashes_behind_newcomer_, false)) return;
        // The standby does not hear of the newcomer, which comes to it before nodes that stop their workers.
        if (Agent* const next = standby()) next->session->fall_silent(1s, false);
        after(dice_.span(20ms, 80ms), [this] { crash_head(); });
    }
    static void end_session(Head& head, rdzv::AgentId peer) {
        head.members.erase(peer);
        head.sessions.at(peer)->head_ends();
    }
    void lost(Head& head, rdzv::AgentId peer, Errc code) {
        if (head.is_dead || !head.members.contains(peer)) return;
        end_session(head, peer);
        note_members();
        if (!head.controller) return follow(head.agent, follower_event::AgentGone{peer});
        head.survey->agent_lost(peer);
        head.controller->agent_lost(peer, {code, "gone", 0});
    }
    /// Ends a ddprun and its workers at once.
    void end_process(Agent& agent) {
        if (!agent.is_running) return;
        agent.is_running = false;
        if (agent.session != nullptr) agent.session->agent_ends();
        std::erase_if(processes_, [&](const auto& process) { return process.second.agent == &agent; });
        if (hear_each_other(agent, *agent.head))
            after(delay(), [this, head = agent.head, peer = agent.peer] { lost(*head, peer, Errc::Closed); });
        Head* const own = agent.own;
        if (own == nullptr) return;
        own->is_dead = true;
        for (const auto& [peer, session] : own->sessions) session->head_ends();
        for (const auto& one : agents_) {
            if (one->head == own && hear_each_other(*one, *own))
                after(delay(), [this, other = one.get(), own] { lose_head(*other, *own, Errc::Closed); });
        }
    }
    /// Lets a ddprun end after its workers.
    void leave(Agent& agent) {
        if (!agent.is_running) return;
        agent.is_leaving = true;
        if (agent.state.is_left()) {
            if (std::exchange(agent.is_linked, false) && hear_each_other(agent, *agent.head))
                after(delay(),
                      [this, head = agent.head, peer = agent.peer] { lost(*head, peer, Errc::Closed); });
            end_workers(agent);
        } else {
            feed(agent, agent_event::KillRequested{});
        }
        end_if_idle(agent);
    }
    void end_if_idle(Agent& agent) {
        if (agent.is_leaving && is_idle(agent) && !is_heads(agent)) end_process(agent);
    }
    static bool is_idle(const Agent& agent) { return agent.state.phase == AgentState::Phase::Idle; }

    void feed(Agent& agent, const AgentEvent& event) {
        const bool was_left = agent.state.is_left();
        const std::vector<AgentAction> actions = step(agent.state, event, clock_.now());
        const bool is_left = agent.state.is_left();
        for (const AgentAction& action : actions) {
            std::visit([&](const auto& one) { perform(agent, one); }, action);
        }
        if (!is_left || was_left) return;
        if (agent.keeps_workers()) follow(agent, follower_event::WorkersEnded{});
        else if (agent.follower.is_orphan()) end_workers(agent);
    }
    void perform(Agent&, const agent_action::AwaitGpus&) {}
    void perform(Agent& agent, const agent_action::SpawnNext& action) {
        for (const auto& [pid, process] : processes_) {
            const bool is_here = process.agent->node == agent.node;
            must(!is_here || process.generation == agent.order.generation,
                 fmt::format("two generations are alive on node{}", agent.node));
            must(process.agent != &agent || process.local_rank != action.local_rank,
                 fmt::format("a rank of node{} has two processes", agent.node));
        }
        const pid_t pid = next_pid_++;
        ++spawned_;
        processes_.emplace(pid, Process{&agent, agent.order.generation, action.local_rank,
                                        recovers_ && faults_ == Faults::All && dice_.chance(2)});
        const bool fails = dice_.chance(fails_percent_);
        if (fails) after(dice_.span(1ms, work_), [this, pid] { exits(pid, {pid, false, 1, false}, true); });
        const bool is_slow = agent.order.in_place && faults_ != Faults::KilledWorkers && dice_.chance(5);
        has_slow_worker_ = has_slow_worker_ || is_slow;
        if (recovers_)
            after(dice_.span(1ms, 300ms) + (is_slow ? 2 * kRecoverWithin : 0s), [this, pid] {
                reach(pid, AgentState::Stage::Announced);
                arrive(pid);
            });
        else if (!fails)
            after(work_ + dice_.span(0s, 300ms), [this, pid] { exits(pid, {pid, false, 0, false}); });
        feed(agent, agent_event::Spawned{action.local_rank, pid});
    }
    void perform(Agent& agent, const agent_action::ReportStarted&) {
        to_controller(agent, rdzv::WorkersStarted{agent.order.generation});
    }
    void perform(Agent& agent, const agent_action::ReportStage& action) {
        to_controller(agent, rdzv::WorkersReady{agent.order.generation, action.stage, "", steps_of(agent)});
    }
    void perform(Agent& agent, const agent_action::ReportSuspended&) {
        to_controller(agent, rdzv::WorkersReady{agent.order.generation, rdzv::WorkerStage::Suspended, "",
                                                steps_of(agent)});
    }
    [[nodiscard]] std::int64_t steps_of(const Agent& agent) const {
        return recovers_ ? (clock_.now() - agent.work_ends + work_) / 1ms : -1;
    }
    void perform(Agent&, const agent_action::ReportRefusal&) {}
    void perform(Agent& agent, const agent_action::ReportLetGo& action) {
        to_controller(agent,
                      rdzv::WorkersReady{agent.order.generation, rdzv::WorkerStage::LetGo, action.why, -1});
    }
    void perform(Agent& agent, const agent_action::ReportSlow&) {
        to_controller(
            agent, rdzv::WorkersReady{agent.order.generation, rdzv::WorkerStage::Slow, "", steps_of(agent)});
    }
    void perform(Agent& agent, const agent_action::KillLate& action) {
        must(!agent.grace_ends, fmt::format("a worker of node{} is killed in its grace", agent.node));
        for (const int local_rank : action.local_ranks) {
            const pid_t pid = agent.state.workers[static_cast<std::size_t>(local_rank)].pid;
            const Process& process = processes_.at(pid);
            must(!agent.state.is_recovering || !process.has_arrived,
                 fmt::format("a worker of node{} that waits for the others is killed", agent.node));
            must(agent.state.is_recovering || !process.has_finished,
                 fmt::format("a worker of node{} that waits for its release is killed", agent.node));
            must(process.is_deaf || !process.has_state || agent.head->is_dead || !agent.is_linked,
                 fmt::format("a worker of node{} that computes is killed", agent.node));
            after(1ms, [this, pid] { exits(pid, {pid, true, SIGKILL, false}, true); });
        }
    }
    std::vector<AgentState::Progress> progress(const Agent& agent) const {
        std::vector<AgentState::Progress> all;
        for (const AgentState::Worker& worker : agent.state.workers) {
            const auto process = processes_.find(worker.pid);
            all.push_back({.slowest_unit = kLongUnit});
            all.back().has_mapped = process != processes_.end() && process->second.has_arrived;
        }
        return all;
    }
    void perform(Agent& agent, const agent_action::TellLast& action) {
        const pid_t pid = agent.state.workers[static_cast<std::size_t>(action.local_rank)].pid;
        after(1ms, [this, pid] { exits(pid, {pid, false, 1, false}); });
    }
    void perform(Agent& agent, const agent_action::TellRelease& action) {
        const pid_t pid = agent.state.workers[static_cast<std::size_t>(action.local_rank)].pid;
        after(dice_.span(0s, 20ms), [this, pid] { exits(pid, {pid, false, 0, false}); });
    }

    // ---- workers that recover in place

    void reach(pid_t pid, AgentState::Stage stage) {
        const auto process = processes_.find(pid);
        if (process == processes_.end() || process->second.has_exited) return;
        const Process one = process->second;
        feed(*one.agent, agent_event::StageReached{one.local_rank, stage, one.generation});
    }
    /// A worker waits for the others of its generation; the last one lets all join.
    void arrive(pid_t pid) {
        const auto process = processes_.find(pid);
        if (process == processes_.end()) return;
        process->second.has_arrived = true;
        const std::uint64_t generation = process->second.generation;
        std::vector<pid_t> met;
        for (const auto& [one, other] : processes_) {
            if (other.generation == generation && other.has_arrived && !other.has_exited) met.push_back(one);
        }
        const int size = process->second.agent->order.world_size;
        must(static_cast<int>(met.size()) <= size, "a generation has more processes than ranks");
        if (static_cast<int>(met.size()) < size) return;
        const bool has_state = state_of_ < first_generation_ || std::ranges::any_of(met, [&](pid_t one) {
                                   return processes_.at(one).has_state;
                               });
        must(has_state || faults_ == Faults::All,
             fmt::format("no rank of generation {} has the state of generation {}", generation, state_of_));
        // The head has not heard yet that more than half of the ranks have failed.
        for (const pid_t one : met) {
            if (!has_state) after(1ms, [this, one] { exits(one, {one, false, 1, false}, true); });
        }
        if (!has_state) return;
        state_of_ = generation;
        for (const pid_t one : met)
            after(dice_.span(0s, 5ms), [this, one, generation] { join_world(one, generation); });
    }
    void join_world(pid_t pid, std::uint64_t generation) {
        const auto process = processes_.find(pid);
        if (process == processes_.end() || process->second.generation != generation) return;
        process->second.has_joined = process->second.has_state = true;
        reach(pid, AgentState::Stage::Joined);
        const Duration left = std::max<Duration>(process->second.agent->work_ends - clock_.now(), 0s);
        after(left + dice_.span(0s, 300ms), [this, pid, generation] {
            const auto one = processes_.find(pid);
            const bool is_there = one != processes_.end() && one->second.generation == generation;
            if (!is_there || one->second.has_left) return;
            one->second.has_finished = true;
            reach(pid, AgentState::Stage::Finished);
        });
    }
    /// The workers that run leave their generation, each in its time.
    void go_on(Agent& agent, const rdzv::StartGeneration& start) {
        for (auto& [pid, process] : processes_) {
            if (process.agent != &agent || process.has_exited) continue;
            process.generation = start.generation;
            process.has_arrived = process.has_joined = process.has_left = process.is_out =
                process.has_finished = false;
            if (process.is_deaf) continue;
            const bool computes = faults_ != Faults::KilledWorkers && dice_.chance(2);
            has_slow_worker_ = has_slow_worker_ || computes;
            after(dice_.span(0s, computes ? 2 * kLongUnit : 60ms),
                  [this, pid = pid, generation = start.generation] {
                      const auto one = processes_.find(pid);
                      if (one != processes_.end() && one->second.generation == generation) arrive(pid);
                  });
        }
        feed(agent, agent_event::RecoverRequested{start.generation});
    }
    void let_go_of_all(Agent& agent, Duration slowest = 60ms) {
        for (auto& [pid, process] : processes_) {
            if (process.agent != &agent || process.is_deaf || process.has_finished) continue;
            process.has_left = true;
            after(dice_.span(0s, slowest),
                  [this, pid = pid, generation = process.generation] { let_go(pid, generation); });
        }
    }
    void let_go(pid_t pid, std::uint64_t generation) {
        const auto one = processes_.find(pid);
        if (one == processes_.end() || one->second.has_exited || one->second.generation != generation) return;
        one->second.is_out = true;
        feed(*one->second.agent, agent_event::LetGo{one->second.local_rank, generation, "a link is broken"});
    }

    void perform(Agent& agent, const agent_action::SignalWorker& action) {
        const pid_t pid = action.pid;
        must(faults_ == Faults::All || agent.was_signalled || agent.is_leaving,
             fmt::format("a worker of node{}, which stays, is stopped", agent.node));
        if (action.signal == SIGKILL) {
            const bool may_kill = agent.is_leaving || agent.head->is_outnumbered ||
                                  agent.follower.phase == FollowerState::Phase::Returning;
            must(!agent.grace_ends || clock_.now() >= *agent.grace_ends || may_kill,
                 fmt::format("a worker of node{} is killed before its grace is over", agent.node));
            return after(1ms, [this, pid] { exits(pid, {pid, true, SIGKILL, false}); });
        }
        const bool is_stop = action.signal == SIGTERM || action.signal == 0;  // 0: at the agreed step
        if (is_stop && recovers_ && dice_.chance(5))                          // it dies before it has saved
            return after(dice_.span(0s, 30ms), [this, pid] {
                exits(pid, {pid, true, SIGKILL, false}, true);
            });
        if (!is_stop || dice_.chance(15)) return;  // the worker goes on
        const bool saves = dice_.chance(70);
        after(saves ? dice_.span(1ms, 3s) : dice_.span(0s, 5ms), [this, pid, saves] {
            exits(pid, {pid, !saves, saves ? 0 : SIGTERM, false});
        });
    }
    void exits(pid_t pid, os::ChildExit exit, bool is_failure = false) {
        const auto process = processes_.find(pid);
        if (process == processes_.end() || process->second.has_exited) return;
        process->second.has_exited = true;
        Agent& agent = *process->second.agent;
        if (is_failure) any_failed_ = true;
        feed(agent, agent_event::Exited{exit});
    }
    void perform(Agent&, const agent_action::BuryGroup& action) { processes_.erase(action.pid); }
    void perform(Agent&, const agent_action::ReapStranger&) {}
    void perform(Agent&, const agent_action::ReportStrays&) {}
    void perform(Agent& agent, const agent_action::ReportExit& action) {
        rdzv::WorkerExited report;
        report.generation = agent.order.generation;
        report.local_rank = action.local_rank;
        report.rank = agent.order.first_rank + action.local_rank;
        report.pid = action.exit.pid;
        report.signaled = action.exit.signaled;
        report.status = action.exit.status;
        report.by_us = action.by_us;
        report.steps = steps_of(agent);
        to_controller(agent, report);
    }
    void perform(Agent& agent, const agent_action::Sweep&) { feed(agent, agent_event::Swept{}); }
    void perform(Agent& agent, const agent_action::SetDeadline& action) {
        if (action.when != kNever)
            at(action.when, [this, &agent] {
                if (agent.is_running) feed(agent, agent_event::DeadlinePassed{progress(agent)});
            });
    }
    void perform(Agent& agent, const agent_action::ReportEnded& action) {
        must(action.unkillable.empty(), fmt::format("node{} gives up on its workers", agent.node));
        to_controller(agent, rdzv::GenerationEnded{agent.order.generation, {}});
        if (agent.is_leaving) after(delay(), [this, &agent] { end_if_idle(agent); });
        follow(agent, follower_event::WorkersEnded{});
    }

    // ---- the network

    void open_session(Agent& agent, Head& head) {
        SimulatedSession::Parts parts{dice_, {kHeartbeatTimeout}};
        parts.now = [this] { return clock_.now(); };
        parts.after = [this](Duration span, std::function<void()> happen) { after(span, std::move(happen)); };
        parts.delay = [this] { return delay(); };
        parts.can_arrive = [this, &agent, &head] { return !head.is_dead && hear_each_other(agent, head); };
        parts.is_whole = [this, &agent, &head] {
            return agent.is_running && !head.is_dead && hear_each_other(agent, head);
        };
        parts.head_hears = [this, &agent, &head, peer = agent.peer](rdzv::Frame frame) {
            if (agent.peer == peer) head_hears(agent, head, std::move(frame));
        };
        parts.agent_hears = [this, &agent, &head](rdzv::Frame frame) {
            if (agent.is_running && agent.head == &head) agent_hears(agent, std::move(frame));
        };
        // The session itself has checked that it may end between two living processes.
        const auto is_a_fault = parts.is_whole;
        parts.head_loses = [this, is_a_fault, &head, peer = agent.peer](Errc code) {
            if (is_a_fault()) note_lost_session();
            lost(head, peer, code);
        };
        parts.agent_loses = [this, is_a_fault, &agent, &head](Errc code) {
            if (is_a_fault()) note_fault();
            lose_head(agent, head, code);
        };
        parts.wrong = [this](const std::string& what) { must(false, what); };
        sessions_.push_back(std::make_unique<SimulatedSession>(std::move(parts)));
        agent.session = head.sessions[agent.peer] = sessions_.back().get();
    }
    bool to_controller(Agent& agent, rdzv::FromAgent message) {
        if (agent.is_linked) agent.session->say_to_head(encode_message(std::move(message)));
        return agent.is_linked;
    }
    void head_hears(Agent& agent, Head& head, rdzv::Frame frame) {
        if (!head.controller || !head.members.contains(agent.peer)) return;
        std::visit([&](const auto& one) { hear(agent, head, one); },
                   *rdzv::decode_from_agent(std::move(frame)));
    }
    void agent_hears(Agent& agent, rdzv::Frame frame) {
        std::visit([&](const auto& one) { obey(agent, one); }, *rdzv::decode_to_agent(std::move(frame)));
    }
    void hear(Agent& agent, Head& head, const rdzv::StopRequest& request) {
        const int others = members() - 1;
        if (others < nodes_.min || request.preempts) note_stop();
        else leavers_.insert(agent.peer);
        head.controller->agent_message(agent.peer, request);
    }
    template <class Message>
    void hear(Agent& agent, Head& head, const Message& message) {
        if constexpr (requires { head.controller->agent_message(agent.peer, message); })
            head.controller->agent_message(agent.peer, message);
        else if constexpr (requires { head.survey->from_agent(agent.peer, message); })
            head.survey->from_agent(agent.peer, message);
    }
    void from_controller(Head& head, rdzv::AgentId peer, const rdzv::ToAgent& message) {
        if (head.is_dead) return;
        Agent& agent = *by_peer_[peer];
        if (std::holds_alternative<rdzv::StartGeneration>(message))
            must(&head == &latest(), "a head that was succeeded begins a generation");
        if (const auto* start = std::get_if<rdzv::StartGeneration>(&message)) check(agent, *start);
        const JobState& state = head.controller->state();
        const bool is_last_word =
            std::holds_alternative<rdzv::Shutdown>(message) && head.controller->finished();
        const bool is_end = is_last_word || (std::holds_alternative<rdzv::StopGeneration>(message) &&
                                             (state.end.stopped_by || state.end.preempted));
        // The end that an outnumbered head tells does not count: the larger part goes on without this head.
        if (is_end && !head.agent.is_cut && !head.is_outnumbered) end_was_told_ = true;
        head.sessions.at(peer)->say_to_agent(encode_message(message));
    }
    /// Checks that each node gets the next ranks of a generation, and that no connected node still runs
    /// workers of the last one.
    void check(const Agent& agent, const rdzv::StartGeneration& start) {
        must(!end_was_told_ || start.in_place, "a generation begins though it was told that the job ends");
        must(start.restart_count >= heard_restarts_, "restarts that were used up are counted back");
        if (start.generation != checked_generation_) {
            must(start.generation > checked_generation_, "a generation comes again");
            must(next_rank_ == checked_world_,
                 fmt::format("{} of {} ranks were given away", next_rank_, checked_world_));
            checked_generation_ = start.generation;
            checked_world_ = start.world_size;
            next_rank_ = 0;
            earlier_generation_ = heard_generation_;
            must(start.group_world_size >= nodes_.min && start.group_world_size <= nodes_.max,
                 fmt::format("a world of {} nodes", start.group_world_size));
            // A new head keeps its place where its workers go on.
            must(&agent == &latest().agent || recovers_, "the first rank is not the head's");
            const bool is_first = !std::exchange(latest().has_begun, true);
            for (const auto& [pid, process] : processes_) {
                const Agent& of = *process.agent;
                must(!is_heads(of) || &of == &latest().agent,
                     fmt::format(
                         "generation {} begins while the head that was lost has workers of generation {}",
                         start.generation, process.generation));
                const bool has_lost_head = !is_disturbed_ && of.head->is_dead && !of.is_leaving;
                const bool is_out = process.is_out || process.has_finished;
                const bool goes_on = (start.in_place && !is_first) || is_out || of.is_leaving;
                const bool is_connected = of.head == &latest() && is_member(of);
                must(goes_on || of.is_cut || (!is_connected && !has_lost_head) || of.head->agent.is_cut,
                     fmt::format("generation {} begins while node{} has workers of generation {}",
                                 start.generation, of.node, process.generation));
            }
        }
        const bool is_moved = agent.order.first_rank != start.first_rank ||
                              agent.order.group_world_size != start.group_world_size;
        must(!start.in_place || !is_moved || is_idle(agent) || agent.is_leaving ||
                 agent.state.phase == AgentState::Phase::Suspended,
             fmt::format("node{} is in another world before its workers have left the last one", agent.node));
        must(start.first_rank == next_rank_, fmt::format("rank {} is given to node{}, the next is {}",
                                                         start.first_rank, agent.node, next_rank_));
        next_rank_ += start.local_world_size;
        // A node keeps its place, except for a new head, which takes the first.
        const bool keeps_place = agent.order.generation == earlier_generation_ && earlier_generation_ > 0 &&
                                 &agent != &latest().agent;
        must(!keeps_place || start.place == agent.order.place,
             fmt::format("node{} has place {} instead of {}", agent.node, start.place, agent.order.place));
        tell(fmt::format("node{} is to start ranks {} to {} of {}", agent.node, start.first_rank,
                         next_rank_ - 1, start.world_size));
    }
    void obey(Agent& agent, const rdzv::StartGeneration& start) {
        if (agent.is_leaving) return;
        agent.order = start;
        heard_generation_ = std::max(heard_generation_, start.generation);
        heard_restarts_ = std::max(heard_restarts_, start.restart_count);
        note_generation(agent.hello, start);
        follow(agent, follower_event::GenerationBegan{});
        agent.grace_ends.reset();
        using enum AgentState::Phase;
        const bool is_stopping = agent.state.phase == Stopping;
        // Workers that meet again in a stop have agreed before.
        if (!start.in_place || !end_was_told_) agent.highest = agent.accepted = 0;
        const bool has_workers = agent.state.phase == Starting || agent.state.phase == Running ||
                                 agent.state.phase == Suspended || is_stopping;
        if (start.in_place && (agent.state.phase == Killing || agent.state.phase == Sweeping)) {
            agent.state.generation = start.generation;
            return;
        }
        if (start.in_place && has_workers) return go_on(agent, start);
        if (!start.in_place) first_generation_ = start.generation;
        agent.work_ends = start.in_place ? latest().agent.work_ends : clock_.now() + work_;
        feed(agent, agent_event::StartRequested{start.generation, start.local_world_size, false,
                                                recovers_ ? kRecoverWithin : 0s, start.in_place});
        const bool knows_more = !is_heads(agent) && &agent != standby();
        if (knows_more && std::exchange(crashes_at_next_start_, false)) after(0s, [this] { crash_head(); });
    }
    void obey(Agent& agent, const rdzv::StopGeneration& stop) {
        if (stop.generation != agent.order.generation) return;
        if (stop.signal == SIGKILL) return feed(agent, agent_event::KillRequested{});
        const bool has_workers = agent.state.phase == AgentState::Phase::Running;
        must(stop.stop_at == 0 || stop.stop_at == agent.accepted || !has_workers,
             fmt::format("node{} is to stop after step {}, which it has not accepted", agent.node,
                         stop.stop_at));
        if (!agent.grace_ends) agent.grace_ends = clock_.now() + Duration(stop.grace_ns);
        if (recovers_ && stop.failed_rank >= 0) let_go_of_all(agent);
        feed(agent, agent_event::StopRequested{stop.signal, Duration(stop.grace_ns), stop.failed_rank >= 0});
    }
    void obey(Agent& agent, const rdzv::StopProposal& proposal) {
        if (proposal.generation != agent.order.generation || dice_.chance(3)) return;  // or the node is slow
        agent.highest += static_cast<std::uint64_t>(dice_.between(0, 5));
        const bool listens = agent.state.phase == AgentState::Phase::Running && !dice_.chance(10);
        agent.accepted = listens && agent.highest < proposal.step ? proposal.step : 0;
        to_controller(agent, rdzv::StepsDone{proposal.generation, proposal.step, listens, agent.highest});
    }
    void obey(Agent& agent, const rdzv::SuspendGeneration& order) {
        if (agent.state.is_left() && order.generation > agent.order.generation)
            agent.order.generation = agent.state.generation = order.generation;
        if (order.generation != agent.order.generation) return;
        if (!agent.state.is_left()) let_go_of_all(agent);
        feed(agent, agent_event::SuspendRequested{});
    }
    void obey(Agent& agent, const rdzv::Release& release) {
        if (release.generation == agent.order.generation) feed(agent, agent_event::Released{});
    }
    void obey(Agent& agent, const rdzv::Shutdown& shutdown) { follow(agent, shutdown); }
    void obey(Agent& agent, const rdzv::ForwardSignal&) { forward(agent, SignalFrom::Head); }
    void obey(Agent& agent, const rdzv::EndCollectives&) {
        if (recovers_) let_go_of_all(agent);
        feed(agent, agent_event::NoneFollows{});
    }
    void obey(Agent& agent, const rdzv::KillRank& order) {
        if (agent.order.local_world_size == 0) return;
        const int local_rank = order.rank - agent.order.first_rank;
        must(local_rank >= 0 && local_rank < agent.order.local_world_size,
             "a node is to kill another's worker");
        const pid_t pid = agent.state.workers[static_cast<std::size_t>(local_rank)].pid;
        exits(pid, {pid, true, SIGKILL, false}, true);
    }
    void obey(Agent& agent, const rdzv::JobSnapshot& snapshot) {
        if (agent.own == nullptr) add_head(agent);
        follow(agent, follower_event::Appointed{snapshot, agent.port});
    }
    void obey(Agent& agent, const rdzv::Successor& successor) { follow(agent, successor); }
    template <class Message>
    void obey(Agent& agent, const Message& message) {
        if constexpr (requires { agent.inquiry->from_head(message); }) agent.inquiry->from_head(message);
    }

    // ---- checks

    int members() const {
        int count = 0;
        for (const rdzv::AgentId peer : latest().members) count += leavers_.contains(peer) ? 0 : 1;
        return count;
    }
    /// The members that are not lost; the head may not have noticed a loss yet.
    int living() const {
        const auto goes = [&](const auto& one) {
            return !one->is_running && latest().members.contains(one->peer);
        };
        return members() - static_cast<int>(std::ranges::count_if(agents_, goes));
    }
    void note_members() {
        if (latest().controller->state().generation > 0 && members() < nodes_.min) was_too_few_ = true;
    }
    void note_stop() {
        if (!stop_asked_) stop_asked_ = clock_.now();
    }
    /// Checks that a job ends in time when told to: after all graces, a kill, and the messages both ways.
    void check_stop() {
        const bool is_late = stop_asked_ && !latest().is_dead && !latest().has_ended &&
                             clock_.now() > *stop_asked_ + kStopGrace + kHeartbeatTimeout + 5s;
        must(!is_late, "the job goes on although it was told to end");
    }
    std::string judge_end() const {
        const Controller& controller = *latest().controller;
        if (faults_ == Faults::KilledWorkers) {
            const JobState& state = controller.state();
            if (!has_succeeded_) return "the job failed though its workers recover in place";
            if (state.restarts_used != 0) return "a recovery in place used a restart";
            if (state.recovery.recoveries != killed_)
                return fmt::format("{} of {} killed workers were recovered", state.recovery.recoveries,
                                   killed_);
            if (spawned_ != state.ranks() + killed_) return "a survivor has lost its process";
            return "";
        }
        if (nodes_are_lost()) {
            const JobState& state = controller.state();
            if (!has_succeeded_) return "the job failed though enough nodes recover in place";
            if (state.restarts_used != 0) return "a recovery in place used a restart";
            return first_generation_ == 1 ? "" : "all workers were started again";
        }
        const bool may_fail =
            stop_asked_ || any_failed_ || was_too_few_ || may_fail_ || controller.state().generation == 0;
        if (has_succeeded_ || may_fail) return "";
        return latest().is_dead ? "the job ended with its head though enough nodes were there"
                                : fmt::format("the job ended with {} though enough nodes were there",
                                              exit_code(controller.end()));
    }

    SimulatedClock clock_;
    Dice dice_;
    const bool is_told_;
    const Faults faults_;
    bool recovers_ = false;                 ///< the workers announce that they recover in place
    int killed_ = 0, spawned_ = 0;          ///< workers
    int lost_ranks_ = 0, world_ranks_ = 0;  ///< since the last recovery, of so many
    std::uint64_t first_generation_ = 1;    ///< the last one that all workers began
    std::uint64_t state_of_ = 0;            ///< the last one that all its workers have joined
    std::string wrong_;
    UniqueFd null_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
    os::Log log_{{},
                 {is_told_ ? os::LogLevel::Info : os::LogLevel::Error, false, is_told_ ? 1 : null_.get()}};
    std::unique_ptr<os::EventLoop> loop_;
    std::multimap<TimePoint, std::function<void()>> events_;
    std::vector<std::unique_ptr<Agent>> agents_;  ///< by port
    std::vector<Agent*> by_peer_{nullptr};        ///< from 1, one for each session
    std::map<pid_t, Process> processes_;
    pid_t next_pid_ = 100;
    JobSpec spec_;
    Nodes nodes_;
    bool outlives_head_ = false;  ///< the head did not start the other nodes
    Duration work_{};
    int fails_percent_ = 0, crashes_percent_ = 0, cut_off_ = 0;
    int most_slots_ = 2;
    bool was_taken_for_dead_ = false, is_disturbed_ = false;
    bool has_slow_worker_ = false;  ///< in the recovery under way
    bool is_standby_failing_ = false, crashes_at_next_start_ = false, crashes_behind_newcomer_ = false;
    std::optional<TimePoint> walltime_;
    std::set<rdzv::AgentId> leavers_;
    bool any_failed_ = false, was_too_few_ = false, may_fail_ = false, has_succeeded_ = false;
    std::optional<TimePoint> stop_asked_, head_lost_at_;
    TimePoint last_fault_{};
    std::uint64_t checked_generation_ = 0;
    int checked_world_ = 0, next_rank_ = 0;
    std::uint64_t heard_generation_ = 0,
                  earlier_generation_ = 0;  ///< by any agent; its value when the last world was formed
    int heard_restarts_ = 0;                ///< by any agent
    bool end_was_told_ = false;             ///< to any agent
    std::vector<std::unique_ptr<SimulatedSession>> sessions_;
    std::vector<std::unique_ptr<Head>> heads_;  ///< all are kept: their posted calls may still come
    Head* latest_ = nullptr;                    ///< the last one with a controller
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

TEST(Simulation, KilledWorkersAreRecoveredWhileTheOthersKeepTheirProcess) {
    if (const char* const seed = std::getenv("DDPRUN_SIMULATION_SEED")) {
        EXPECT_EQ(SimulatedJob(std::strtoull(seed, nullptr, 10), true, Faults::KilledWorkers).run(), "");
        return;
    }
    for (std::uint64_t seed = 1; seed <= kSchedules / 10; ++seed) {
        const std::string wrong = SimulatedJob(seed, false, Faults::KilledWorkers).run();
        ASSERT_EQ(wrong, "") << "to see how: DDPRUN_SIMULATION_SEED=" << seed;
    }
}

TEST(Simulation, HeadsAreLostWhileTheOthersKeepTheirProcesses) {
    if (const char* const seed = std::getenv("DDPRUN_SIMULATION_SEED")) {
        EXPECT_EQ(SimulatedJob(std::strtoull(seed, nullptr, 10), true, Faults::LostHeads).run(), "");
        return;
    }
    for (std::uint64_t seed = 1; seed <= kSchedules / 5; ++seed) {
        const std::string wrong = SimulatedJob(seed, false, Faults::LostHeads).run();
        ASSERT_EQ(wrong, "") << "to see how: DDPRUN_SIMULATION_SEED=" << seed;
    }
}

TEST(Simulation, NodesAreLostAndReplacedWhileTheOthersKeepTheirProcesses) {
    if (const char* const seed = std::getenv("DDPRUN_SIMULATION_SEED")) {
        EXPECT_EQ(SimulatedJob(std::strtoull(seed, nullptr, 10), true, Faults::LostNodes).run(), "");
        return;
    }
    for (std::uint64_t seed = 1; seed <= kSchedules / 10; ++seed) {
        const std::string wrong = SimulatedJob(seed, false, Faults::LostNodes).run();
        ASSERT_EQ(wrong, "") << "to see how: DDPRUN_SIMULATION_SEED=" << seed;
    }
}

}  // namespace
}  // namespace ddprun::test
