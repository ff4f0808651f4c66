#include "launcher/head/controller.h"

#include <fmt/core.h>

#include <signal.h>

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "env/text.h"
#include "launcher/ends/explain.h"
#include "launcher/head/succession.h"
#include "launcher/machine/fabric/fabric.h"
#include "launcher/plan/binding.h"
#include "launcher/plan/head_choice.h"
#include "launcher/spec/exit_codes.h"
#include "launcher/spec/signals.h"
#include "rendezvous/serve/rank_table.h"

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

WorkerEnd end_of(const rdzv::WorkerExited& report, int node, const std::string& host, std::uint64_t order) {
    WorkerEnd end{report, node, host, MonotonicClock::now(), std::nullopt, order};
    if (report.error_age_ns >= 0) end.error_reported = end.ended - Duration(report.error_age_ns);
    if (end.meaning.empty()) end.meaning = explain_end(end);
    return end;
}

/// The next announcement of a countdown: 1, 2, 3, 5, 10 and every 30 s before the end; 0: none is left.
std::chrono::seconds countdown_mark_below(std::chrono::seconds left) {
    if (left.count() > 30) return std::chrono::seconds((left.count() - 1) / 30 * 30);
    std::chrono::seconds best(0);
    for (const int mark : {1, 2, 3, 5, 10}) {
        if (left.count() > mark) best = std::chrono::seconds(mark);
    }
    return best;
}

CommittedTime committed_by(const std::vector<WorkerEnd>& ends) {
    CommittedTime most;
    for (const WorkerEnd& end : ends) {
        if (end.commits >= 0) most.raise_to({end.steps, end.commits, Duration(end.useful_ns)});
    }
    return most;
}

std::string one_line(const WorkerEnd& end) {
    return fmt::format("rank {} on {}, {}", end.rank, end.host, describe_end(end));
}

}  // namespace

Controller::Controller(os::EventLoop& loop, os::Log& log, const JobSpec& spec, ControllerConfig config,
                       Send send, Done done)
    : loop_(loop),
      log_(log),
      spec_(spec),
      config_(std::move(config)),
      send_(std::move(send)),
      done_(std::move(done)),
      policy_{spec_, config_.in_batch_job ? kOneStop : Duration::zero(), config_.random},
      succession_(config_.succession),
      membership_(
          {spec_.nodes.min, spec_.nodes.max, spec_.rendezvous.join_timeout, spec_.rendezvous.last_call,
           config_.terms, !config_.own_instance.empty(), config_.own_host, config_.hosts},
          MonotonicClock::now()),
      begun_(MonotonicClock::now()) {}

Controller::~Controller() {
    loop_.cancel(timer_);
    loop_.cancel(join_timer_);
    loop_.cancel(agreement_timer_);
    loop_.cancel(countdown_);
    loop_.cancel(waiting_line_);
}

void Controller::begin() {
    waiting_since_ = loop_.now();
    loop_.cancel(waiting_line_);
    waiting_line_ = loop_.call_after(kFirstWaitingLine, [this] { say_who_is_missing(kFirstWaitingLine); });
    consider_membership();
}

/// Logs at longer and longer intervals for which nodes the job waits.
void Controller::say_who_is_missing(Duration pause) {
    if (state_.phase != JobState::Phase::Joining) return;
    const TimePoint now = loop_.now();
    log_.info("waiting for {}: {}{}",
              format_duration(std::chrono::round<std::chrono::seconds>(now - waiting_since_)),
              membership_.decide(now).why, membership_.missing_ranks());
    const Duration next = std::min<Duration>(2 * pause, kLongestWaitingPause);
    waiting_line_ = loop_.call_after(next, [this, next] { say_who_is_missing(next); });
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
    for (const auto& [agent, message] : actions.send) {
        if (agent != 0) send_(agent, message);
        for (const auto& [peer, hello] : agents_) {
            if (agent == 0) send_(peer, message);
        }
    }
    // Logged after the messages have been sent.
    if (!actions.say.empty()) loop_.post([this, line = actions.say] { log_.info("{}", line); });
    if (!actions.hand_over.empty()) {
        log_.warning("{}", actions.hand_over);
        for (const os::EventLoop::TimerId timer : {timer_, join_timer_, waiting_line_}) loop_.cancel(timer);
        state_.phase = JobState::Phase::Finished;
    }
    if (!actions.overrule.empty()) feed(job_event::Outnumbered{actions.overrule});
    if (actions.tell_end) {
        for (const auto& then : std::exchange(ends_to_tell_, {})) then();
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
    // Only at its beginning does a successor know a generation in which kept workers can go on.
    const bool goes_on =
        hello.keeps_workers && state_.generation == 0 && hello.kept_first == first_generation_;
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
    agents_[peer] = hello;
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
    const auto twin = std::find_if(agents_.begin(), agents_.end(), [&](const auto& agent) {
        return agent.second.host == hello.host && agent.second.addresses == hello.addresses &&
               agent.second.command != hello.command;
    });
    const bool is_twin = twin != agents_.end(), is_full = membership_.joined() >= spec_.nodes.max;
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
    const auto earlier = std::find_if(agents_.begin(), agents_.end(), [&](const auto& agent) {
        return agent.second.instance == hello.rejoins;
    });
    if (earlier != agents_.end())
        agent_lost(earlier->first, {Errc::Timeout, "it lost this head and joins again", 0});
}

void Controller::consider_membership() {
    if (state_.phase != JobState::Phase::Joining) return tell_newcomers();
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
void Controller::tell_newcomers() {
    if (const int waiting = membership_.admissible(); waiting != state_.change.waiting_nodes)
        feed(job_event::NodesWaiting{waiting});
    if (newcomers_.empty() || finished()) return;
    const std::string why = what_awaits_newcomers();
    for (const rdzv::AgentId peer : std::exchange(newcomers_, {})) {
        const auto agent = agents_.find(peer);
        if (agent == agents_.end()) continue;
        log_.info("{} has come: {}", printable(agent->second.host), why);
        send_(peer, rdzv::Notice{"waiting", why});
    }
}

std::string Controller::what_awaits_newcomers() const {
    const int most = spec_.nodes.max;
    if (membership_.admissible() == 0)
        return fmt::format(
            "the job runs with all of its {} nodes; a spare, which takes the place of one that goes", most);
    const std::string runs = fmt::format("the job runs with {} of up to {} nodes", nodes_.size(), most);
    return runs + (state_.phase != JobState::Phase::Running || state_.change.grow_at != kNever
                       ? "; taken in now, in its next generation"
                       : "; taken in when it restarts");
}

void Controller::form_world() {
    nodes_.clear();
    const std::unordered_map<rdzv::AgentId, int> before = std::exchange(group_ranks_, {});
    job_event::WorldFormed world;
    for (const rdzv::Membership::Member& member : membership_.settle()) {
        group_ranks_.emplace(member.agent, static_cast<int>(nodes_.size()));
        nodes_.push_back({member.agent, agents_.at(member.agent), member.place});
        const auto known = before.find(member.agent);
        world.workers.push_back(nodes_.back().hello.slots);
        world.before.push_back(known == before.end() ? -1 : known->second);
    }
    for (const auto& [peer, node] : before) {
        if (agents_.contains(peer) && !group_ranks_.contains(peer)) departing_.insert(peer);
    }
    newcomers_ = membership_.spares();
    say_what_connects();
    say_who_sits_where();
    feed(std::move(world));
    tell_newcomers();
}

/// Logs the network between the nodes, and again when other nodes change it.
void Controller::say_what_connects() {
    std::vector<NodeFabric> fabrics;
    for (const Node& node : nodes_) fabrics.push_back({node.hello.host, node.hello.fabric});
    const FabricVerdict verdict = judge_fabrics(fabrics, config_.fabric);
    if (verdict.line.empty() || verdict.line == said_of_fabric_) return;
    said_of_fabric_ = verdict.line;
    if (verdict.differs) log_.warning("{}", printable(verdict.line));
    else log_.info("{}", verdict.line);
}

void Controller::say_who_sits_where() {
    std::vector<NodeSeats> seats;
    int first_rank = 0;
    for (const Node& node : nodes_) {
        seats.push_back({node.hello.host, first_rank, node.hello.seats});
        first_rank += node.hello.slots;
    }
    std::vector<std::string> lines = render_seating(seats);
    if (lines == said_of_seats_) return;
    for (const std::string& line : lines) log_.info("{}", printable(line));
    said_of_seats_ = std::move(lines);
}

int Controller::world_size() const {
    int size = 0;
    for (const Node& node : nodes_) size += node.hello.slots;
    return size;
}

int Controller::node_of(rdzv::AgentId peer) const {
    const auto found = group_ranks_.find(peer);
    return found == group_ranks_.end() ? -1 : found->second;
}

std::vector<WorldNode> Controller::world() const {
    std::vector<WorldNode> world;
    int first_rank = 0;  // ranks are counted through the nodes in order, see RankTable
    for (const Node& node : nodes_) {
        world.push_back(
            {node.peer, node.hello.host, first_rank, node.hello.slots, agents_.contains(node.peer)});
        first_rank += node.hello.slots;
    }
    return world;
}

std::string Controller::host_of(rdzv::AgentId peer) const {
    const auto agent = agents_.find(peer);
    return agent == agents_.end() ? "" : agent->second.host;
}

std::optional<int> Controller::node_rank_of(rdzv::AgentId peer) const {
    const auto agent = agents_.find(peer);
    return agent == agents_.end() ? std::nullopt : agent->second.node_rank;
}

// ---- messages of agents

void Controller::agent_message(rdzv::AgentId peer, const rdzv::Notice& notice) {
    const int signal = static_cast<int>(parse_int(notice.text).value_or(15));
    if (notice.kind == "preempt") preempt(signal, signal_name(signal));
    else if (notice.kind == "stop") stop(signal, peer);
    else if (notice.kind == "rehearse" && notice.text == std::to_string(state_.generation))
        feed(job_event::RehearsalDue{});
    else if (notice.kind == "remark") log_.info("{}: {}", printable(host_of(peer)), printable(notice.text));
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkerExited& exited) {
    const int node = node_of(peer);
    const bool is_late = state_.recovery.in_place && exited.generation < state_.generation;
    if (node >= 0 && (exited.generation == state_.generation || is_late)) worker_exited(node, exited);
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkersReady& ready) {
    using Stage = job_event::NodeReady::Stage;
    const int node = node_of(peer);
    if (node < 0 || ready.generation != state_.generation) return;
    for (const auto& [name, stage] :
         {std::pair{"announced", Stage::Announced}, std::pair{"joined", Stage::Joined},
          std::pair{"finished", Stage::Finished}, std::pair{"suspended", Stage::Suspended},
          std::pair{"let-go", Stage::LetGo}, std::pair{"failing", Stage::Failing},
          std::pair{"slow", Stage::Slow}, std::pair{"refused", Stage::Refused}}) {
        if (ready.stage == name) feed(job_event::NodeReady{node, stage, printable(ready.why), ready.steps});
    }
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::GenerationEnded& ended) {
    if (departing_.erase(peer) > 0) return perform(job_action::Dismiss{peer});
    if (auto late = ending_.extract(peer); !late.empty()) {
        late.mapped().keeps_workers = false;
        if (const Status joined = agent_joined(peer, late.mapped()); !joined)
            send_(peer, rdzv::Shutdown{static_cast<int>(ExitCode::Unavailable), joined.error().what});
        return;
    }
    const int node = node_of(peer);
    if (node < 0 || ended.generation != state_.generation) return;
    notes_.insert(notes_.end(), ended.notes.begin(), ended.notes.end());
    feed(job_event::NodeEnded{node});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::StepsDone& done) {
    const int node = node_of(peer);
    if (node < 0 || done.generation != state_.generation) return;
    feed(stop_event::Answered{node, done.step, done.listens, done.highest});
}

void Controller::worker_exited(int node, const rdzv::WorkerExited& report) {
    const bool is_early = stopped_early({.signaled = report.signaled, .status = report.status});
    if (report.failed() && !is_early)
        feed(stop_event::Broken{fmt::format("rank {} has failed", report.rank)});
    ends_.push_back(end_of(report, node, nodes_[static_cast<std::size_t>(node)].hello.host, ++order_));
    // After a request to stop, a worker that exits with 0 or 75 has saved, not finished: the scheduler may
    // have signalled it before we did.
    const bool has_saved = (state_.end.stopped_by || state_.end.preempted) && (!report.failed() || is_early);
    if (has_saved) ends_.back().by_us = true;
    const WorkerEnd& end = ends_.back();
    // A worker that does not count its steps is taken to have made progress.
    const bool progressed = report.steps < 0 || report.steps > steps_before_;
    if (end.failed() && !end.by_us) steps_before_ = std::max(steps_before_, report.steps);
    const FailureFacts facts{!end.exec_failure.empty(), end.signaled, end.status, progressed, end.meaning};
    if (was_the_cause_all_along(end))
        log_.warning("root cause, after all: {}; its error report is older than the first exit",
                     one_line(end));
    // In the last generation it may have had another rank.
    const bool is_late = report.generation < state_.generation;
    const int rank =
        is_late ? world()[static_cast<std::size_t>(node)].first_rank + report.local_rank : end.rank;
    feed(job_event::WorkerEnded{node, rank, facts, end.failed() && !has_saved, end.by_us, one_line(end),
                                report.steps, is_late, report.never_joined});
    if (!state_.recovery.in_place) return;
    std::ranges::move(ends_, std::back_inserter(answered_ends_));
    ends_.clear();
}

/// True when this end of a worker, reported after a failure, came before it and is another failure than the
/// logged one. All ends are searched only when this one can be the cause: a large job has many.
bool Controller::was_the_cause_all_along(const WorkerEnd& end) {
    if (end.by_us || !end.error_reported || *end.error_reported >= oldest_report_) return false;
    oldest_report_ = *end.error_reported;
    const bool after_a_failure =
        state_.phase == JobState::Phase::Stopping && !state_.end.stopped_by && !state_.end.preempted;
    if (!after_a_failure || root_cause(ends_, state_.end.failure_decided) != &end) return false;
    // An exception that all ranks throw is logged once, whichever rank was the first.
    const WorkerEnd* told = root_cause(std::span(ends_).first(ends_.size() - 1), state_.end.failure_decided);
    return told == nullptr || !failed_alike(*told, end);
}

/// How long other nodes may be noticed as lost by the same cause. Nodes behind one broken cable fall silent
/// together, but time out one by one, within a heartbeat's interval.
Duration Controller::others_may_follow(const Error& why) const {
    return why.code == Errc::Timeout ? kOneBlow + heartbeats_of(spec_.rendezvous).interval : kOneBlow;
}

void Controller::agent_lost(rdzv::AgentId peer, const Error& why) {
    ending_.erase(peer);
    const auto gone = agents_.extract(peer);
    if (gone.empty()) return;
    departing_.erase(peer);
    const std::string& host = gone.mapped().host;
    const bool was_finished = finished();
    if (!was_finished) membership_.leave(peer, MonotonicClock::now());
    using Lost = succession_event::Lost;
    feed(Lost{peer, gone.mapped().instance, why.code == Errc::Timeout ? Lost::Silent : Lost::Closed});
    if (was_finished) return;
    const int node = node_of(peer);
    if (node < 0) {
        log_.info("node {}: {}", printable(host), why.what);
    } else {
        if (!state_.end.stopped_by) lost_hosts_.push_back(host);
        feed(stop_event::Broken{fmt::format("node {} is lost", host)});
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
        feed(job_event::StopAsked{signal, source, node_of(source), host_of(source), is_leave});
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

void Controller::forward(int signal) { broadcast(rdzv::Notice{"signal", std::to_string(signal)}); }

// ---- actions

void Controller::perform(const job_action::StartGeneration& action) {
    agreement_ = {};  // of workers that have all ended
    agreed_step_ = 0;
    held_stop_.reset();
    committed_.push_back(committed_by(ends_));
    ends_.clear();
    answered_ends_.clear();
    oldest_report_ = TimePoint::max();
    notes_.clear();
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

void Controller::perform(const job_action::Suspend& action) {
    const rdzv::SuspendGeneration suspend{state_.generation, action.failed_rank, action.why};
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (agents_.contains(nodes_[i].peer) && !state_.nodes[i].leaving) send_(nodes_[i].peer, suspend);
    }
}

void Controller::perform(const job_action::StopNode& action) {
    const WorldNode node = world()[static_cast<std::size_t>(action.node)];
    // Nobody answers its workers' collectives any more.
    const rdzv::StopGeneration stop{state_.generation, SIGTERM, action.grace.count(), node.first_rank,
                                    action.why};
    if (node.is_connected) send_(node.agent, stop);
}

void Controller::perform(const job_action::EndCollectives& action) {
    broadcast(rdzv::Notice{"lost", std::to_string(action.lost_rank)});
}

void Controller::perform(const job_action::EndJoining& action) {
    broadcast(rdzv::Notice{"absent", std::to_string(action.absent_rank)});
}

void Controller::perform(const job_action::Reform&) {
    if (!membership_.has_enough()) return feed(job_event::NodesMissing{});
    membership_.reopen(MonotonicClock::now(), spec_.rendezvous.join_timeout);
    form_world();
}

void Controller::perform(const job_action::Recovered& action) {
    answered_ends_.clear();
    oldest_report_ = TimePoint::max();
    if (action.cause.empty())
        log_.debug("rehearsal: all ranks met again after {}", format_duration(action.took));
    else if (recovered_handler_) recovered_handler_(action);
}

void Controller::perform(const job_action::Release&) { broadcast(rdzv::Release{state_.generation}); }

void Controller::perform(const job_action::KillRank& action) {
    for (const WorldNode& node : world()) {
        if (action.rank >= node.first_rank && action.rank < node.first_rank + node.workers &&
            node.is_connected)
            send_(node.agent, rdzv::Notice{"kill", fmt::format("{} {}", action.rank, action.why)});
    }
}

/// Sends the order to all nodes, each with its own ranks.
void Controller::begin_generation(rdzv::StartGeneration order) {
    const std::uint64_t generation = order.generation;
    if (!order.in_place) first_generation_ = generation;
    order.first_generation = first_generation_;
    if (generation_handler_) generation_handler_(generation);
    const Result<MasterAddress> master = config_.master(nodes_.front().hello);
    if (!master) return give_up(master.error().what);
    const Result<std::vector<rdzv::StartGeneration>> all = orders(std::move(order), *master);
    if (!all) return give_up(all.error().what);
    log_.set_generation(generation);
    for (std::size_t i = 0; i < nodes_.size(); ++i) send_(nodes_[i].peer, (*all)[i]);
    std::vector<rdzv::AgentId> world;
    for (const Node& node : nodes_) world.push_back(node.peer);
    feed(succession_event::GenerationBegan{std::move(world)});
}

// ---- succession

/// Calls `then` once no agent can take itself for the standby.
void Controller::without_successor(std::function<void()> then) {
    ends_to_tell_.push_back(std::move(then));
    feed(succession_event::JobEnds{});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::StandbyListens& listens) {
    const auto agent = agents_.find(peer);  // the agent may have left in the meantime
    if (agent == agents_.end()) return;
    feed(succession_event::StandbyListens{peer, {agent->second.host, agent->second.addresses, listens.port}});
}

void Controller::agent_message(rdzv::AgentId peer, const rdzv::WorkersStarted& started) {
    const int node = node_of(peer);
    if (node < 0 || started.generation != state_.generation) return;
    feed(succession_event::Confirmed{});
    feed(job_event::NodeReady{node, job_event::NodeReady::Stage::Started});
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
    steps_before_ = state_.history.furthest_step;
    log_.set_generation(state_.generation);
    const int lost = adopt_workers(why);
    feed(job_event::NodeLost{lost, why, membership_.has_enough()});
    return refused;
}

/// Takes over the nodes of the lost head's world, if workers wait there for the next generation. From now on
/// they do so under a number of this controller. Returns the number of the lost head's node.
int Controller::adopt_workers(const std::string& why) {
    for (const auto& [peer, hello] : agents_) {
        if (hello.keeps_workers) nodes_.push_back({peer, hello, hello.kept_place.value_or(0)});
    }
    if (nodes_.empty()) return 0;
    std::ranges::stable_sort(nodes_, {}, &Node::place);
    std::vector<KeptNode> kept;
    for (const Node& node : nodes_) kept.push_back({node.hello.kept_first_rank, node.hello.slots});
    const std::size_t lost = adopt(state_, kept);
    nodes_.insert(nodes_.begin() + static_cast<std::ptrdiff_t>(lost), Node{});
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (i != lost) group_ranks_.emplace(nodes_[i].peer, static_cast<int>(i));
    }
    broadcast(rdzv::SuspendGeneration{state_.generation, 0, why});
    return static_cast<int>(lost);
}

/// Stops workers that were kept for a generation in which they cannot go on: their node was late, or all
/// workers have been started again without it.
void Controller::end_kept_workers(rdzv::AgentId peer) {
    if (!ending_.contains(peer)) return;
    const std::string why = "the others go on without them";
    send_(peer, rdzv::SuspendGeneration{state_.generation, 0, why});
    send_(peer, rdzv::StopGeneration{state_.generation, SIGTERM, policy_.failure_grace().count(), 0, why});
}

/// Ends the job because this process cannot start a generation.
void Controller::give_up(const std::string& why) {
    state_.end.failure = why;
    state_.phase = JobState::Phase::Finished;
    perform(job_action::Finish{});
}

Result<std::vector<rdzv::StartGeneration>> Controller::orders(rdzv::StartGeneration order,
                                                              const MasterAddress& master) const {
    std::vector<rdzv::NodeSlots> members;
    for (const Node& node : nodes_) members.push_back({node.hello.host, node.hello.slots, node.hello.role});
    const Result<rdzv::RankTable> table = rdzv::RankTable::from(std::move(members));
    if (!table) return table.error();

    order.group_world_size = table->nodes();
    order.world_size = table->world_size();
    order.master_addr = master.host;
    order.master_port = master.port;
    order.agent_store = master.is_store;

    std::vector<rdzv::StartGeneration> all;
    for (int i = 0; i < table->nodes(); ++i) {
        const rdzv::NodeRanks& ranks = table->node(i);
        order.group_rank = ranks.group_rank;
        order.place = nodes_[static_cast<std::size_t>(i)].place;
        order.first_rank = ranks.first_rank;
        order.local_world_size = ranks.local_world_size;
        order.role_first_rank = ranks.role_first_rank;
        order.role_world_size = ranks.role_world_size;
        all.push_back(order);
    }
    return all;
}

void Controller::broadcast(const rdzv::ToAgent& message) {
    for (const Node& node : nodes_) {
        if (agents_.contains(node.peer)) send_(node.peer, message);
    }
}

void Controller::perform(const job_action::StopGeneration& action) {
    // A stop that nobody's failure caused is not to be explained by a failure that was being recovered.
    if (action.failed_rank >= 0) ends_.insert(ends_.begin(), answered_ends_.begin(), answered_ends_.end());
    answered_ends_.clear();
    if (agreement_.phase != StopAgreement::Phase::Closed && !held_stop_) {
        held_stop_.emplace(action, MonotonicClock::now());
        return;
    }
    feed(stop_event::Broken{action.why});
    // Workers that meet again, to save, have agreed already.
    send_stop(action, action.failed_rank < 0 ? agreed_step_ : 0);
}

/// `stop_at`: the agreed step, after which the workers stop without a signal.
void Controller::send_stop(const job_action::StopGeneration& action, std::uint64_t stop_at) {
    broadcast(rdzv::StopGeneration{state_.generation, stop_at > 0 ? 0 : action.signal, action.grace.count(),
                                   action.failed_rank, action.why, stop_at});
    // The operator waits after a signal, not after a failure.
    if (action.failed_rank < 0 && state_.end.stopped_by)
        count_down(deadline_after(MonotonicClock::now(), action.grace));
}

/// Logs the time that is left of a grace at the moments of countdown_mark_below().
void Controller::count_down(TimePoint end) {
    loop_.cancel(countdown_);
    const auto left = std::chrono::round<std::chrono::seconds>(end - MonotonicClock::now());
    const std::chrono::seconds mark = countdown_mark_below(left);
    if (mark <= std::chrono::seconds(0)) return;
    countdown_ = loop_.call_at(end - mark, [this, end, mark] {
        if (state_.phase != JobState::Phase::Stopping || state_.end.killing) return;
        log_.info("{} workers are still running; SIGKILL in {} s",
                  world_size() - static_cast<int>(ends_.size()), mark.count());
        count_down(end);
    });
}

void Controller::perform(const job_action::KillGeneration&) {
    feed(stop_event::Broken{"the workers are killed"});
    for (const Node& node : nodes_) kill(node);
}

void Controller::perform(const job_action::KillNode& action) {
    kill(nodes_[static_cast<std::size_t>(action.node)]);
}

void Controller::kill(const Node& node) {
    if (agents_.contains(node.peer))
        send_(node.peer, rdzv::StopGeneration{state_.generation, SIGKILL, 0, -1, ""});
}

void Controller::perform(const job_action::NodeLeaves& action) {
    membership_.leave(action.source, MonotonicClock::now());
    feed(succession_event::Leaves{action.source});
}

void Controller::perform(const job_action::Dismiss& action) {
    const auto gone = agents_.extract(action.source);
    if (gone.empty()) return;
    send_(action.source,
          rdzv::Shutdown{static_cast<int>(ExitCode::TryAgain), "this node has left the job after SIGTERM"});
    feed(succession_event::Lost{action.source, gone.mapped().instance, succession_event::Lost::Dismissed});
}

void Controller::perform(const job_action::NotifyPreempt& action) {
    std::vector<int> with_workers;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (!state_.nodes[i].ended && !state_.nodes[i].lost) with_workers.push_back(static_cast<int>(i));
    }
    stop_why_ = action.why;
    agreed_step_ = 0;
    feed(stop_event::Noticed{std::move(with_workers), action.time});
}

// ---- the agreed stop

void Controller::feed(const StopEvent& event) {
    const StopActions actions = step(agreement_, event, MonotonicClock::now());
    loop_.cancel(agreement_timer_);
    agreement_timer_ = 0;
    if (agreement_.deadline != kNever)
        agreement_timer_ = loop_.call_at(agreement_.deadline, [this] { feed(stop_event::TimerFired{}); });
    if (actions.propose) broadcast(rdzv::StopProposal{state_.generation, *actions.propose, stop_why_});
    if (actions.decide) decide_stop(*actions.decide);
}

void Controller::decide_stop(const StopActions::Decision& decision) {
    if (!decision.why.empty())
        log_.warning("the workers have not agreed on the step after which they stop: {}", decision.why);
    agreed_step_ = decision.step;
    if (decision.step > 0) log_.info("all workers stop after step {}", decision.step);
    else broadcast(rdzv::Notice{"preempt", stop_why_});
    const auto held = std::exchange(held_stop_, std::nullopt);
    if (!held) return;
    job_action::StopGeneration action = held->first;
    action.grace -= std::min(action.grace, MonotonicClock::now() - held->second);
    send_stop(action, decision.step);
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
        for (const auto& [peer, hello] : agents_) send_(peer, shutdown);
        done_();
    });
}

JobTime Controller::time_with(const CommittedTime& latest) const {
    std::vector<CommittedTime> starts = committed_;
    starts.push_back(latest);
    return add_up(starts, state_.end.lost);
}

JobEnd Controller::end() const {
    JobEnd end;
    end.run_id = spec_.rendezvous.run_id;
    end.program = config_.program;
    end.generation = static_cast<int>(state_.generation);
    end.restarts_used = state_.restarts_used;
    end.max_restarts = spec_.restart.max_restarts;
    end.recoveries = state_.recovery.recoveries;
    end.time = time_with(committed_by(ends_));
    end.world_size = world_size();
    end.wall = MonotonicClock::now() - begun_;
    end.stopped_by_signal = state_.end.stopped_by;
    end.preempted = state_.end.preempted;
    end.hung = state_.end.hung;
    end.out_of_time = state_.end.out_of_time;
    end.failure = state_.end.failure;
    end.failure_decided = state_.end.failure_decided;
    end.steps = state_.history.furthest_step;
    end.workers = ends_;
    end.notes = notes_;
    end.lost_hosts = lost_hosts_;
    return end;
}

}  // namespace ddprun
