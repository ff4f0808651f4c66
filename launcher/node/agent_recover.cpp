// How the agent begins a generation in which the surviving workers go on (docs/elastic.md, "Recovery in
// place").
#include <fmt/core.h>
#include <signal.h>

#include <algorithm>

#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/lifeline.h"
#include "env/text.h"
#include "launcher/node/agent.h"
#include "launcher/plan/head_choice.h"

namespace ddprun {
namespace {

using Stage = AgentState::Stage;

/// How often --rehearse looks at the number of steps.
constexpr Duration kRehearsalPause = std::chrono::milliseconds(5);

const char* name_of(Stage stage) {
    switch (stage) {
        case Stage::None: return "none";
        case Stage::Announced: return "announced";
        case Stage::Joined: return "joined";
        case Stage::Finished: return "finished";
    }
    return "none";
}

/// Takes the number at the beginning of `text`, and the space after it.
Result<std::uint64_t> take_number(std::string_view& text) {
    const std::size_t end = std::min(text.find(' '), text.size());
    const Result<std::uint64_t> number = parse_uint(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    return number;
}

bool is_of_one_process(std::string_view name) { return name == "DDPRUN_TOKEN" || name.ends_with("_FD"); }

}  // namespace

/// MPI does not outlive its peers, and with one ddprun per rank no agent has all workers of its node.
Status Agent::make_kept_memory(int workers) {
    kept_.reset();
    const bool is_possible = config_.pmix == nullptr && !config_.spec.outer_rank;
    if (!is_possible || config_.spec.recover.mode != RecoverSpec::Mode::Auto) return {};
    // A head that falls silent is lost after the heartbeat's timeout; its standby waits that long again, and
    // for the grace of a failure, until the other nodes have come (FollowerState::patience).
    const JobSpec& spec = config_.spec;
    const Duration wait =
        spec.recover.within + 2 * heartbeats_of(spec.rendezvous).timeout + spec.failure_grace;
    Result<std::unique_ptr<KeptFile>> kept = KeptFile::create(system_, workers, wait);
    if (!kept) return kept.error();
    kept_ = *std::move(kept);
    return {};
}

void Agent::handle(const rdzv::SuspendGeneration& order) {
    // The successor of a lost head counts on from a number of its own; workers that have left the lost head's
    // generation wait under that.
    if (state_.is_left() && order.generation > order_.generation)
        order_.generation = state_.generation = order.generation;
    if (order.generation == order_.generation) suspend(order.failed_rank, order.why, Duration::max());
}

void Agent::suspend(int failed_rank, const std::string& why, Duration within) {
    if (!segment_) return;
    abort_set_ = MonotonicClock::now();
    segment_->abort(std::max(failed_rank, 0));
    if (const int alive = state_.alive(); alive > 0 && state_.phase != AgentState::Phase::Suspended)
        log_.info("{} worker{} for the next generation: {}", alive, alive == 1 ? " waits" : "s wait",
                  printable(why));
    feed(agent_event::SuspendRequested{within});
}

void Agent::recover(const rdzv::StartGeneration& order) {
    abort_set_ = MonotonicClock::now();
    segment_->abort(std::max(order.failed_rank, 0));
    if (reads_scalars()) send_scalars();
    if (const Status begun = begin_in_place(order); !begun) {
        // The head stops the generation.
        state_.generation = order.generation;
        rdzv::WorkerExited failure{};
        failure.generation = order.generation;
        failure.rank = std::max(order.failed_rank, order.first_rank);
        failure.status = 1;
        failure.exec_failure = begun.error().what;
        return static_cast<void>(send_(failure));
    }
    feed(agent_event::RecoverRequested{order.generation, Duration(order.start_limit_ns)});
}

Status Agent::begin_in_place(const rdzv::StartGeneration& order) {
    order_ = order;
    first_failure_.reset();
    absent_rank_ = -1;
    Result<std::vector<WorkerPlan>> plans =
        plan_workers(config_.spec, config_.program, config_.machine, order);
    if (!plans) return plans.error();
    // A new segment: a process that is in uninterruptible sleep must not write into the new world.
    Result<std::unique_ptr<SegmentFile>> segment = make_segment(plans->size());
    if (!segment) return segment.error();
    for (int i = 0; i < (*segment)->size(); ++i) {
        const RankLine& before = segment_->line(i);
        (*segment)->line(i).step.store(before.step.load());
        (*segment)->line(i).samples.store(before.samples.load());
    }
    segment_ = std::move(*segment);
    if (reads_scalars()) segment_->scalars(0)->is_read.store(1, std::memory_order_release);
    for (std::size_t i = 0; i < workers_.size(); ++i) {
        const AgentState::Worker& state = state_.workers[i];
        if (state.pid == 0 || state.state == WorkerState::Ended) {
            replace(workers_[i], std::move((*plans)[i]));
        } else {
            workers_[i].plan.env = (*plans)[i].env;
            send_generation(static_cast<int>(i));
        }
    }
    return {};
}

void Agent::replace(Worker& worker, WorkerPlan plan) {
    if (worker.lifeline) loop_.unwatch(worker.lifeline.get());
    worker = Worker{};
    worker.plan = std::move(plan);
    if (worker.plan.asks_network) listen_to_nccl(worker.plan);
}

/// Tells a worker that goes on of the new generation, with its segment.
void Agent::send_generation(int local_rank) {
    const Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    WorkerEnv env = worker.plan.env;
    complete(worker, env);
    std::string packet(1, lifeline::kGeneration);
    for (const auto& [name, value] : to_environment(env)) {
        if (is_of_one_process(name)) continue;
        if (packet.size() > 1) packet += '\n';
        packet += name + '=' + value;
    }
    if (!worker.lifeline || send_packet(worker.lifeline.get(), packet, segment_->fd(), MSG_DONTWAIT) < 0)
        log_.debug("rank {} does not read its lifeline", order_.first_rank + local_rank);
}

// ---- what workers say

/// False: the packet is not about recovery.
bool Agent::hear_of_recovery(int local_rank, char letter, std::string_view text) {
    if (letter == lifeline::kReady) return hear_ready(local_rank, text);
    if (letter == lifeline::kCome) {
        if (const Result<std::uint64_t> generation = take_number(text))
            feed(agent_event::Came{local_rank, *generation});
        return true;
    }
    if (letter == lifeline::kLetGo) {
        hear_let_go(local_rank, text);
        return true;
    }
    if (letter != lifeline::kFinished) return false;
    if (const Result<std::uint64_t> generation = take_number(text))
        feed(agent_event::StageReached{local_rank, Stage::Finished, *generation});
    return true;
}

bool Agent::hear_ready(int local_rank, std::string_view text) {
    constexpr std::string_view kInPlace = "in-place ", kRestart = "restart ";
    if (text.starts_with(kRestart)) {
        feed(agent_event::Refused{local_rank, std::string(text.substr(kRestart.size()))});
        return true;
    }
    if (!text.starts_with(kInPlace)) return false;
    text.remove_prefix(kInPlace.size());
    const Result<std::uint64_t> generation = take_number(text);
    if (!generation) return true;
    feed(agent_event::StageReached{local_rank, Stage::Announced});
    // Not its steps when the last worker has joined: by then it may have done some more.
    const Result<std::uint64_t> steps = take_number(text);
    const std::uint64_t told = tells_by_letters(local_rank) ? 0 : segment_->line(local_rank).step.load();
    workers_[static_cast<std::size_t>(local_rank)].began_at =
        steps ? static_cast<std::int64_t>(told > 0 ? told : *steps) : -1;
    if (*generation > 0) feed(agent_event::StageReached{local_rank, Stage::Joined, *generation});
    return true;
}

void Agent::hear_let_go(int local_rank, std::string_view text) {
    const Result<std::uint64_t> generation = take_number(text);
    const Result<std::uint64_t> steps = take_number(text);
    if (!generation || !steps) return;
    if (RankLine& line = segment_->line(local_rank); tells_by_letters(local_rank))
        line.step.store(std::max(line.step.load(), *steps));
    const std::string when =
        abort_set_ == TimePoint{}
            ? ""
            : ", " + format_duration(MonotonicClock::now() - abort_set_) + " after it was told";
    log_.debug("rank {} has left generation {} at step {}{}: {}", order_.first_rank + local_rank, *generation,
               *steps, when, printable(text));
    feed(agent_event::LetGo{local_rank, *generation, printable(text)});
}

// ---- what the state decides

void Agent::handle(const rdzv::Release& release) {
    if (release.generation == order_.generation) feed(agent_event::Released{});
}

void Agent::perform(const agent_action::TellRelease& action) {
    tell(action.local_rank, fmt::format("{}{}", lifeline::kRelease, order_.generation));
}

void Agent::perform(const agent_action::TellLast& action) {
    tell(action.local_rank, {&lifeline::kGeneration, 1});
}

/// The steps that a worker told, else its commits; -1: it counts neither. A commit may be one of an
/// evaluation.
std::int64_t Agent::steps_of(int local_rank) const {
    const RankLine& line = segment_->line(local_rank);
    if (const std::uint64_t told = line.step.load(); told > 0) return static_cast<std::int64_t>(told);
    return std::max<std::int64_t>(kept_ ? kept_->commits(local_rank) : -1, line.joined.load() != 0 ? 0 : -1);
}

/// True for a program without ddp::Recovery: the steps in its letters are all that it tells of them. Those of
/// ddp::Recovery are commits, which kept memory has, too.
bool Agent::tells_by_letters(int local_rank) const { return !kept_ || kept_->commits(local_rank) < 0; }

std::int64_t Agent::most_steps() const {
    std::int64_t most = -1;
    for (int i = 0; i < static_cast<int>(workers_.size()); ++i) most = std::max(most, steps_of(i));
    return most;
}

std::optional<CommittedTime> Agent::committed_time(int local_rank) const {
    if (!kept_ || kept_->commits(local_rank) < 0) return std::nullopt;
    return CommittedTime{steps_of(local_rank), kept_->commits(local_rank), kept_->useful(local_rank)};
}

Duration Agent::slowest_unit(int local_rank) const {
    return kept_ ? Duration(kept_->line(local_rank).slowest_ns.load()) : Duration::zero();
}

CommittedTime Agent::most_committed() const {
    CommittedTime most;
    for (int i = 0; i < static_cast<int>(workers_.size()); ++i)
        most.raise_to(committed_time(i).value_or(CommittedTime{}));
    return most;
}

void Agent::perform(const agent_action::ReportStage& action) {
    if (action.stage != Stage::Joined) return report_stage(name_of(action.stage), most_steps());
    const std::int64_t begin = std::ranges::max_element(workers_, {}, &Worker::began_at)->began_at;
    report_stage(name_of(action.stage), begin < 0 ? most_steps() : begin);
    begin_rehearsing();
}
void Agent::perform(const agent_action::ReportSuspended&) { report_stage("suspended", most_steps()); }
void Agent::perform(const agent_action::ReportSlow&) { report_stage("slow", most_steps()); }

void Agent::report_stage(const char* stage, std::int64_t steps) {
    send_(rdzv::WorkersReady{order_.generation, stage, "", steps});
}

/// The node of rank 0 counts the steps between two rehearsals: all ranks commit the same ones.
void Agent::begin_rehearsing() {
    if (config_.spec.recover.rehearse == 0 || order_.first_rank != 0) return;
    rehearse_at_ = std::max<std::int64_t>(kept_->commits(0), 0) + config_.spec.recover.rehearse;
    loop_.cancel(rehearsal_timer_);
    rehearsal_timer_ = loop_.call_after(kRehearsalPause, [this] { ask_for_rehearsal(); });
}

void Agent::ask_for_rehearsal() {
    if (state_.phase != AgentState::Phase::Running || !kept_) return;
    if (kept_->commits(0) >= rehearse_at_) {
        send_(rdzv::Notice{"rehearse", std::to_string(order_.generation)});
        return begin_rehearsing();  // in case that the head cannot have it now
    }
    rehearsal_timer_ = loop_.call_after(kRehearsalPause, [this] { ask_for_rehearsal(); });
}

void Agent::perform(const agent_action::ReportRefusal& action) {
    const std::string why = fmt::format("rank {}: {}", order_.first_rank + action.local_rank, action.why);
    send_(rdzv::WorkersReady{order_.generation, "refused", why, -1});
}

void Agent::perform(const agent_action::ReportLetGo& action) {
    const std::string why =
        fmt::format("rank {} has left its group ({})", order_.first_rank + action.local_rank, action.why);
    send_(rdzv::WorkersReady{order_.generation, "let-go", why, steps_of(action.local_rank)});
}

std::vector<AgentState::Progress> Agent::progress() const {
    std::vector<AgentState::Progress> all;
    if (!kept_ || !state_.is_under_way()) return all;
    for (int i = 0; i < static_cast<int>(workers_.size()); ++i) {
        const RankLine& line = segment_->line(i);
        const std::optional<ProcStat> stat = proc_stat_of(state_.workers[static_cast<std::size_t>(i)].pid);
        all.push_back({line.joined.load() != 0, stat && stat->is_stopped(),
                       line.started_seq.load() + line.finished_seq.load() + kept_->line(i).transferred.load(),
                       slowest_unit(i)});
    }
    return all;
}

void Agent::perform(const agent_action::KillLate& action) {
    const std::string why =
        state_.is_recovering ? fmt::format("it was not ready for generation {} within {} (--recover-within)",
                                           order_.generation, format_duration(config_.spec.recover.within))
                             : fmt::format("it has not left generation {}, which is over", order_.generation);
    for (const int local_rank : action.local_ranks) kill_failed(local_rank, why);
}

/// Kills a worker at the head's request: "RANK WHY".
void Agent::kill_failed(std::string_view rank_and_why) {
    const Result<std::uint64_t> rank = take_number(rank_and_why);
    const auto first = static_cast<std::uint64_t>(order_.first_rank);
    if (rank && *rank >= first && *rank - first < workers_.size())
        kill_failed(static_cast<int>(*rank - first), printable(rank_and_why));
}

void Agent::kill_failed(int local_rank, const std::string& why) {
    const AgentState::Worker& worker = state_.workers[static_cast<std::size_t>(local_rank)];
    if (worker.pid == 0 || worker.state == WorkerState::Ended) return;
    log_.warning("killing rank {} (pid {}): {}", order_.first_rank + local_rank, worker.pid, why);
    workers_[static_cast<std::size_t>(local_rank)].kill_why = "ddprun killed it: " + why;
    (void)system_.signal_process(worker.pid, SIGKILL);
}

}  // namespace ddprun
