#include "launcher/node/agent.h"

#include <fmt/core.h>
#include <signal.h>

#include <algorithm>

#include "env/lifeline.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "launcher/machine/gpu/nvml.h"
#include "launcher/plan/head_choice.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

using Stage = AgentState::Stage;

/// The number of workers started before the loop handles signals, pipes and exits again: 16 take some 5 ms.
constexpr int kSpawnSlice = 16;
/// The time after which a slice ends early, as when a slow file system has the program: a node that is silent
/// for seconds is lost.
constexpr Duration kSpawnSliceTime = std::chrono::milliseconds(100);

/// How often --rehearse looks at the number of steps.
constexpr Duration kRehearsalPause = std::chrono::milliseconds(5);

}  // namespace

Agent::Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log,
             AgentConfig config, SendToHead send)
    : loop_(loop),
      system_(system),
      output_(output),
      warden_(warden),
      log_(log),
      config_(std::move(config)),
      send_(std::move(send)),
      lifelines_(loop, log, workers_, [this](const AgentEvent& event) { feed(event); }),
      starter_({loop, system, output, warden, log, config_, workers_}),
      ends_({loop, system, output, warden, log, config_, workers_, send_,
             [this](int local_rank) { note_reported_error(local_rank); }}),
      left_(loop, system, warden, log, config_, workers_),
      scalars_(loop, log, config_, workers_, send_),
      gpu_release_(loop, system, log) {}

Agent::~Agent() {
    loop_.cancel(deadline_timer_);
    loop_.cancel(rehearsal_timer_);
}

void Agent::feed(const AgentEvent& event) {
    const bool was_left = state_.is_left();
    const std::vector<AgentAction> actions = step(state_, event, MonotonicClock::now());
    const bool is_left = state_.is_left();
    for (const AgentAction& action : actions) {
        std::visit([this](const auto& one) { perform(one); }, action);
    }
    if (is_left && !was_left) left_handler_();
}

void Agent::perform(const agent_action::SetDeadline& action) {
    loop_.cancel(deadline_timer_);
    deadline_timer_ = 0;
    if (action.when == kNever) return;
    deadline_timer_ =
        loop_.call_at(action.when, [this] { feed(agent_event::DeadlinePassed{workers_.progress()}); });
}

// ---- orders of the controller

void Agent::handle(const rdzv::StartGeneration& order) {
    const bool goes_on = state_.is_under_way() || state_.phase == AgentState::Phase::Stopping;
    if (order.in_place && goes_on && workers_.kept) return recover(order);
    const bool are_ending =
        state_.phase == AgentState::Phase::Killing || state_.phase == AgentState::Phase::Sweeping;
    if (order.in_place && are_ending) {  // the head hears of their end under the number that it knows
        workers_.order.generation = state_.generation = order.generation;
        return;
    }
    remember_last_workers();
    if (const Status prepared = prepare(order); !prepared) return fail_start(prepared.error().what);
    const bool await_gpus =
        !last_workers_.empty() && config_.spec.gpu_memory_wait > Duration::zero() && nvml::may_be_there();
    feed(agent_event::StartRequested{order.generation, workers_.size(), await_gpus,
                                     workers_.kept ? config_.spec.recover.within : Duration::zero(),
                                     order.in_place, Duration(order.start_limit_ns)});
}

void Agent::handle(const rdzv::StopGeneration& order) {
    if (order.generation != workers_.order.generation) return;
    begin_stop();
    SegmentFile* const segment = workers_.segment.get();
    if (segment != nullptr && order.failed_rank >= 0) segment->abort(order.failed_rank);
    if (const int missing = workers_.missing_at_start(); missing >= 0)
        segment->abort(workers_.rank_of(missing));
    if (segment != nullptr) segment->decide_stop(order.stop_at);
    if (const int alive = state_.alive(); alive > 0 && state_.phase == AgentState::Phase::Running)
        log_.info("stopping {} worker{}: {}", alive, alive == 1 ? "" : "s", order.why);
    if (order.signal == SIGKILL) return kill_all();
    feed(agent_event::StopRequested{order.signal, Duration(order.grace_ns), order.failed_rank >= 0});
    if (order.signal == SIGTERM && order.failed_rank >= 0) end_waiting_for_agreement();
}

/// Ends workers that take SIGTERM for the beginning of an agreed stop, which does not come after a failure.
void Agent::end_waiting_for_agreement() {
    for (std::size_t i = 0; workers_.segment && i < state_.workers.size(); ++i) {
        const AgentState::Worker& worker = state_.workers[i];
        const bool waits = workers_.segment->line(static_cast<int>(i)).outlives_term.load() != 0;
        if (waits && worker.pid != 0 && worker.state == WorkerState::Stopping)
            (void)system_.signal_process(worker.pid, SIGKILL);
    }
}

/// Notes the time: a worker that reports an error from now on does so because of us (its collectives end, its
/// peers are signalled first).
void Agent::begin_stop() {
    const TimePoint now = MonotonicClock::now();
    for (Worker& worker : workers_.all) worker.stop_asked = std::min(worker.stop_asked, now);
    if (config_.pmix != nullptr) config_.pmix->end_waiting("the workers are being stopped");
}

void Agent::handle(const rdzv::StopProposal& proposal) {
    if (proposal.generation != workers_.order.generation || !workers_.segment) return;
    if (proposal.step > 0) workers_.segment->propose_stop(proposal.step, proposal.why);
    rdzv::StepsDone done{workers_.order.generation, proposal.step, state_.phase == AgentState::Phase::Running,
                         0};
    for (std::size_t i = 0; done.listens && i < state_.workers.size(); ++i) {
        if (state_.workers[i].state == WorkerState::Ended) continue;
        const std::uint64_t asked =
            workers_.segment->line(static_cast<int>(i)).asked.load(std::memory_order_acquire);
        done.listens = asked > 0;
        if (done.listens) done.highest = std::max(done.highest, asked - 1);
    }
    send_(done);
}

void Agent::handle(const rdzv::Waiting& waiting) { log_.info("{}", printable(waiting.why)); }

void Agent::handle(const rdzv::ForwardSignal& order) { forward_signal(order.signal, SignalFrom::Head); }

void Agent::handle(const rdzv::EndCollectives& order) {
    if (!workers_.segment) return;
    workers_.segment->abort(order.lost_rank);
    feed(agent_event::NoneFollows{});
}

void Agent::handle(const rdzv::EndJoining& order) {
    if (workers_.segment) workers_.end_joining(order.absent_rank);
}

void Agent::handle(const rdzv::KillRank& order) {
    const int local_rank = order.rank - workers_.order.first_rank;
    if (local_rank >= 0 && local_rank < workers_.size()) kill_failed(local_rank, printable(order.why));
}

void Agent::handle(const rdzv::Preempt& order) {
    const std::string packet = lifeline::kPreempt + order.why.substr(0, lifeline::kMaxPacket - 1);
    for (int i = 0; i < workers_.size(); ++i) lifelines_.tell(i, packet);
}

void Agent::handle(const rdzv::SuspendGeneration& order) {
    // The successor of a lost head counts on from a number of its own; workers that have left the lost head's
    // generation wait under that.
    if (state_.is_left() && order.generation > workers_.order.generation)
        workers_.order.generation = state_.generation = order.generation;
    if (order.generation == workers_.order.generation) suspend(order.failed_rank, order.why, Duration::max());
}

void Agent::suspend(int failed_rank, const std::string& why, Duration within) {
    if (!workers_.segment) return;
    workers_.abort_set = MonotonicClock::now();
    workers_.segment->abort(std::max(failed_rank, 0));
    if (const int alive = state_.alive(); alive > 0 && state_.phase != AgentState::Phase::Suspended)
        log_.info("{} worker{} for the next generation: {}", alive, alive == 1 ? " waits" : "s wait",
                  printable(why));
    feed(agent_event::SuspendRequested{within});
}

void Agent::handle(const rdzv::Release& release) {
    if (release.generation == workers_.order.generation) feed(agent_event::Released{});
}

void Agent::kill_all() {
    begin_stop();
    feed(agent_event::KillRequested{});
}

void Agent::forward_signal(int signal, SignalFrom from) {
    if (!forwarded_.is_new(signal, from, loop_.now())) return;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0 && worker.state != WorkerState::Ended)
            (void)system_.signal_group(worker.pid, signal);
    }
}

bool Agent::signal_worker(int local_rank, int signal) {
    const AgentState::Worker& worker = state_.workers[static_cast<std::size_t>(local_rank)];
    if (worker.pid == 0 || worker.state == WorkerState::Ended) return false;
    return system_.signal_group(worker.pid, signal).has_value();
}

// ---- a start of all workers

/// Keeps the older workers where the last generation was stopped before it had any (while it waited for the
/// GPUs).
void Agent::remember_last_workers() {
    std::vector<pid_t> pids;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0) pids.push_back(worker.pid);
    }
    if (!pids.empty()) last_workers_ = std::move(pids);
}

/// Reports that this node cannot start its workers, for a reason that is not theirs.
void Agent::fail_start(const std::string& why) {
    rdzv::WorkerExited failure{};
    failure.generation = workers_.order.generation;
    failure.rank = workers_.order.first_rank;
    failure.status = 1;
    failure.exec_failure = why;
    send_(failure);
    rdzv::GenerationEnded ended{};
    ended.generation = workers_.order.generation;
    send_(ended);
}

/// Makes the segment of the generation that is ordered.
Status Agent::make_segment(std::size_t workers) {
    const rdzv::StartGeneration& order = workers_.order;
    Result<std::unique_ptr<SegmentFile>> made =
        SegmentFile::create(system_, {static_cast<int>(workers), order.world_size, order.first_rank,
                                      order.generation, cpus_in_quota(config_.machine)});
    if (!made) return made.error();
    workers_.segment = *std::move(made);
    scalars_.begin_segment();
    return {};
}

Status Agent::prepare(const rdzv::StartGeneration& order) {
    workers_.order = order;
    workers_.first_logged_rank = order.first_rank;
    workers_.absent_rank = -1;
    ends_.begin_generation(false);
    if (warden_ != nullptr && warden_->has_killed()) {
        warden_->forget_kill();
        if (config_.cgroup != nullptr) config_.cgroup->was_killed();
    }
    {
        const os::BlockingCall makes_directory(loop_.keepalive());
        // The number also counts generations that used up no restart.
        output_.begin_attempt(static_cast<int>(order.generation) - 1);
    }
    Result<std::vector<WorkerPlan>> plans =
        plan_workers(config_.spec, config_.program, config_.machine, order);
    if (!plans) return plans.error();
    if (const Status made = make_segment(plans->size()); !made) return made;
    if (const Status kept = make_kept_memory(static_cast<int>(plans->size())); !kept) return kept;
    if (config_.cgroup != nullptr) {
        if (const Status renewed = config_.cgroup->renew(); !renewed)
            log_.warning("{}: the workers start in our own cgroup", renewed.error().what);
    }
    lifelines_.close_all();
    workers_.all.clear();
    for (WorkerPlan& plan : *plans) starter_.plan(workers_.all.emplace_back(), std::move(plan));
    return config_.pmix == nullptr ? Status{} : config_.pmix->begin(order);
}

/// MPI does not outlive its peers, and with one ddprun per rank no agent has all workers of its node.
Status Agent::make_kept_memory(int workers) {
    workers_.kept.reset();
    const bool is_possible = config_.pmix == nullptr && !config_.spec.outer_rank;
    if (!is_possible || config_.spec.recover.mode != RecoverSpec::Mode::Auto) return {};
    // A head that falls silent is lost after the heartbeat's timeout; its standby waits that long again, and
    // for the grace of a failure, until the other nodes have come (FollowerState::arrival_timeout).
    const JobSpec& spec = config_.spec;
    const Duration wait =
        spec.recover.within + 2 * heartbeats_of(spec.rendezvous).timeout + spec.failure_grace;
    Result<std::unique_ptr<KeptFile>> kept = KeptFile::create(system_, workers, wait);
    if (!kept) return kept.error();
    workers_.kept = *std::move(kept);
    return {};
}

void Agent::perform(const agent_action::AwaitGpus&) {
    gpu_release_.begin(last_workers_, config_.spec.gpu_memory_wait,
                       [this] { feed(agent_event::GpusFree{}); });
}

void Agent::perform(const agent_action::SpawnNext& action) {
    pending_spawn_ = action.local_rank;
    if (slice_posted_) return;
    slice_posted_ = true;
    spawn_slice();
}

void Agent::spawn_slice() {
    const TimePoint enough = MonotonicClock::now() + kSpawnSliceTime;
    for (int n = 0; n < kSpawnSlice && pending_spawn_ >= 0 && MonotonicClock::now() < enough; ++n) {
        if (state_.phase != AgentState::Phase::Starting) break;  // stopped between two slices
        const int local_rank = std::exchange(pending_spawn_, -1);
        const Result<pid_t> pid = starter_.start(local_rank);
        if (pid) lifelines_.listen(local_rank);
        if (pid) feed(agent_event::Spawned{local_rank, *pid});
        else feed(agent_event::SpawnFailed{local_rank, pid.error()});
    }
    slice_posted_ = pending_spawn_ >= 0 && state_.phase == AgentState::Phase::Starting;
    if (slice_posted_) loop_.post([this] { spawn_slice(); });
    ends_.send();
}

void Agent::perform(const agent_action::ReportStarted&) {
    rdzv::WorkersStarted started{};
    started.generation = state_.generation;
    send_(started);
    if (workers_.order.in_place)
        log_.debug("{} after the end of a worker was seen, all run again",
                   format_duration(MonotonicClock::now() - ends_.last_seen()));
    ends_.watch_reports_later();
    scalars_.send_later();
}

// ---- recovery in place

void Agent::recover(const rdzv::StartGeneration& order) {
    workers_.abort_set = MonotonicClock::now();
    workers_.segment->abort(std::max(order.failed_rank, 0));
    scalars_.send();
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
    workers_.order = order;
    workers_.absent_rank = -1;
    ends_.begin_generation(true);
    Result<std::vector<WorkerPlan>> plans =
        plan_workers(config_.spec, config_.program, config_.machine, order);
    if (!plans) return plans.error();
    // A new segment: a process that is in uninterruptible sleep must not write into the new world.
    const std::shared_ptr<SegmentFile> before = workers_.segment;
    if (const Status made = make_segment(plans->size()); !made) return made;
    for (int i = 0; i < workers_.segment->size(); ++i) {
        workers_.segment->line(i).step.store(before->line(i).step.load());
        workers_.segment->line(i).samples.store(before->line(i).samples.load());
    }
    for (int i = 0; i < workers_.size(); ++i) {
        WorkerPlan& plan = (*plans)[static_cast<std::size_t>(i)];
        Worker& worker = workers_.at(i);
        if (workers_.running_pid(i) == 0) {
            lifelines_.close(worker);
            starter_.plan(worker, std::move(plan));
        } else {
            worker.plan.env = plan.env;
            lifelines_.send_generation(i, starter_.environment_of(worker));
        }
    }
    return {};
}

void Agent::perform(const agent_action::TellRelease& action) {
    lifelines_.tell(action.local_rank, fmt::format("{}{}", lifeline::kRelease, workers_.order.generation));
}

void Agent::perform(const agent_action::TellLast& action) {
    lifelines_.tell(action.local_rank, {&lifeline::kGeneration, 1});
}

void Agent::perform(const agent_action::ReportStage& action) {
    if (action.stage != Stage::Joined) return report_stage(action.stage, workers_.most_steps());
    const std::int64_t begin = std::ranges::max_element(workers_.all, {}, &Worker::began_at)->began_at;
    report_stage(action.stage, begin < 0 ? workers_.most_steps() : begin);
    begin_rehearsing();
}
void Agent::perform(const agent_action::ReportSuspended&) {
    report_stage(Stage::Suspended, workers_.most_steps());
}
void Agent::perform(const agent_action::ReportSlow&) { report_stage(Stage::Slow, workers_.most_steps()); }

void Agent::report_stage(Stage stage, std::int64_t steps) {
    send_(rdzv::WorkersReady{workers_.order.generation, stage, "", steps});
}

/// The node of rank 0 counts the steps between two rehearsals: all ranks commit the same ones.
void Agent::begin_rehearsing() {
    if (config_.spec.recover.rehearse == 0 || workers_.order.first_rank != 0) return;
    rehearse_at_ = std::max<std::int64_t>(workers_.kept->commits(0), 0) + config_.spec.recover.rehearse;
    loop_.cancel(rehearsal_timer_);
    rehearsal_timer_ = loop_.call_after(kRehearsalPause, [this] { ask_for_rehearsal(); });
}

void Agent::ask_for_rehearsal() {
    if (state_.phase != AgentState::Phase::Running || !workers_.kept) return;
    if (workers_.kept->commits(0) >= rehearse_at_) {
        send_(rdzv::RehearsalRequest{workers_.order.generation});
        return begin_rehearsing();  // in case that the head cannot have it now
    }
    rehearsal_timer_ = loop_.call_after(kRehearsalPause, [this] { ask_for_rehearsal(); });
}

void Agent::perform(const agent_action::ReportRefusal& action) {
    const std::string why = fmt::format("rank {}: {}", workers_.rank_of(action.local_rank), action.why);
    send_(rdzv::WorkersReady{workers_.order.generation, Stage::Refused, why, -1});
}

void Agent::perform(const agent_action::ReportLetGo& action) {
    const std::string why =
        fmt::format("rank {} has left its group ({})", workers_.rank_of(action.local_rank), action.why);
    send_(rdzv::WorkersReady{workers_.order.generation, Stage::LetGo, why,
                             workers_.steps_of(action.local_rank)});
}

void Agent::perform(const agent_action::KillLate& action) {
    const std::string why =
        state_.is_recovering
            ? fmt::format("it was not ready for generation {} within {} (--recover-within)",
                          workers_.order.generation, format_duration(config_.spec.recover.within))
            : fmt::format("it has not left generation {}, which is over", workers_.order.generation);
    for (const int local_rank : action.local_ranks) kill_failed(local_rank, why);
}

void Agent::kill_failed(int local_rank, const std::string& why) {
    const AgentState::Worker& worker = state_.workers[static_cast<std::size_t>(local_rank)];
    if (worker.pid == 0 || worker.state == WorkerState::Ended) return;
    log_.warning("killing rank {} (pid {}): {}", workers_.rank_of(local_rank), worker.pid, why);
    workers_.at(local_rank).kill_why = "ddprun killed it: " + why;
    (void)system_.signal_process(worker.pid, SIGKILL);
}

// ---- the ends of workers

void Agent::on_child_exits() {
    if (warden_ != nullptr) warden_->wake_if_stopped();
    while (const std::optional<os::ChildExit> exit = system_.next_exit()) {
        if (warden_ != nullptr && exit->pid == warden_->pid()) {
            restart_warden(exit->pid);
            continue;
        }
        // What a worker said last comes before its end, and so do announcements of the others.
        const int ended = state_.local_rank_of(exit->pid);
        const bool is_announcing = state_.is_announcing();
        for (int i = 0; i < workers_.size(); ++i) {
            if (i == ended || is_announcing) lifelines_.read(i);
        }
        feed(agent_event::Exited{*exit});
    }
    ends_.send();
    while (const std::optional<os::ChildStop> stop = system_.next_stop()) report_stop(*stop);
}

void Agent::restart_warden(pid_t pid) {
    system_.reap(pid);
    if (const Status again = warden_->restart(); again)
        log_.warning("the warden (pid {}) was killed; started another (pid {})", pid, warden_->pid());
    else log_.warning("the warden (pid {}) was killed, and there is no other: {}", pid, again.error().what);
}

/// Names a worker that the terminal has stopped although it was started with these signals ignored, as an
/// interactive shell restores them.
void Agent::report_stop(const os::ChildStop& stop) {
    const int local_rank = state_.local_rank_of(stop.pid);
    if (local_rank < 0 || (stop.signal != SIGTTIN && stop.signal != SIGTTOU)) return;
    const int rank = workers_.rank_of(local_rank);
    log_.warning(
        "rank {} (pid {}) is stopped by {}, because it used the terminal, which is ddprun's; --stdin {} "
        "gives it input, and --attach {}=COMMAND the terminal",
        rank, stop.pid, signal_name(stop.signal), rank, rank);
}

void Agent::perform(const agent_action::SignalWorker& action) {
    const Status sent = action.alone ? system_.signal_process(action.pid, action.signal)
                                     : system_.signal_group(action.pid, action.signal);
    if (!sent) log_.warning("{}; ignoring", sent.error().what);
}

void Agent::perform(const agent_action::ReapStranger& action) {
    system_.reap(action.pid);
    log_.debug("reaped orphaned descendant {}", action.pid);
}

void Agent::perform(const agent_action::ReportExit& action) {
    ends_.add(action);
    if (action.local_rank == 0) scalars_.end();
}

/// The others leave the generation now; the worker starts again in the next one when its process is gone.
void Agent::note_reported_error(int local_rank) {
    if (!state_.may_be_left()) return;
    const int rank = workers_.rank_of(local_rank);
    const std::string why = fmt::format("rank {} has reported an error", rank);
    send_(rdzv::WorkersReady{workers_.order.generation, Stage::Failing, why, workers_.steps_of(local_rank)});
    feed(agent_event::ErrorReported{});
    workers_.segment->abort(rank);
}

void Agent::perform(const agent_action::ReportStrays& action) {
    log_.info("killing {} left behind by the workers", count_processes(action.count));
}

void Agent::perform(const agent_action::ReportEnded& action) {
    ends_.send();
    {
        const os::BlockingCall writes_file(loop_.keepalive());
        output_.check_disk();
    }
    output_.finish_attempt();
    if (config_.pmix != nullptr) config_.pmix->end_generation();
    rdzv::GenerationEnded ended{};
    ended.generation = state_.generation;
    for (const pid_t pid : action.unkillable) {
        ended.notes.push_back(
            fmt::format("process {} on {} could not be killed (uninterruptible?)", pid, config_.host));
    }
    send_(ended);
}

}  // namespace ddprun
