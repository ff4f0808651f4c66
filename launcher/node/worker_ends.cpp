#include "launcher/node/worker_ends.h"

#include <fmt/core.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "launcher/ends/error_file.h"
#include "launcher/ends/report.h"
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

void take_terminal_back() {
    sigset_t ttou, before;
    ::sigemptyset(&ttou);
    ::sigaddset(&ttou, SIGTTOU);
    ::pthread_sigmask(SIG_BLOCK, &ttou, &before);
    ::tcsetpgrp(0, ::getpgrp());
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

/// The delay after which error files are watched; before, a report is seen when its worker exits. Closing the
/// watch costs 4 to 16 ms (FileWatch), which a short job need not pay.
constexpr Duration kErrorWatchDelay = std::chrono::seconds(1);

}  // namespace

WorkerEnds::~WorkerEnds() { parts_.loop.cancel(watch_timer_); }

void WorkerEnds::begin_generation(bool in_place) {
    first_failure_.reset();
    if (in_place) return;
    clock_lead_.reset();
    if (files_) files_->clear();
    parts_.loop.cancel(watch_timer_);
    watch_timer_ = 0;
}

// ---- error reports

void WorkerEnds::watch_reports_later() {
    parts_.loop.cancel(watch_timer_);
    watch_timer_ = parts_.loop.call_after(kErrorWatchDelay, [this] { watch_reports(); });
}

void WorkerEnds::watch_reports() {
    watch_timer_ = 0;
    if (!files_) {
        Result<std::unique_ptr<FileWatch>> watch = FileWatch::open(parts_.loop);
        if (!watch)
            return parts_.log.debug("error reports are seen when their worker exits: {}", watch.error().what);
        files_ = std::move(*watch);
    }
    for (int local_rank = 0; local_rank < workers_.size(); ++local_rank) {
        const os::BlockingCall looks_at_file(parts_.loop.keepalive());
        const Status watched = files_->add(workers_.at(local_rank).error_path,
                                           [this, local_rank] { report_written(local_rank); });
        if (!watched) parts_.log.debug("rank {}: {}", workers_.rank_of(local_rank), watched.error().what);
        else report_written(local_rank);  // the worker may have written already
    }
}

void WorkerEnds::report_written(int local_rank) {
    if (local_rank >= workers_.size()) return;
    Worker& worker = workers_.at(local_rank);
    if (worker.is_awaited || read_report(worker).empty()) return;
    worker.is_awaited = true;
    parts_.reported_error(local_rank);
    await_exit(local_rank, "reported an error");
}

std::string WorkerEnds::read_report(const Worker& worker) const {
    const os::BlockingCall reads_file(parts_.loop.keepalive());
    return read_error_report(worker.error_path);
}

/// Returns zero where the error files are in this host's memory.
Duration WorkerEnds::lead_of_reports() {
    const std::string directory = parts_.output.attempt_directory();
    if (!clock_lead_) clock_lead_ = directory.empty() ? Duration::zero() : clock_lead_of(directory);
    return *clock_lead_;
}

std::string WorkerEnds::error_report(int rank) const {
    const int local_rank = rank - workers_.order.first_rank;
    if (local_rank < 0 || local_rank >= workers_.size()) return {};
    return read_report(workers_.at(local_rank));
}

void WorkerEnds::await_exit(int local_rank, const std::string& what_it_did) {
    const pid_t pid = workers_.state_of(local_rank).pid;
    parts_.loop.call_after(parts_.config.spec.failure_grace, [this, local_rank, pid, what_it_did] {
        kill_failing(local_rank, pid, what_it_did);
    });
}

void WorkerEnds::kill_failing(int local_rank, pid_t pid, const std::string& what_it_did) {
    const bool is_there = static_cast<std::size_t>(local_rank) < workers_.state.workers.size() &&
                          workers_.state_of(local_rank).pid == pid &&
                          workers_.state_of(local_rank).state != WorkerState::Ended;
    if (!is_there) return;
    if (is_dumping_core(pid)) return await_exit(local_rank, what_it_did);  // it is exiting
    parts_.log.warning("rank {} (pid {}) {} and has not exited {} later (--failure-grace); killing it",
                       workers_.rank_of(local_rank), pid, what_it_did,
                       format_duration(parts_.config.spec.failure_grace));
    bool& killed = workers_.at(local_rank).killed_failing;
    if (!killed) killed = parts_.system.signal_process(pid, SIGKILL).has_value();
}

// ---- the report of an end

void WorkerEnds::add(const agent_action::ReportExit& end) {
    rdzv::WorkerExited report = facts_of(end);
    if (parts_.config.pmix != nullptr) parts_.config.pmix->explain(report);
    const bool failed = report.failed();
    report.never_joined = !failed && !report.by_us && !parts_.config.spec.outer_rank &&
                          workers_.has_never_joined(end.local_rank);
    const std::string error_report = failed ? read_report(workers_.at(end.local_rank)) : "";
    if (!error_report.empty()) note_error_report(end, error_report, report);
    last_seen_ = MonotonicClock::now();
    // The others wait for this worker, and it is not started again.
    const bool is_awaited =
        workers_.state.is_recovering && workers_.state.phase == AgentState::Phase::Stopping;
    if (workers_.segment && is_awaited) workers_.segment->abort(report.rank);
    if (report.never_joined) workers_.end_joining(report.rank);
    if (failed && !report.by_us) {
        explain(end.local_rank, error_report, report);
        parts_.log.warning("rank {} (pid {}) {}", report.rank, report.pid, how_it_ended(report));
        if (!first_failure_) first_failure_ = report;
    }
    exits_.push_back(std::move(report));
}

/// What the end itself and the worker's memory tell.
rdzv::WorkerExited WorkerEnds::facts_of(const agent_action::ReportExit& end) const {
    const std::optional<OuterRank>& outer = parts_.config.spec.outer_rank;
    rdzv::WorkerExited report{};
    report.generation = workers_.state.generation;
    report.local_rank = outer ? outer->local_rank : end.local_rank;
    report.rank = workers_.rank_of(end.local_rank);
    report.pid = end.exit.pid;
    report.signaled = end.exit.signaled;
    report.status = end.exit.status;
    report.dumped_core = end.exit.dumped_core;
    report.by_us = end.by_us;
    if (end.start_failure) {
        report.exec_failure = end.start_failure->what;
        report.failed_at_exec = end.start_failure->code == Errc::Refused;
        report.start_errno = end.start_failure->sys;
    }
    const TimePoint started = workers_.at(end.local_rank).started;
    if (started != TimePoint{}) report.after_start_ns = (MonotonicClock::now() - started).count();
    if (workers_.segment) report.steps = workers_.steps_of(end.local_rank);
    if (const std::optional<CommittedTime> committed = workers_.committed_time(end.local_rank)) {
        report.commits = committed->commits;
        report.useful_ns = committed->time.count();
    }
    return report;
}

/// Notes when the worker has written its error report: it has failed by itself if that was before we stopped
/// it.
void WorkerEnds::note_error_report(const agent_action::ReportExit& end, const std::string& content,
                                   rdzv::WorkerExited& report) {
    const os::BlockingCall looks_at_file(parts_.loop.keepalive());
    const Worker& worker = workers_.at(end.local_rank);
    const TimePoint written = time_of_report(worker.error_path, content, lead_of_reports(), worker.started);
    report.error_age_ns = (MonotonicClock::now() - written).count();
    report.stopped_failing =
        worker.killed_failing || (end.by_us && written + kFileClockTick < worker.stop_asked);
    report.by_us = end.by_us && !report.stopped_failing;
}

/// Adds what may explain a worker's failure: its last lines, its error report, the system's facts.
void WorkerEnds::explain(int local_rank, const std::string& error_report, rdzv::WorkerExited& report) {
    const os::BlockingCall reads_logs(parts_.loop.keepalive());
    const int logged_rank = workers_.logged_rank_of(local_rank);
    parts_.output.read_rest_of(logged_rank);
    if (const std::string meaning = meaning_of(local_rank, error_report, report); !meaning.empty())
        report.meaning = meaning;
    report.last_stderr = parts_.output.last_stderr(logged_rank);
    report.error_file = readable_error_file(error_report);
    if (!report.stopped_failing && report.meaning.empty())
        report.meaning = explain_death(witness_.facts(report.pid, signal_behind(report)));
    report.last_collective = describe_line(workers_.segment->line(local_rank));
}

/// The meaning that ddprun itself knows; "": none.
std::string WorkerEnds::meaning_of(int local_rank, const std::string& error_report,
                                   const rdzv::WorkerExited& report) const {
    if (const std::string& why = workers_.at(local_rank).kill_why; !why.empty()) return why;
    const Warden* const warden = parts_.warden;
    if (report.signaled && report.status == SIGKILL && warden != nullptr && warden->has_killed())
        return "its ddprun stood still for longer than --heartbeat-timeout: the warden killed the workers";
    const int absent = workers_.absent_rank;
    if (absent < 0 || report.signaled || !report.meaning.empty()) return "";
    const bool has_waited = workers_.segment->line(local_rank).joined != 0 ||
                            error_report.find(fmt::format("rank {} was lost", absent)) != std::string::npos;
    return has_waited ? fmt::format("rank {} ended with 0 before it had joined", absent) : "";
}

void WorkerEnds::send() {
    std::vector<rdzv::WorkerExited> exits = std::exchange(exits_, {});
    std::stable_sort(exits.begin(), exits.end(),
                     [](const auto& a, const auto& b) { return likely_order(a) < likely_order(b); });
    for (const rdzv::WorkerExited& exit : exits) parts_.send(exit);
}

// ---- processes that workers leave

void LeftProcesses::bury(const agent_action::BuryGroup& action) {
    // Without /proc the group's processes cannot be found later.
    const int signal = has_own_proc() ? action.signal : SIGKILL;
    // Signal the group while its leader is still a zombie: after the reap the id may belong to someone else.
    // The warden's table first, for the same reason.
    if (signal != 0) (void)system_.signal_group(action.pid, signal);
    const auto found = std::ranges::find(workers_.state.workers, action.pid, &AgentState::Worker::pid);
    const auto local_rank = static_cast<int>(found - workers_.state.workers.begin());
    const int rank = workers_.rank_of(local_rank);
    if (warden_ != nullptr) warden_->set_group(local_rank, 0);
    system_.reap(action.pid);
    if (signal != SIGKILL && system_.group_exists(action.pid)) {
        (void)system_.signal_group(action.pid, SIGCONT);  // a stopped process would sleep through the grace
        loop_.call_after(kStrayGrace, [this, group = action.pid, rank] { kill_rest_of_group(group, rank); });
    }
    if (workers_.state.may_be_left()) {
        const WorkerMark mark{config_.mark, workers_.at(local_rank).error_path, workers_.order.generation};
        loop_.call_after(kRestSearch, [this, mark, rank] { end_rest_of(mark, rank, SIGTERM); });
    }
    // The worker had the terminal (--attach): take it back, or our next read or write of it stops us.
    if (workers_.at(local_rank).plan.attached) take_terminal_back();
}

std::string count_processes(std::size_t processes) {
    return processes == 1 ? "1 process" : fmt::format("{} processes", processes);
}

/// Kills our own descendants in the group. The group's number cannot be trusted any more: all its processes
/// may have ended, and the number may belong to another group.
void LeftProcesses::kill_rest_of_group(pid_t group, int rank) {
    if (workers_.state.phase == AgentState::Phase::Sweeping || workers_.state.local_rank_of(group) >= 0)
        return;
    std::vector<pid_t> rest = find();
    std::erase_if(rest, [&](pid_t pid) { return system_.group_of(pid) != group; });
    for (const pid_t pid : rest) (void)system_.signal_process(pid, SIGKILL);
    if (!rest.empty()) log_.info("killing {} left behind by rank {}", count_processes(rest.size()), rank);
}

/// Ends what a worker that starts again has left in other groups. A restart of all workers finds it by
/// itself.
void LeftProcesses::end_rest_of(const WorkerMark& worker, int rank, int signal) {
    if (!has_own_proc() || !workers_.state.is_under_way()) return;
    const std::vector<pid_t> rest = marked_among(find(), worker);
    if (rest.empty()) return;
    for (const pid_t pid : rest) {
        (void)system_.signal_process(pid, signal);
        if (signal == SIGTERM) (void)system_.signal_process(pid, SIGCONT);
    }
    if (signal == SIGKILL)
        return log_.info("killing {} left behind by rank {}", count_processes(rest.size()), rank);
    loop_.call_after(kStrayGrace, [this, worker, rank] { end_rest_of(worker, rank, SIGKILL); });
}

/// Finds the descendants of our workers, adopted by us or still below a worker. Reads /proc; without it,
/// searches for the mark.
std::vector<pid_t> LeftProcesses::find() const {
    std::vector<pid_t> found = has_own_proc() ? system_.descendants() : marked_processes(config_.mark);
    if (warden_ != nullptr) std::erase(found, warden_->pid());
    return found;
}

bool LeftProcesses::has_been_asked(pid_t pid) const {
    if (std::ranges::count(workers_.state.asked_strays, pid) > 0) return true;
    const pid_t group = system_.group_of(pid);
    return std::ranges::any_of(workers_.state.workers,
                               [&](const AgentState::Worker& worker) { return worker.pid == group; });
}

std::vector<pid_t> LeftProcesses::sweep(int signal) {
    // Kill the cgroup before a last search, which can miss a tree of processes that keeps forking.
    if (config_.cgroup != nullptr && signal == SIGKILL) config_.cgroup->kill();
    std::vector<pid_t> found = find();
    if (config_.cgroup != nullptr && found.empty()) config_.cgroup->kill();
    for (const pid_t stray : found) {
        if (signal == SIGTERM && has_been_asked(stray)) continue;
        (void)system_.signal_process(stray, signal);
        if (signal == SIGTERM) (void)system_.signal_process(stray, SIGCONT);
    }
    return found;
}

// ---- watched files

Result<std::unique_ptr<FileWatch>> FileWatch::open(os::EventLoop& loop) {
    UniqueFd fd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
    if (!fd) return Error::system("inotify_init1");
    std::unique_ptr<FileWatch> watch(new FileWatch(loop, std::move(fd)));
    if (const Status watched =
            loop.watch(watch->fd_.get(), EPOLLIN, [raw = watch.get()](std::uint32_t) { raw->read_events(); });
        !watched)
        return watched.error();
    return watch;
}

FileWatch::~FileWatch() { loop_.unwatch(fd_.get()); }

Status FileWatch::add(const std::string& path, std::function<void()> written) {
    const bool is_there = ::access(path.c_str(), F_OK) == 0;
    const std::size_t slash = path.rfind('/');
    const std::string watched = is_there ? path : path.substr(0, slash);
    const int number = ::inotify_add_watch(fd_.get(), watched.c_str(), IN_CLOSE_WRITE | IN_MOVED_TO);
    if (number < 0) return Error::system("inotify_add_watch " + watched);
    files_[number] = {is_there ? "" : path.substr(slash + 1), std::move(written)};
    return {};
}

void FileWatch::clear() {
    for (const auto& [number, file] : std::exchange(files_, {})) ::inotify_rm_watch(fd_.get(), number);
}

void FileWatch::read_events() {
    alignas(inotify_event) char events[4096];
    const ssize_t n = ::read(fd_.get(), events, sizeof events);
    for (ssize_t at = 0; at < n;) {
        inotify_event event;
        std::memcpy(&event, events + at, sizeof event);
        const char* const name = event.len == 0 ? "" : events + at + sizeof event;
        const auto file = files_.find(event.wd);
        if (file != files_.end() && (event.mask & IN_IGNORED) != 0) files_.erase(file);  // the file is gone
        else if (file != files_.end() && file->second.name == name) file->second.written();
        at += static_cast<ssize_t>(sizeof event + event.len);
    }
}

}  // namespace ddprun
