#include "launcher/head/controller.h"

#include <fmt/core.h>

#include <signal.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "env/text.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/plan/binding.h"
#include "launcher/plan/head_choice.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"

namespace ddprun {

namespace {

/// Signals of one stop come within this span: PBS's own within milliseconds, one that mpiexec holds back
/// within seconds.
constexpr Duration kOneStop = std::chrono::seconds(5);

/// One cause (a rack, a scheduler) ends several ddprun within this span.
constexpr Duration kOneBlow = std::chrono::milliseconds(100);

/// Missing nodes are first named this long after the wait began, then after pauses that double up to a limit.
constexpr Duration kFirstWaitingLine = std::chrono::seconds(5);
constexpr Duration kLongestWaitingPause = std::chrono::minutes(5);

}  // namespace

Controller::Controller(os::EventLoop& loop, os::Log& log, const JobSpec& spec, ControllerConfig config,
                       Send send, Done done)
    : loop_(loop),
      log_(log),
      spec_(spec),
      config_(std::move(config)),
      done_(std::move(done)),
      policy_{spec_, config_.in_batch_job ? kOneStop : Duration::zero(), config_.random},
      succession_(config_.succession),
      world_(std::move(send)),
      stop_(loop, log, world_, state_, [this] { return world_.size() - static_cast<int>(record_.ended()); }),
      membership_(
          {spec_.nodes.min, spec_.nodes.max, spec_.rendezvous.join_timeout, spec_.rendezvous.last_call,
           config_.terms, !config_.own_instance.empty(), config_.own_host, config_.hosts},
          MonotonicClock::now()),
      begun_(MonotonicClock::now()) {}

Controller::~Controller() {
    loop_.cancel(timer_);
    loop_.cancel(join_timer_);
    loop_.cancel(waiting_line_);
}

void Controller::begin() {
    waiting_since_ = loop_.now();
    loop_.cancel(waiting_line_);
    waiting_line_ = loop_.call_after(kFirstWaitingLine, [this] { log_missing_nodes(kFirstWaitingLine); });
    consider_membership();
}

/// Logs at longer and longer intervals for which nodes the job waits.
void Controller::log_missing_nodes(Duration pause) {
    if (state_.phase != JobState::Phase::Joining) return;
    const TimePoint now = loop_.now();
    log_.info("waiting for {}: {}{}",
              format_duration(std::chrono::round<std::chrono::seconds>(now - waiting_since_)),
              membership_.decide(now).why, membership_.missing_ranks());
    const Duration next = std::min<Duration>(2 * pause, kLongestWaitingPause);
    waiting_line_ = loop_.call_after(next, [this, next] { log_missing_nodes(next); });
}

void Controller::feed(const JobEvent& event) {
    if (event_handler_) event_handler_(event);
    const auto counts = [this] {
        return std::tuple(state_.restarts_used, state_.recovery.recoveries, state_.recovery.longest_start);
    };
    const auto before = counts();
    const std::vector<JobAction> actions = step(state_, event, policy_, MonotonicClock::now());
    if (counts() != before) feed(succession_event::CountChanged{});  // the standby is told first
    for (const JobAction& action : actions) {
        std::visit([this](const auto& one) { perform(one); }, action);
    }
}

void Controller::feed(const SuccessionEvent& event) {
    const SuccessionActions actions = step(succession_, event, state_, MonotonicClock::now());
    for (const auto& [agent, message] : actions.send)
        agent == 0 ? world_.send_all_agents(message) : world_.send(agent, message);
    // Logged after the messages have been sent.
    if (!actions.say.empty()) loop_.post([this, line = actions.say] { log_.info("{}", line); });
    if (!actions.hand_over.empty()) {
        log_.warning("{}", actions.hand_over);
        for (const os::EventLoop::TimerId timer : {timer_, join_timer_, waiting_line_}) loop_.cancel(timer);
        state_.phase = JobState::Phase::Finished;
    }
    if (!actions.overrule.empty()) feed(job_event::Outnumbered{actions.overrule});
    if (actions.tell_end) {
        for (const auto& then : std::exchange(held_endings_, {})) then();
    }
    if (actions.await_nodes) {
        membership_.reopen(MonotonicClock::now(), *actions.await_nodes);
        loop_.post([this] { begin(); });
    }
    if (actions.nobody_comes)
        feed(job_event::JoinFailed{fmt::format(
            "{}; {} of {} nodes are left, and none can come to a job whose nodes the head has started",
            state_.end.failure, membership_.joined(), spec_.nodes.min)});
}

// ---- joining

Status Controller::agent_joined(rdzv::AgentId peer, const rdzv::AgentHello& hello) {
    lose_earlier_session(hello);
    if (finished()) return Error{Errc::Refused, "the job is over", 0};
    if (const std::optional<Error> other = refuse_other_job(hello)) return *other;
    // Only at its beginning does a successor know a generation in which kept workers can go on. A node that
    // was lost before another one got its ranks comes after that node, with ranks of an older generation.
    const bool goes_on = hello.keeps_workers && state_.generation == 0 &&
                         hello.kept_first == first_generation_ && world_.take_kept_ranks(hello);
    if (hello.keeps_workers && !goes_on) {
        ending_[peer] = hello;
        loop_.post([this, peer] { end_kept_workers(peer); });
        return {};
    }
    // A successor takes the head's place 0, because it holds the first rank's port. Workers that go on need
    // no port, and keep their ranks.
    const bool takes_first = hello.kept_place && is_own(hello) && !goes_on;
    const std::optional<int> kept = takes_first ? 0 : hello.kept_place;
    const rdzv::Joiner joiner{hello.host,  hello.pid, hello.node_rank, hello.slots, hello.role,
                              hello.terms, kept,      is_own(hello)};
    if (const Status joined = membership_.join(peer, joiner, MonotonicClock::now()); !joined) return joined;
    world_.connect(peer, hello);
    if (state_.phase != JobState::Phase::Joining) newcomers_.push_back(peer);
    feed(succession_event::Joined{peer, is_own(hello)});
    // Posted: a world formed inside the server's call would be told to agents whose join is not answered yet.
    loop_.post([this] { consider_membership(); });
    return {};
}

/// Refuses a node of another job that uses this endpoint by mistake: two lines of a sweep on the same nodes,
/// without --rdzv-id. Other arguments alone are no proof, because a script may be given its node's number; so
/// they count only for a node without a free place (a spare runs the job's own command), and on a host that
/// has another node of this job.
std::optional<Error> Controller::refuse_other_job(const rdzv::AgentHello& hello) const {
    if (hello.command.empty() || hello.command == config_.command) return std::nullopt;
    const auto twin = std::find_if(world_.agents().begin(), world_.agents().end(), [&](const auto& agent) {
        return agent.second.host == hello.host && agent.second.addresses == hello.addresses &&
               agent.second.command != hello.command;
    });
    const bool is_twin = twin != world_.agents().end(), is_full = membership_.joined() >= spec_.nodes.max;
    if (!is_full && (!is_twin || hello.node_rank)) return std::nullopt;
    const std::string nodes = is_twin ? fmt::format("on {} too (pid {})", hello.host, twin->second.pid)
                                      : fmt::format("with {} nodes", membership_.joined());
    return Error{
        Errc::Mismatch,
        fmt::format("{} (pid {}) runs '{}', but the job '{}' at this endpoint runs '{}', {}: "
                    "give another job an --rdzv-endpoint and an --rdzv-id of its own",
                    hello.host, hello.pid, hello.command, spec_.rendezvous.run_id, config_.command, nodes),
        0};
}

/// Ends the earlier session of a node that joins again, if its loss was not noticed here yet, for example
/// because this process was stopped.
void Controller::lose_earlier_session(const rdzv::AgentHello& hello) {
    if (hello.rejoins.empty()) return;
    const auto earlier = std::find_if(world_.agents().begin(), world_.agents().end(), [&](const auto& agent) {
        return agent.second.instance == hello.rejoins;
    });
    if (earlier != world_.agents().end())
        agent_lost(earlier->first, {Errc::Timeout, "it lost this head and joins again", 0});
}

void Controller::consider_membership() {
    if (state_.phase != JobState::Phase::Joining) return inform_newcomers();
    loop_.cancel(join_timer_);
    const TimePoint now = MonotonicClock::now();
    const rdzv::Verdict verdict = membership_.decide(now);
    switch (verdict.kind) {
        case rdzv::Verdict::Ready: return form_world();
        case rdzv::Verdict::Failed: return feed(job_event::JoinFailed{verdict.why});
        case rdzv::Verdict::Wait:
            join_timer_ = loop_.call_at(membership_.next_change(now), [this] { consider_membership(); });
    }
}

/// Tells nodes that wait beside a running world, and the operator, what they wait for.
void Controller::inform_newcomers() {
    if (const int waiting = membership_.admissible(); waiting != state_.change.waiting_nodes)
        feed(job_event::NodesWaiting{waiting});
    if (newcomers_.empty() || finished()) return;
    const std::string why = what_awaits_newcomers();
    for (const rdzv::AgentId peer : std::exchange(newcomers_, {})) {
        const rdzv::AgentHello* const agent = world_.find(peer);
        if (agent == nullptr) continue;
        log_.info("{} has come: {}", printable(agent->host), why);
        world_.send(peer, rdzv::Waiting{why});
    }
}

std::string Controller::what_awaits_newcomers() const {
    const int most = spec_.nodes.max;
    if (membership_.admissible() == 0)
        return fmt::format(
            "the job runs with all of its {} nodes; a spare, which takes the place of one that goes", most);
    const std::string runs =
        fmt::format("the job runs with {} of up to {} nodes", world_.nodes().size(), most);
    return runs + (state_.phase != JobState::Phase::Running || state_.change.grow_at != kNever
                       ? "; taken in now, in its next generation"
                       : "; taken in when it restarts");
}

void Controller::form_world() {
    job_event::WorldFormed formed;
    for (const rdzv::AgentId peer : world_.form(membership_.settle(), formed)) departing_.insert(peer);
    newcomers_ = membership_.spares();
    log_fabric();
    log_seating();
    feed(std::move(formed));
    inform_newcomers();
}

/// Logs the network between the nodes, and again when other nodes change it.
void Controller::log_fabric() {
    std::vector<NodeFabric> fabrics;
    for (const World::Node& node : world_.nodes()) fabrics.push_back({node.hello.host, node.hello.fabric});
    const FabricVerdict verdict = judge_fabrics(fabrics, config_.fabric);
    if (verdict.line.empty() || verdict.line == logged_fabric_) return;
    logged_fabric_ = verdict.line;
    if (verdict.differs) log_.warning("{}", printable(verdict.line));
    else log_.info("{}", verdict.line);
}

void Controller::log_seating() {
    std::vector<NodeSeats> seats;
    int first_rank = 0;
    for (const World::Node& node : world_.nodes()) {
        seats.push_back({node.hello.host, first_rank, node.hello.seats});
        first_rank += node.hello.slots;
    }
    std::vector<std::string> lines = render_seating(seats);
    if (lines == logged_seating_) return;
    for (const std::string& line : lines) log_.info("{}", printable(line));
    logged_seating_ = std::move(lines);
}

std::string Controller::host_of(rdzv::AgentId peer) const {
    const rdzv::AgentHello* const agent = world_.find(peer);
    return agent == nullptr ? "" : agent->host;
}

std::optional<int> Controller::node_rank_of(rdzv::AgentId peer) const {
    const rdzv::AgentHello* const agent = world_.find(peer);
    return agent == nullptr ? std::nullopt : agent->node_rank;
}

// ---- messages of agents

void Controller::agent_message(rdzv::AgentId peer, const rdzv::StopRequest& request) {
    if (request.preempts) preempt(request.signal, signal_name(request.signal));
    else stop(request.signal, peer);
}

void Controller::agent_message(rdzv::AgentId, const rdzv::RehearsalRequest& request) {
    if (request.generation == state_.generation) feed(job_event::RehearsalDue{});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::Remark& remark) {
    log_.info("{}: {}", printable(host_of(peer)), printable(remark.text));
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkerExited& exited) {
    const int node = world_.node_of(peer);
    const bool is_late = state_.recovery.in_place && exited.generation < state_.generation;
    if (node >= 0 && (exited.generation == state_.generation || is_late)) worker_exited(node, exited);
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkersReady& ready) {
    const int node = world_.node_of(peer);
    if (node >= 0 && ready.generation == state_.generation)
        feed(job_event::NodeReady{node, ready.stage, printable(ready.why), ready.steps});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::GenerationEnded& ended) {
    if (departing_.erase(peer) > 0) return perform(job_action::Dismiss{peer});
    if (auto late = ending_.extract(peer); !late.empty()) {
        late.mapped().keeps_workers = false;
        if (const Status joined = agent_joined(peer, late.mapped()); !joined)
            world_.send(peer, rdzv::Shutdown{static_cast<int>(ExitCode::Unavailable), joined.error().what});
        return;
    }
    const int node = world_.node_of(peer);
    if (node < 0 || ended.generation != state_.generation) return;
    record_.note(ended.notes);
    feed(job_event::NodeEnded{node});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::StepsDone& done) {
    const int node = world_.node_of(peer);
    if (node < 0 || done.generation != state_.generation) return;
    stop_.feed(stop_event::Answered{node, done.step, done.listens, done.highest});
}

void Controller::worker_exited(int node, const rdzv::WorkerExited& report) {
    const bool is_early = stopped_early({.signaled = report.signaled, .status = report.status});
    if (report.failed() && !is_early)
        stop_.feed(stop_event::Broken{fmt::format("rank {} has failed", report.rank)});
    // After a request to stop, a worker that exits with 0 or 75 has saved, not finished: the scheduler may
    // have signalled it before we did.
    const bool has_saved = (state_.end.stopped_by || state_.end.preempted) && (!report.failed() || is_early);
    const std::string& host = world_.nodes()[static_cast<std::size_t>(node)].hello.host;
    const WorkerEnd& end = record_.add(report, node, host, has_saved);
    const FailureFacts facts = record_.facts_of(end);
    if (record_.precedes_known_failure(end, state_))
        log_.warning("root cause, after all: {}; its error report is older than the first exit",
                     one_line(end));
    // In the last generation it may have had another rank.
    const bool is_late = report.generation < state_.generation;
    const auto first_rank = [&] { return world_.describe()[static_cast<std::size_t>(node)].first_rank; };
    const int rank = is_late ? first_rank() + report.local_rank : end.rank;
    feed(job_event::WorkerEnded{node, rank, facts, end.failed() && !has_saved, end.by_us, one_line(end),
                                report.steps, is_late, report.never_joined});
    if (state_.recovery.in_place) record_.answer_ends();
}

/// How long other nodes may be noticed as lost by the same cause. Nodes behind one broken cable fall silent
/// together, but time out one by one, within a heartbeat's interval.
Duration Controller::others_may_follow(const Error& why) const {
    return why.code == Errc::Timeout ? kOneBlow + heartbeats_of(spec_.rendezvous).interval : kOneBlow;
}

void Controller::agent_lost(rdzv::AgentId peer, const Error& why) {
    ending_.erase(peer);
    const std::optional<rdzv::AgentHello> gone = world_.disconnect(peer);
    if (!gone) return;
    departing_.erase(peer);
    const std::string& host = gone->host;
    const bool was_finished = finished();
    if (!was_finished) membership_.leave(peer, MonotonicClock::now());
    using Lost = succession_event::Lost;
    feed(Lost{peer, gone->instance, why.code == Errc::Timeout ? Lost::Silent : Lost::Closed});
    if (was_finished) return;
    const int node = world_.node_of(peer);
    if (node < 0) {
        log_.info("node {}: {}", printable(host), why.what);
    } else {
        if (!state_.end.stopped_by) record_.lose_host(host);
        stop_.feed(stop_event::Broken{fmt::format("node {} is lost", host)});
        feed(job_event::NodeLost{node, fmt::format("node {}: {}", host, why.what), membership_.has_enough(),
                                 others_may_follow(why)});
    }
    loop_.post([this] { consider_membership(); });
}

// ---- requests of the operator

void Controller::stop(int signal, rdzv::AgentId source) {
    if (departing_.erase(source) > 0) return perform(job_action::Dismiss{source});  // it kills its workers
    const bool is_leave = signal == SIGTERM && membership_.contains(source) && membership_.can_spare_one();
    const auto ask = [this, signal, source, is_leave] {
        feed(job_event::StopAsked{signal, source, world_.node_of(source), host_of(source), is_leave});
    };
    is_leave ? ask() : without_successor(ask);
}
void Controller::preempt(int signal, const std::string& why, std::optional<Duration> left) {
    without_successor([this, signal, why, left] { feed(job_event::PreemptAsked{signal, why, left}); });
}
void Controller::hang_found(const std::string& what, int culprit, bool was_asked) {
    feed(job_event::HangFound{what, culprit, was_asked});
}
bool Controller::can_replace_hanging_rank() const {
    return decide_on_hang(state_, policy_, MonotonicClock::now()).in_place;
}
void Controller::walltime_known(TimePoint time_up) { feed(job_event::WalltimeKnown{time_up}); }

void Controller::forward(int signal) { world_.broadcast(rdzv::ForwardSignal{signal}); }

// ---- actions

void Controller::perform(const job_action::StartGeneration& action) {
    stop_.begin_generation();
    record_.begin_generation();
    rdzv::StartGeneration order;
    order.generation = action.generation;
    order.restart_count = action.restart_count;
    begin_generation(std::move(order));
}

void Controller::perform(const job_action::Recover& action) {
    rdzv::StartGeneration order;
    order.generation = action.generation;
    order.restart_count = action.restart_count;
    order.in_place = true;
    order.failed_rank = action.failed_rank;
    order.start_limit_ns = (2 * state_.recovery.longest_start).count();
    begin_generation(std::move(order));
}

void Controller::perform(const job_action::Reform&) {
    if (!membership_.has_enough()) return feed(job_event::NodesMissing{});
    membership_.reopen(MonotonicClock::now(), spec_.rendezvous.join_timeout);
    form_world();
}

void Controller::perform(const job_action::Recovered& action) {
    record_.recovered();
    if (action.cause.empty())
        log_.debug("rehearsal: all ranks met again after {}", format_duration(action.took));
    else if (recovered_handler_) recovered_handler_(action);
}

/// Sends the order to all nodes, each with its own ranks.
void Controller::begin_generation(rdzv::StartGeneration order) {
    const std::uint64_t generation = order.generation;
    if (!order.in_place) first_generation_ = generation;
    order.first_generation = first_generation_;
    if (generation_handler_) generation_handler_(generation);
    const Result<MasterAddress> master = config_.master(world_.nodes().front().hello);
    if (!master) return give_up(master.error().what);
    const Result<std::vector<rdzv::StartGeneration>> all = world_.orders(std::move(order), *master);
    if (!all) return give_up(all.error().what);
    log_.set_generation(generation);
    std::vector<rdzv::AgentId> agents;
    for (std::size_t i = 0; i < all->size(); ++i) {
        agents.push_back(world_.nodes()[i].peer);
        world_.send(agents.back(), (*all)[i]);
    }
    feed(succession_event::GenerationBegan{std::move(agents)});
}

// ---- succession

/// Calls `then` once no agent can take itself for the standby.
void Controller::without_successor(std::function<void()> then) {
    held_endings_.push_back(std::move(then));
    feed(succession_event::JobEnds{});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::StandbyListens& listens) {
    const rdzv::AgentHello* const agent = world_.find(peer);  // the agent may have left in the meantime
    if (agent == nullptr) return;
    feed(succession_event::StandbyListens{peer, {agent->host, agent->addresses, listens.port}});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkersStarted& started) {
    const int node = world_.node_of(peer);
    if (node < 0 || started.generation != state_.generation) return;
    feed(succession_event::Confirmed{});
    feed(job_event::NodeReady{node, rdzv::WorkerStage::Started});
}

std::vector<std::pair<rdzv::AgentId, Error>> Controller::succeed(
    JobState state, const std::vector<std::pair<rdzv::AgentId, rdzv::AgentHello>>& agents,
    const std::string& why) {
    begin();
    std::vector<std::pair<rdzv::AgentId, Error>> refused;
    for (const auto& [peer, hello] : agents)
        first_generation_ = std::max(first_generation_, hello.kept_first);
    for (const auto& [peer, hello] : agents) {
        if (const Status joined = agent_joined(peer, hello); !joined)
            refused.emplace_back(peer, joined.error());
    }
    state_ = std::move(state);
    for (const auto& [peer, hello] : agents)
        catch_up(state_, hello.kept_generation, hello.kept_restarts, MonotonicClock::now());
    record_.take_over(state_);
    log_.set_generation(state_.generation);
    // From now on the workers that wait for the next generation do so under a number of this controller.
    const auto lost = static_cast<int>(world_.adopt_kept(state_));
    world_.broadcast(rdzv::SuspendGeneration{state_.generation, 0, why});
    feed(job_event::NodeLost{lost, why, membership_.has_enough()});
    return refused;
}

/// Stops workers that were kept for a generation in which they cannot go on: their node was late, or all
/// workers have been started again without it.
void Controller::end_kept_workers(rdzv::AgentId peer) {
    if (!ending_.contains(peer)) return;
    const std::string why = "the others go on without them";
    world_.send(peer, rdzv::SuspendGeneration{state_.generation, 0, why});
    world_.send(peer,
                rdzv::StopGeneration{state_.generation, SIGTERM, policy_.failure_grace().count(), 0, why});
}

/// Ends the job because this process cannot start a generation.
void Controller::give_up(const std::string& why) {
    state_.end.failure = why;
    state_.phase = JobState::Phase::Finished;
    perform(job_action::Finish{});
}

void Controller::perform(const job_action::StopGeneration& action) {
    record_.stop_generation(action.failed_rank >= 0);
    stop_.perform(action);
}

void Controller::perform(const job_action::KillGeneration&) {
    stop_.feed(stop_event::Broken{"the workers are killed"});
    world_.broadcast(rdzv::StopGeneration{state_.generation, SIGKILL, 0, -1, ""});
}

void Controller::perform(const job_action::NodeLeaves& action) {
    membership_.leave(action.source, MonotonicClock::now());
    feed(succession_event::Leaves{action.source});
}

void Controller::perform(const job_action::Dismiss& action) {
    const std::optional<rdzv::AgentHello> gone = world_.disconnect(action.source);
    if (!gone) return;
    world_.send(action.source, rdzv::Shutdown{static_cast<int>(ExitCode::TryAgain),
                                              "this node has left the job after SIGTERM"});
    feed(succession_event::Lost{action.source, gone->instance, succession_event::Lost::Dismissed});
}

void Controller::perform(const job_action::SetTimer& action) {
    loop_.cancel(timer_);
    timer_ = 0;
    if (action.when != kNever) timer_ = loop_.call_at(action.when, [this] { feed(job_event::TimerFired{}); });
}

void Controller::perform(const job_action::Say& action) {
    if (action.warning) log_.warning("{}", action.text);
    else log_.info("{}", action.text);
}

void Controller::perform(const job_action::Finish&) {
    if (const std::string line = describe_rehearsals(state_, spec_.recover); !line.empty())
        log_.info("{}", line);
    without_successor([this] {
        const JobEnd how = end();
        const rdzv::Shutdown shutdown{exit_code(how),
                                      how.failure};  // made once: exit_code() looks at all workers' ends
        world_.send_all_agents(shutdown);
        done_();
    });
}

JobEnd Controller::end() const {
    JobEnd end = record_.end(state_);
    end.run_id = spec_.rendezvous.run_id;
    end.program = config_.program;
    end.max_restarts = spec_.restart.max_restarts;
    end.world_size = world_.size();
    end.wall = MonotonicClock::now() - begun_;
    return end;
}

}  // namespace ddprun
