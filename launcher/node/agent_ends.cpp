// How the agent handles the ends of workers: their error files, the reports of their ends, and kills.
#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "launcher/ends/error_file.h"
#include "launcher/ends/report.h"
#include "launcher/node/agent.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

/// After this time the processes that a worker left in other groups are searched for: the search reads /proc,
/// and a recovery must not wait for it.
constexpr Duration kRestSearch = std::chrono::milliseconds(100);

/// Sorts exits whose order is not known, as they were seen together. A crash explains a sibling's error exit
/// more often than the other way round: failed starts first, then signals, then exit codes.
int likely_order(const rdzv::WorkerExited& exit) {
    if (!exit.exec_failure.empty()) return 0;
    if (exit.signaled) return exit.status == SIGTERM ? 3 : 1;
    return exit.status != 0 ? 2 : 4;
}

/// "died of SIGKILL 812 s after start", "exited with code 3 after 20 ms".
std::string how_it_ended(const rdzv::WorkerExited& report) {
    if (!report.exec_failure.empty()) return "could not be started: " + report.exec_failure;
    const std::string when = format_duration(Duration(report.after_start_ns));
    if (report.signaled) return fmt::format("died of {} {} after start", signal_name(report.status), when);
    return fmt::format("exited with code {} {} after start", report.status, when);
}

/// The signal that ended the worker; a shell that runs the program reports it as an exit code above 128.
int signal_behind(const rdzv::WorkerExited& report) {
    if (report.signaled) return report.status;
    return report.status > 128 && report.status < 128 + SIGRTMIN ? report.status - 128 : 0;
}

std::string counted(std::size_t processes) {
    return processes == 1 ? "1 process" : fmt::format("{} processes", processes);
}

void take_terminal_back() {
    sigset_t ttou, before;
    ::sigemptyset(&ttou);
    ::sigaddset(&ttou, SIGTTOU);
    ::pthread_sigmask(SIG_BLOCK, &ttou, &before);
    ::tcsetpgrp(0, ::getpgrp());
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void Agent::on_child_exits() {
    if (warden_ != nullptr) warden_->wake_if_stopped();
    while (const std::optional<os::ChildExit> exit = system_.next_exit()) {
        if (warden_ != nullptr && exit->pid == warden_->pid()) {
            system_.reap(exit->pid);
            const Status again = warden_->restart();
            if (again)
                log_.warning("the warden (pid {}) was killed; started another (pid {})", exit->pid,
                             warden_->pid());
            else
                log_.warning("the warden (pid {}) was killed, and there is no other: {}", exit->pid,
                             again.error().what);
            continue;
        }
        // What a worker said last comes before its end, and so do announcements of the others.
        const int ended = state_.local_rank_of(exit->pid);
        const bool is_announcing = state_.is_announcing();
        for (int i = 0; i < static_cast<int>(workers_.size()); ++i) {
            if (i == ended || is_announcing) read_lifeline(i);
        }
        feed(agent_event::Exited{*exit});
    }
    send_exits();
    while (const std::optional<os::ChildStop> stop = system_.next_stop()) report_stop(*stop);
}

/// Names a worker that the terminal has stopped although it was started with these signals ignored, as an
/// interactive shell restores them.
void Agent::report_stop(const os::ChildStop& stop) {
    const int local_rank = state_.local_rank_of(stop.pid);
    if (local_rank < 0 || (stop.signal != SIGTTIN && stop.signal != SIGTTOU)) return;
    const int rank = order_.first_rank + local_rank;
    log_.warning(
        "rank {} (pid {}) is stopped by {}, because it used the terminal, which is ddprun's; --stdin {} "
        "gives it input, and --attach {}=COMMAND the terminal",
        rank, stop.pid, signal_name(stop.signal), rank, rank);
}

void Agent::send_exits() {
    std::vector<rdzv::WorkerExited> exits = std::exchange(exits_, {});
    std::stable_sort(exits.begin(), exits.end(),
                     [](const auto& a, const auto& b) { return likely_order(a) < likely_order(b); });
    for (const rdzv::WorkerExited& exit : exits) send_(exit);
}

void Agent::perform(const agent_action::SignalWorker& action) {
    const Status sent = action.alone ? system_.signal_process(action.pid, action.signal)
                                     : system_.signal_group(action.pid, action.signal);
    if (!sent) log_.warning("{}; ignoring", sent.error().what);
}

void Agent::perform(const agent_action::BuryGroup& action) {
    // Without /proc the group's processes cannot be found later.
    const int signal = has_own_proc() ? action.signal : SIGKILL;
    // Signal the group while its leader is still a zombie: after the reap the id may belong to someone else.
    // The warden's table first, for the same reason.
    if (signal != 0) (void)system_.signal_group(action.pid, signal);
    const auto local_rank = static_cast<std::size_t>(
        std::find_if(state_.workers.begin(), state_.workers.end(),
                     [&](const AgentState::Worker& worker) { return worker.pid == action.pid; }) -
        state_.workers.begin());
    if (warden_ != nullptr) warden_->set_group(static_cast<int>(local_rank), 0);
    system_.reap(action.pid);
    if (signal != SIGKILL && system_.group_exists(action.pid)) {
        (void)system_.signal_group(action.pid, SIGCONT);  // a stopped process would sleep through the grace
        const int rank = order_.first_rank + static_cast<int>(local_rank);
        loop_.call_after(kStrayGrace, [this, group = action.pid, rank] { kill_rest_of_group(group, rank); });
    }
    if (state_.may_be_left()) {
        const WorkerMark mark{config_.mark, workers_[local_rank].error_path, order_.generation};
        const int rank = order_.first_rank + static_cast<int>(local_rank);
        loop_.call_after(kRestSearch, [this, mark, rank] { end_rest_of(mark, rank, SIGTERM); });
    }
    // The worker had the terminal (--attach): take it back, or our next read or write of it stops us.
    if (workers_[local_rank].plan.attached) take_terminal_back();
}

void Agent::perform(const agent_action::ReapStranger& action) {
    system_.reap(action.pid);
    log_.debug("reaped orphaned descendant {}", action.pid);
}

void Agent::perform(const agent_action::ReportExit& action) {
    const Worker& worker = workers_[static_cast<std::size_t>(action.local_rank)];
    const int rank = order_.first_rank + action.local_rank;
    rdzv::WorkerExited report{};
    report.generation = state_.generation;
    report.local_rank = config_.spec.outer_rank ? config_.spec.outer_rank->local_rank : action.local_rank;
    report.rank = rank;
    report.pid = action.exit.pid;
    report.signaled = action.exit.signaled;
    report.status = action.exit.status;
    report.dumped_core = action.exit.dumped_core;
    report.by_us = action.by_us;
    report.exec_failure = action.exec_failure;
    if (config_.pmix != nullptr) config_.pmix->explain(report);
    const bool failed = report.failed();
    report.never_joined = !failed && !report.by_us && has_never_joined(action.local_rank);
    const std::string error_report = failed ? read_error_file(worker) : "";
    if (!error_report.empty()) {
        const TimePoint written = [&] {
            const os::BlockingCall looks_at_file(loop_.keepalive());
            return time_of_report(worker.error_path, error_report, lead_of_error_files(), worker.started);
        }();
        report.error_age_ns = (MonotonicClock::now() - written).count();
        report.stopped_failing =
            worker.killed_failing || (action.by_us && written + kFileClockTick < worker.stop_asked);
        report.by_us = action.by_us && !report.stopped_failing;
    }
    if (worker.started != TimePoint{})
        report.after_start_ns = (MonotonicClock::now() - worker.started).count();
    if (segment_) report.steps = steps_of(action.local_rank);
    if (const std::optional<CommittedTime> committed = committed_time(action.local_rank)) {
        report.commits = committed->commits;
        report.useful_ns = committed->time.count();
    }
    end_seen_ = MonotonicClock::now();
    // The others wait for this worker, and it is not started again.
    const bool is_awaited = state_.is_recovering && state_.phase == AgentState::Phase::Stopping;
    if (segment_ && is_awaited) segment_->abort(rank);
    if (report.never_joined) end_joining(rank);
    if (failed && !report.by_us) {
        const os::BlockingCall reads_logs(loop_.keepalive());
        const int logged_rank = first_logged_rank_ + action.local_rank;
        output_.read_rest_of(logged_rank);
        const bool is_wardens =
            report.signaled && report.status == SIGKILL && warden_ != nullptr && warden_->has_killed();
        if (is_wardens)
            report.meaning =
                "its ddprun stood still for longer than --heartbeat-timeout: the warden killed the workers";
        if (!worker.kill_why.empty()) report.meaning = worker.kill_why;
        const bool has_waited =
            segment_->line(action.local_rank).joined != 0 ||
            error_report.find(fmt::format("rank {} was lost", absent_rank_)) != std::string::npos;
        if (absent_rank_ >= 0 && !report.signaled && has_waited && report.meaning.empty())
            report.meaning = fmt::format("rank {} ended with 0 before it had joined", absent_rank_);
        report.last_stderr = output_.last_stderr(logged_rank);
        report.error_file = readable_error_file(error_report);
        if (!report.stopped_failing && report.meaning.empty())
            report.meaning = explain_death(witness_.facts(report.pid, signal_behind(report)));
        report.last_collective = describe_line(segment_->line(action.local_rank));
        log_.warning("rank {} (pid {}) {}", rank, report.pid, how_it_ended(report));
        if (!first_failure_) first_failure_ = report;
    }
    if (reads_scalars() && action.local_rank == 0) end_scalars();
    exits_.push_back(std::move(report));
}

/// True for a worker that has neither mapped the segment nor said that it has joined. Programs without libddp
/// do neither, and nobody waits in their segment.
bool Agent::has_never_joined(int local_rank) const {
    const AgentState::Stage stage = state_.workers[static_cast<std::size_t>(local_rank)].stage;
    return order_.world_size > 1 && !config_.spec.outer_rank && segment_ &&
           stage < AgentState::Stage::Joined && segment_->line(local_rank).joined == 0;
}

/// Ends the wait of workers that join a group: this rank will never come.
void Agent::end_joining(int absent_rank) {
    if (absent_rank_ < 0) absent_rank_ = absent_rank;
    segment_->abort(absent_rank);
}

/// The head gets what the worker told last before it hears of the worker's end.
void Agent::end_scalars() {
    loop_.cancel(scalars_timer_);
    send_scalars();
    if (const std::uint64_t lost = segment_->scalars(0)->lost.load(std::memory_order_relaxed); lost > 0)
        log_.warning(
            "--tensorboard: {} scalars of rank 0 are lost: it told more than {} in a second, or of more than {} names",
            lost, kScalarRecords, kScalarTags);
}

std::string Agent::read_error_file(const Worker& worker) const {
    const os::BlockingCall reads_file(loop_.keepalive());
    return read_error_report(worker.error_path);
}

/// Returns zero where the error files are in this host's memory.
Duration Agent::lead_of_error_files() {
    const std::string directory = output_.attempt_directory();
    if (!error_clock_lead_)
        error_clock_lead_ = directory.empty() ? Duration::zero() : clock_lead_of(directory);
    return *error_clock_lead_;
}

std::string Agent::error_report(int rank) const {
    const int local_rank = rank - order_.first_rank;
    if (local_rank < 0 || local_rank >= static_cast<int>(workers_.size())) return {};
    return read_error_file(workers_[static_cast<std::size_t>(local_rank)]);
}

/// Kills our own descendants in the group. The group's number cannot be trusted any more: all its processes
/// may have ended, and the number may belong to another group.
void Agent::kill_rest_of_group(pid_t group, int rank) {
    if (state_.phase == AgentState::Phase::Sweeping || state_.local_rank_of(group) >= 0) return;
    std::vector<pid_t> rest = strays();
    std::erase_if(rest, [&](pid_t pid) { return system_.group_of(pid) != group; });
    for (const pid_t pid : rest) (void)system_.signal_process(pid, SIGKILL);
    if (!rest.empty()) log_.info("killing {} left behind by rank {}", counted(rest.size()), rank);
}

/// Ends what a worker that starts again has left in other groups. A restart of all workers finds it by
/// itself.
void Agent::end_rest_of(const WorkerMark& worker, int rank, int signal) {
    if (!has_own_proc() || !state_.is_under_way()) return;
    const std::vector<pid_t> rest = marked_among(strays(), worker);
    if (rest.empty()) return;
    for (const pid_t pid : rest) {
        (void)system_.signal_process(pid, signal);
        if (signal == SIGTERM) (void)system_.signal_process(pid, SIGCONT);
    }
    if (signal == SIGKILL) return log_.info("killing {} left behind by rank {}", counted(rest.size()), rank);
    loop_.call_after(kStrayGrace, [this, worker, rank] { end_rest_of(worker, rank, SIGKILL); });
}

/// Finds the descendants of our workers, adopted by us or still below a worker. Reads /proc; without it,
/// searches for the mark.
std::vector<pid_t> Agent::strays() {
    std::vector<pid_t> found = has_own_proc() ? system_.descendants() : marked_processes(config_.mark);
    if (warden_ != nullptr) std::erase(found, warden_->pid());
    return found;
}

void Agent::perform(const agent_action::Sweep& action) {
    // Kill the cgroup before a last search, which can miss a tree of processes that keeps forking.
    if (config_.cgroup != nullptr && action.signal == SIGKILL) config_.cgroup->kill();
    std::vector<pid_t> found = strays();
    if (config_.cgroup != nullptr && found.empty()) config_.cgroup->kill();
    const auto has_been_asked = [&](pid_t pid) {
        if (std::count(state_.asked_strays.begin(), state_.asked_strays.end(), pid) > 0) return true;
        const pid_t group = system_.group_of(pid);
        return std::any_of(state_.workers.begin(), state_.workers.end(),
                           [&](const AgentState::Worker& worker) { return worker.pid == group; });
    };
    for (const pid_t stray : found) {
        if (action.signal == SIGTERM && has_been_asked(stray)) continue;
        (void)system_.signal_process(stray, action.signal);
        if (action.signal == SIGTERM) (void)system_.signal_process(stray, SIGCONT);
    }
    feed(agent_event::Swept{std::move(found)});
}

void Agent::perform(const agent_action::ReportStrays& action) {
    log_.info("killing {} left behind by the workers", counted(action.count));
}

void Agent::perform(const agent_action::ReportEnded& action) {
    send_exits();
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

// ---- workers that have failed and do not exit

void Agent::error_file_written(int local_rank) {
    if (local_rank >= static_cast<int>(workers_.size())) return;
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    if (worker.is_awaited || read_error_file(worker).empty()) return;
    worker.is_awaited = true;
    // The others leave the generation now; the worker starts again in the next one when its process is gone.
    if (state_.may_be_left()) {
        const std::string why = fmt::format("rank {} has reported an error", order_.first_rank + local_rank);
        send_(rdzv::WorkersReady{order_.generation, "failing", why, steps_of(local_rank)});
        feed(agent_event::ErrorReported{});
        segment_->abort(order_.first_rank + local_rank);
    }
    await_exit(local_rank, "reported an error");
}

void Agent::await_exit(int local_rank, const std::string& what_it_did) {
    const pid_t pid = state_.workers[static_cast<std::size_t>(local_rank)].pid;
    loop_.call_after(config_.spec.failure_grace,
                     [this, local_rank, pid, what_it_did] { kill_failing(local_rank, pid, what_it_did); });
}

void Agent::kill_failing(int local_rank, pid_t pid, const std::string& what_it_did) {
    const auto index = static_cast<std::size_t>(local_rank);
    if (index >= state_.workers.size() || state_.workers[index].pid != pid ||
        state_.workers[index].state == WorkerState::Ended)
        return;
    if (is_dumping_core(pid)) return await_exit(local_rank, what_it_did);  // it is exiting
    log_.warning("rank {} (pid {}) {} and has not exited {} later (--failure-grace); killing it",
                 order_.first_rank + local_rank, pid, what_it_did,
                 format_duration(config_.spec.failure_grace));
    if (!workers_[index].killed_failing)
        workers_[index].killed_failing = system_.signal_process(pid, SIGKILL).has_value();
}

}  // namespace ddprun
