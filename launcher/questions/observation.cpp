#include "launcher/questions/observation.h"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "env/trace_file.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

std::string name_of(JobState::Phase phase) {
    switch (phase) {
        case JobState::Phase::Joining: return "joining";
        case JobState::Phase::Running: return "running";
        case JobState::Phase::Suspended: return "recovering";
        case JobState::Phase::Succeeded: return "ending";
        case JobState::Phase::Stopping: return "stopping";
        case JobState::Phase::BackingOff: return "backing off";
        case JobState::Phase::Finished: return "finished";
    }
    return "";
}

std::string name_of(AgentState::Phase phase) {
    switch (phase) {
        case AgentState::Phase::Idle: return "idle";
        case AgentState::Phase::AwaitingGpus: return "waiting for GPU memory";
        case AgentState::Phase::Starting: return "starting";
        case AgentState::Phase::Running: return "running";
        case AgentState::Phase::Suspended: return "waiting for the next generation";
        case AgentState::Phase::Stopping: return "stopping";
        case AgentState::Phase::Killing: return "killing";
        case AgentState::Phase::Sweeping: return "sweeping";
    }
    return "";
}

std::string name_of(WorkerState state) {
    switch (state) {
        case WorkerState::Running: return "running";
        case WorkerState::Stopping: return "stopping";
        case WorkerState::Killed: return "killed";
        case WorkerState::Ended: return "ended";
    }
    return "";
}

std::string name_of(SignalAction action) {
    switch (action) {
        case SignalAction::Forward: return "forward";
        case SignalAction::Stop: return "stop";
        case SignalAction::Preempt: return "preempt";
        case SignalAction::Ignore: return "ignore";
    }
    return "";
}

}  // namespace

Status Observation::open(ControlHandler questions) {
    const EventOrigin origin{parts_.job, parts_.spec.rendezvous.run_id, parts_.host};
    if (!parts_.spec.events_file.empty()) {
        const auto console_at = [this](int fd) -> EventFile::Write {
            const std::optional<Output::Stream> console = parts_.output.console_at(fd);
            if (!console) return nullptr;
            return [this, console](std::string_view line) { return parts_.output.say(line, *console); };
        };
        Result<std::unique_ptr<EventFile>> events =
            EventFile::open(parts_.spec.events_file, origin, console_at,
                            [this](std::string_view why) { parts_.log.warning("--events: {}", why); });
        if (!events) return Error{Errc::InvalidArgument, "--events: " + events.error().what, 0};
        events_ = std::move(*events);
    }
    if (const Status traced = open_trace(origin); !traced) return traced.error().with("--trace");
    if (parts_.spec.metrics_at) {
        Result<Listener> listener = listen_tcp(*parts_.spec.metrics_at);
        if (!listener) {
            Error error = listener.error().with("--metrics-port");
            if (error.sys == EADDRNOTAVAIL)
                error.what += " (this host has no such address; *:PORT is all of them)";
            return error;
        }
        Result<std::unique_ptr<RequestServer>> metrics =
            serve_metrics(parts_.loop, std::move(listener->fd), [this] { return render_metrics(status()); });
        if (!metrics) return metrics.error().with("--metrics-port");
        metrics_ = std::move(*metrics);
        parts_.log.info("metrics at http://{}/metrics", to_string(listener->bound));
    }
    Result<std::unique_ptr<RequestServer>> control =
        serve_questions(parts_.loop, parts_.job, std::move(questions));
    if (control) {
        control_ = std::move(*control);
    } else {
        parts_.log.warning("{}; 'ddprun ps' will not see this job", control.error().what);
    }
    write("job_started", {{"program", parts_.program}, {"pid", static_cast<std::int64_t>(::getpid())}});
    return {};
}

Status Observation::open_trace(const EventOrigin& origin) {
    const std::string& directory = parts_.spec.trace;
    if (directory.empty()) return {};
    const Status made = make_directories(directory);
    if (!made) return Error{Errc::InvalidArgument, made.error().what, 0};
    const std::int64_t now = MonotonicClock::now().time_since_epoch().count();
    Result<std::unique_ptr<EventFile>> file = EventFile::open(
        fmt::format("{}/ddprun-{}-{}{}", directory, parts_.host, ::getpid(), kTraceEventsSuffix), origin,
        nullptr, [this](std::string_view why) { parts_.log.warning("--trace: {}", why); });
    if (!file) return Error{Errc::InvalidArgument, file.error().what, 0};
    traced_ = std::move(*file);
    clock_ = {{"clock", boot_id()}, {"clock_zero_ns", static_cast<std::int64_t>(wall_clock() * 1e9) - now}};
    return {};
}

// ---- status

WorkerStatus Observation::worker_status(int local_rank) const {
    const Agent& agent = parts_.agent;
    const AgentState::Worker& worker = agent.state().workers[static_cast<std::size_t>(local_rank)];
    const TimePoint now = MonotonicClock::now();
    WorkerStatus status;
    status.local_rank = local_rank;
    status.rank = agent.first_rank() + local_rank;
    status.pid = worker.pid;
    status.state = worker.pid == 0 ? "waiting" : name_of(worker.state);
    if (worker.pid == 0) return status;
    const TimePoint started = agent.started(local_rank);
    status.seconds = in_seconds(now - started);
    status.quiet_seconds = in_seconds(now - std::max(started, parts_.output.last_output(status.rank)));
    if (worker.state != WorkerState::Ended) {
        if (const std::optional<ProcStat> stat = proc_stat_of(worker.pid)) {
            status.cpu_seconds =
                static_cast<double>(stat->ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
            status.rss_bytes = stat->rss_pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
        }
    }
    if (agent.segment() == nullptr || local_rank >= agent.segment()->size()) return status;
    const RankLine& line = agent.segment()->line(local_rank);
    status.uses_libddp = line.joined.load(std::memory_order_acquire) != 0;
    status.step = line.step.load(std::memory_order_relaxed);
    status.reports_steps =
        status.uses_libddp || status.step > 0 || line.progress_ns.load(std::memory_order_relaxed) != 0;
    status.comm_seconds = static_cast<double>(line.comm_ns.load(std::memory_order_relaxed)) / 1e9;
    status.collective = describe_line(line);
    if (const std::optional<CommittedTime> committed = agent.committed_time(local_rank))
        status.useful_seconds = in_seconds(committed->time);
    return status;
}

JobStatus Observation::status() const {
    JobStatus status;
    status.job = parts_.job;
    status.run_id = parts_.spec.rendezvous.run_id;
    status.program = parts_.program;
    status.host = parts_.host;
    status.pid = ::getpid();
    status.generation = order_.generation;
    status.world_size = order_.world_size;
    status.nodes = order_.group_world_size;
    status.restarts_used = order_.restart_count;
    status.max_restarts = parts_.spec.restart.max_restarts;
    status.phase = name_of(parts_.agent.state().phase);
    parts_.add_job(status);
    const TimePoint now = MonotonicClock::now();
    status.seconds = in_seconds(now - begun_);
    status.log_directory = parts_.output.attempt_directory();
    status.lost_output_bytes = parts_.output.loss().bytes;
    status.hosts.push_back(
        {parts_.host, status.pid, name_of(parts_.agent.state().phase), status.log_directory, {}, ""});
    const int workers = static_cast<int>(parts_.agent.state().workers.size());
    for (int local_rank = 0; local_rank < workers; ++local_rank)
        status.workers.push_back(worker_status(local_rank));
    return status;
}

void add_job(JobStatus& status, const JobState& state, const JobTime& time, Duration latest,
             RecoverSpec::Mode recover) {
    status.useful_before = in_seconds(time.useful.value_or(latest) - latest);
    status.lost_to_failures = in_seconds(time.lost.failures);
    status.lost_to_restarts = in_seconds(time.lost.restarts);
    status.lost_to_rehearsals = in_seconds(time.lost.rehearsals);

    status.is_head = true;
    status.phase = name_of(state.phase);
    status.restarts_used = state.restarts_used;
    status.recoveries = state.recovery.recoveries;
    if (state.phase == JobState::Phase::Running) status.recovery = describe_recovery(state, recover);
}

// ---- events

void Observation::write(std::string event, Fields fields, std::optional<std::uint64_t> generation) {
    if (!events_ && !traced_) return;
    const os::BlockingCall writes_file(parts_.loop.keepalive());
    JobEventLine line{std::move(event), generation.value_or(order_.generation), std::move(fields)};
    if (events_) events_->write(line);
    if (!traced_) return;
    line.fields.insert(line.fields.end(), clock_.begin(), clock_.end());
    line.fields.emplace_back("monotonic_ns", MonotonicClock::now().time_since_epoch().count());
    traced_->write(line);
}

void Observation::generation_started(const rdzv::StartGeneration& order) {
    const int restarts_before = std::exchange(order_, order).restart_count;
    if (order.restart_count > restarts_before) {
        write("restart", {{"restart", std::int64_t{order.restart_count}},
                          {"max_restarts", std::int64_t{parts_.spec.restart.max_restarts}}});
    }
    Fields fields = {{"world_size", std::int64_t{order.world_size}},
                     {"nodes", std::int64_t{order.group_world_size}},
                     {"group_rank", std::int64_t{order.group_rank}}};
    if (order.in_place) fields.emplace_back("in_place", true);
    write("generation_started", std::move(fields));
}

void Observation::workers_started() {
    if (!events_ && !traced_) return;
    const std::vector<AgentState::Worker>& workers = parts_.agent.state().workers;
    started_.resize(workers.size());
    for (std::size_t i = 0; i < workers.size(); ++i) {
        if (std::exchange(started_[i], workers[i].pid) == workers[i].pid) continue;  // it goes on
        const auto local_rank = static_cast<std::int64_t>(i);
        write("worker_started", {{"rank", parts_.agent.first_rank() + local_rank},
                                 {"local_rank", local_rank},
                                 {"pid", std::int64_t{workers[i].pid}}});
    }
}

void Observation::node_says(const rdzv::GenerationEnded& ended, const std::string& host) {
    write("generation_ended", {{"on", host}}, ended.generation);
}

void Observation::node_says(const rdzv::WorkerExited& exit, const std::string& host) {
    Fields fields = {{"rank", std::int64_t{exit.rank}},
                     {"local_rank", std::int64_t{exit.local_rank}},
                     {"pid", std::int64_t{exit.pid}},
                     {"on", host}};
    if (!exit.exec_failure.empty()) fields.emplace_back("exec_failure", exit.exec_failure);
    else if (exit.signaled) fields.emplace_back("signal", signal_name(exit.status));
    else fields.emplace_back("exit_code", std::int64_t{exit.status});
    fields.emplace_back("seconds", in_seconds(Duration(exit.after_start_ns)));
    fields.emplace_back("stopped_by_ddprun", exit.by_us);
    if (!exit.meaning.empty()) fields.emplace_back("meaning", exit.meaning);
    if (!exit.last_collective.empty()) fields.emplace_back("last_collective", exit.last_collective);
    write("worker_exited", std::move(fields), exit.generation);
}

void Observation::decided(const JobEvent& event) {
    if (const auto* hang = std::get_if<job_event::HangFound>(&event)) write("hang", {{"what", hang->what}});
    else if (const auto* lost = std::get_if<job_event::NodeLost>(&event))
        write("node_lost", {{"what", lost->why}});
    else if (const auto* outnumbered = std::get_if<job_event::Outnumbered>(&event))
        write("outnumbered", {{"what", outnumbered->why}});
    else if (const auto* preempt = std::get_if<job_event::PreemptAsked>(&event))
        write("preempt", {{"what", preempt->why}});
    else if (const auto* waiting = std::get_if<job_event::NodesWaiting>(&event))
        write("nodes_waiting", {{"nodes", std::int64_t{waiting->nodes}}});
    else if (const auto* stop = std::get_if<job_event::StopAsked>(&event);
             stop != nullptr && stop->others_go_on)
        write("node_leaving", {{"what", stop->host}});
    else if (const auto* failed = std::get_if<job_event::JoinFailed>(&event))
        write("join_failed", {{"what", failed->why}});
}

void Observation::recovered(const job_action::Recovered& recovery) {
    std::vector<std::string> ranks;
    for (const int rank : recovery.ranks) ranks.push_back(std::to_string(rank));
    Fields fields = {
        {"cause", recovery.cause}, {"ranks", join(ranks, ",")}, {"seconds", in_seconds(recovery.took)}};
    if (recovery.steps >= 0) fields.emplace_back("steps", recovery.steps);
    write("recovered", std::move(fields));
}

void Observation::signalled(int signal, SignalAction action) {
    write("signal",
          {{"signal", signal_name(signal)}, {"action", name_of(action)}, {"by", "signal to ddprun"}});
}

void Observation::signal_asked(int signal, std::optional<int> rank) {
    Fields fields = {{"signal", signal_name(signal)}, {"action", "forward"}, {"by", "ddprun signal"}};
    if (rank) fields.emplace_back("rank", std::int64_t{*rank});
    write("signal", std::move(fields));
}

void Observation::finished(const JobEnd& end) { finished(exit_code(end), end.failure); }

void Observation::finished(int exit_code, const std::string& failure) {
    Fields fields = {{"exit_code", std::int64_t{exit_code}},
                     {"seconds", in_seconds(MonotonicClock::now() - begun_)}};
    if (!failure.empty()) fields.emplace_back("failure", failure);
    write("finished", std::move(fields));
}

}  // namespace ddprun
