#include "launcher/supervise/agent.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_set>

#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/lifeline.h"
#include "env/os/proc_stat.h"
#include "env/text.h"
#include "launcher/fabric/transport.h"
#include "launcher/gpu/nvml.h"
#include "launcher/guard/descriptors.h"
#include "launcher/report/error_file.h"
#include "launcher/report/report.h"
#include "launcher/signals.h"

namespace ddprun {

namespace {

/// Workers started before the loop looks at signals, pipes and exits again: 16 take some 5 ms.
constexpr int kSpawnSlice = 16;
/// Fewer, where a program comes from a slow file system: a node that says nothing for seconds is lost.
constexpr Duration kSpawnSliceTime = std::chrono::milliseconds(100);
constexpr std::size_t kMaxErrorFile = 64 * 1024;
constexpr std::size_t kMaxStacks = 512 * 1024;  ///< of one worker, that nobody has taken

/// Which of several exits seen in one sweep came first is not known. A crash explains a sibling's error exit more
/// often than the other way round: what never ran, then signals, then exit codes.
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

/// The signal that ended it; a shell that runs the program passes it on as an exit code above 128.
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

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

}  // namespace

Agent::Agent(os::EventLoop& loop, os::System& system, Output& output, Warden* warden, os::Log& log, AgentConfig config,
             Send send)
    : loop_(loop), system_(system), output_(output), warden_(warden), log_(log), config_(std::move(config)),
      send_(std::move(send)), null_(::open("/dev/null", O_RDWR | O_CLOEXEC)), gpu_release_(loop, system, log) {}

Agent::~Agent() {
    for (const Worker& worker : workers_) {
        if (worker.lifeline) loop_.unwatch(worker.lifeline.get());
    }
    loop_.cancel(deadline_timer_);
}

void Agent::feed(const AgentEvent& event) {
    for (const AgentAction& action : step(state_, event, MonotonicClock::now())) {
        std::visit([this](const auto& one) { perform(one); }, action);
    }
}

// ---- orders of the controller

void Agent::handle(const rdzv::StartGeneration& order) {
    remember_last_workers();
    if (const Status prepared = prepare(order); !prepared) return fail_start(prepared.error().what);
    const bool await_gpus = !last_workers_.empty() && config_.spec.gpu_memory_wait > Duration::zero() && nvml::may_be_there();
    feed(agent_event::StartRequested{order.generation, static_cast<int>(workers_.size()), await_gpus});
}

/// A generation that was stopped before it had any (it waited for the GPUs) leaves those before it to be waited for.
void Agent::remember_last_workers() {
    std::vector<pid_t> pids;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0) pids.push_back(worker.pid);
    }
    if (!pids.empty()) last_workers_ = std::move(pids);
}

Status Agent::prepare(const rdzv::StartGeneration& order) {
    order_ = order;
    first_failure_.reset();
    output_.begin_attempt(static_cast<int>(order.generation) - 1);  // also of those that used up no restart

    Result<std::vector<WorkerPlan>> plans = plan_workers(config_.spec, config_.program, config_.machine, order);
    if (!plans) return plans.error();
    SegmentShape shape{static_cast<int>(plans->size()), order.world_size, order.first_rank, order.generation,
                       config_.machine.cpus};
    Result<std::unique_ptr<SegmentFile>> segment = SegmentFile::create(system_, shape);
    if (!segment) return segment.error();
    segment_ = std::move(*segment);
    if (config_.cgroup != nullptr) {
        if (const Status renewed = config_.cgroup->renew(); !renewed) log_.warning("{}: the workers start in our own cgroup", renewed.error().what);
    }

    for (const Worker& worker : workers_) {
        if (worker.lifeline) loop_.unwatch(worker.lifeline.get());
    }
    workers_.clear();
    Result<std::unique_ptr<FileWatch>> watch = FileWatch::open(loop_);
    if (!watch) log_.debug("error reports are seen when their worker exits: {}", watch.error().what);
    error_files_ = watch ? std::move(*watch) : nullptr;
    for (WorkerPlan& plan : *plans) {
        workers_.emplace_back();
        workers_.back().plan = std::move(plan);
        if (workers_.back().plan.asks_network) listen_to_nccl(workers_.back().plan);
    }
    return config_.pmix == nullptr ? Status{} : config_.pmix->begin(order);
}

/// The node cannot start its workers for a reason that is none of theirs.
void Agent::fail_start(const std::string& why) {
    rdzv::WorkerExited failure{};
    failure.generation = order_.generation;
    failure.rank = order_.first_rank;
    failure.status = 1;
    failure.exec_failure = why;
    send_(failure);
    rdzv::GenerationDrained drained{};
    drained.generation = order_.generation;
    send_(drained);
}

void Agent::handle(const rdzv::StopGeneration& order) {
    if (order.generation != order_.generation) return;
    stop_begins();
    if (segment_ && order.failed_rank >= 0) segment_->abort(order.failed_rank);
    if (const int alive = state_.alive(); alive > 0 && state_.phase == AgentState::Phase::Running) {
        log_.info("stopping {} worker{}: {}", alive, alive == 1 ? "" : "s", order.why);
    }
    if (order.signal == SIGKILL) return kill_all();
    feed(agent_event::StopRequested{order.signal, Duration(order.grace_ns)});
}

/// From now on workers that report errors do so because of us: their collectives end, their peers are signalled before
/// they are.
void Agent::stop_begins() {
    const TimePoint now = MonotonicClock::now();
    for (Worker& worker : workers_) worker.stop_asked = std::min(worker.stop_asked, now);
    if (config_.pmix != nullptr) config_.pmix->end_waiting("the workers are being stopped");
}

void Agent::handle(const rdzv::Notice& notice) {
    if (notice.kind == "signal") {
        if (const Result<std::int64_t> signal = parse_int(notice.text)) forward_signal(static_cast<int>(*signal), SignalFrom::Head);
        return;
    }
    if (notice.kind == "waiting") return log_.info("{}", printable(notice.text));
    if (notice.kind != "preempt") return;
    const std::string packet = lifeline::kPreempt + notice.text.substr(0, lifeline::kMaxPacket - 1);
    for (const Worker& worker : workers_) {
        if (worker.lifeline) (void)::send(worker.lifeline.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

std::optional<std::string> Agent::variable(int local_rank, std::string_view name) const {
    const auto index = static_cast<std::size_t>(local_rank);
    if (index < workers_.size()) {
        const WorkerPlan& plan = workers_[index].plan;
        for (const auto& [key, value] : plan.environment) {
            if (key == name) return value;
        }
        if (std::find(plan.removed.begin(), plan.removed.end(), name) != plan.removed.end()) return std::nullopt;
    }
    const std::string start = std::string(name) + '=';
    for (const std::string& entry : config_.environment) {
        if (entry.starts_with(start)) return entry.substr(start.size());
    }
    return std::nullopt;
}

void Agent::kill_all() {
    stop_begins();
    feed(agent_event::KillRequested{});
}

void Agent::forward_signal(int signal, SignalFrom from) {
    if (!forwarded_.is_new(signal, from, loop_.now())) return;
    for (const AgentState::Worker& worker : state_.workers) {
        if (worker.pid != 0 && worker.state != WorkerState::Ended) (void)system_.signal_group(worker.pid, signal);
    }
}

bool Agent::signal_worker(int local_rank, int signal) {
    const AgentState::Worker& worker = state_.workers[static_cast<std::size_t>(local_rank)];
    if (worker.pid == 0 || worker.state == WorkerState::Ended) return false;
    return system_.signal_group(worker.pid, signal).has_value();
}

// ---- starting workers

void Agent::perform(const agent_action::AwaitGpus&) {
    gpu_release_.begin(last_workers_, config_.spec.gpu_memory_wait, [this] { feed(agent_event::GpusFree{}); });
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
        const Result<pid_t> pid = spawn(local_rank);
        if (pid) feed(agent_event::Spawned{local_rank, *pid});
        else feed(agent_event::SpawnFailed{local_rank, pid.error().what});
    }
    slice_posted_ = pending_spawn_ >= 0 && state_.phase == AgentState::Phase::Starting;
    if (slice_posted_) loop_.post([this] { spawn_slice(); });
    send_exits();
}

Result<pid_t> Agent::spawn(int local_rank) {
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    WorkerEnv env = worker.plan.env;
    os::SpawnSpec spec;
    spec.program = worker.plan.program;
    spec.arguments = worker.plan.arguments;
    spec.cpus = worker.plan.cpus;
    spec.memory_nodes = worker.plan.memory_nodes;
    spec.foreground_terminal = worker.plan.attached;
    spec.open_files = config_.open_files;
    spec.lock_limit = config_.mark.lock_limit;
    if (config_.cgroup != nullptr) spec.cgroup = config_.cgroup->descriptor();

    std::vector<UniqueFd> childs;  // the child's ends; closed here when this function returns
    if (const Status streams = connect_streams(local_rank, spec, childs); !streams) return streams.error();
    if (const Status given = give_descriptors(worker, env, spec, childs); !given) return given.error();
    spec.environment = environment_of(worker, env);

    Result<pid_t> pid = system_.spawn(spec);
    if (!pid) return pid;
    if (warden_ != nullptr) warden_->set_group(local_rank, *pid);
    worker.started = MonotonicClock::now();
    listen_to_lifeline(local_rank);
    watch_error_file(local_rank);
    return pid;
}

Status Agent::connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec, std::vector<UniqueFd>& childs) {
    if (!plan.reads_stdin) {
        spec.descriptors.push_back({null_.get(), 0});
        return {};
    }
    if (::isatty(0) == 0) return {};  // a file or a pipe: the worker has it itself
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe2");
    childs.emplace_back(ends[0]);
    UniqueFd ours(ends[1]);
    spec.descriptors.push_back({ends[0], 0});
    if (const Status set = set_nonblocking(ours.get()); !set) return set;
    stdin_relay_.reset();  // the last generation's, before the terminal is watched again
    stdin_relay_ = std::make_unique<StdinRelay>(loop_, 0, std::move(ours));
    return {};
}

Status Agent::connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs) {
    const WorkerPlan& plan = workers_[static_cast<std::size_t>(local_rank)].plan;
    if (plan.attached) return {};  // the terminal itself
    if (const Status input = connect_stdin(plan, spec, childs); !input) return input;

    const StreamOwner owner = owner_of(local_rank);
    for (const Output::Stream stream : {Output::Stream::Out, Output::Stream::Err}) {
        const int childs_fd = stream == Output::Stream::Out ? 1 : 2;
        if (!output_.needs_pipe(owner, stream)) {
            // Without the file (a full disk) a pipe it is: the loss is said, the last lines of stderr are kept.
            if (Result<UniqueFd> file = output_.direct_file(owner, stream); file) {
                spec.descriptors.push_back({file->get(), childs_fd});
                childs.push_back(std::move(*file));
                continue;
            }
        }
        Result<os::System::Pipe> pipe = system_.make_pipe(pipe_bytes(static_cast<int>(workers_.size())));
        if (!pipe) return pipe.error();
        if (const Status added = output_.add(std::move(pipe->read), owner, stream); !added) return added;
        spec.descriptors.push_back({pipe->write.get(), childs_fd});
        childs.push_back(std::move(pipe->write));
    }
    return {};
}

Status Agent::give_descriptors(Worker& worker, WorkerEnv& env, os::SpawnSpec& spec, std::vector<UniqueFd>& childs) {
    Result<os::System::SocketPair> lifeline = system_.make_socket_pair();
    if (!lifeline) return lifeline.error();
    worker.lifeline = std::move(lifeline->ours);
    const InheritedNumbers numbers = inherited_numbers(config_.open_files);
    // The ranks of an outer launcher are several agents' on one node: they share memory of their own.
    const bool has_segment = !config_.spec.outer_rank;
    if (has_segment) spec.descriptors.push_back({segment_->fd(), numbers.segment});
    if (config_.passed_descriptor) spec.descriptors.push_back({*config_.passed_descriptor, *config_.passed_descriptor});
    spec.descriptors.push_back({lifeline->theirs.get(), numbers.lifeline});
    spec.descriptors.push_back({config_.store, numbers.store});
    childs.push_back(std::move(lifeline->theirs));

    if (const std::string directory = output_.attempt_directory(); !directory.empty()) {
        worker.error_path = fmt::format("{}/{}/error.json", directory, env.rank);
    } else {
        // A nameless file: a worker opens it by our descriptor, and nothing is left behind whoever is killed.
        Result<UniqueFd> file = system_.make_error_file();
        if (!file) return file.error();
        worker.error_file = std::move(*file);
        worker.error_path = fmt::format("/proc/{}/fd/{}", ::getpid(), worker.error_file.get());
    }
    env.error_file = worker.error_path;
    env.generation = order_.generation;
    env.store = fmt::format("unix:/proc/self/fd/{}", numbers.store);
    env.token = config_.token;
    env.segment_fd = has_segment ? numbers.segment : -1;
    env.lifeline_fd = numbers.lifeline;
    return {};
}

std::vector<std::string> Agent::environment_of(const Worker& worker, const WorkerEnv& env) const {
    std::vector<std::string> result;
    result.reserve(config_.environment.size() + 40);
    for (const auto& [name, value] : to_environment(env)) result.push_back(name + '=' + value);
    for (const auto& [name, value] : worker.plan.environment) result.push_back(name + '=' + value);
    result.push_back(config_.mark.variable);
    if (config_.pmix != nullptr) add_pmix_variables(worker.plan.local_index, result);

    std::unordered_set<std::string_view> taken(worker.plan.removed.begin(), worker.plan.removed.end());
    for (const std::string& variable : result) taken.insert(name_of(variable));
    const std::size_t ours = result.size();
    for (const std::string& variable : config_.environment) {
        if (!taken.contains(name_of(variable))) result.push_back(variable);
    }
    // What the user reads first in `env` is what he set; ours comes last, as exported later.
    std::rotate(result.begin(), result.begin() + static_cast<std::ptrdiff_t>(ours), result.end());
    return result;
}

void Agent::add_pmix_variables(int local_index, std::vector<std::string>& environment) const {
    for (std::string& variable : config_.pmix->environment(local_index)) {
        const std::string_view name = name_of(variable);
        const bool is_set_by_user = name.starts_with("OMPI_MCA_") && this->variable(local_index, name);
        if (!is_set_by_user) environment.push_back(std::move(variable));
    }
}

StreamOwner Agent::owner_of(int local_rank) const {
    return {order_.first_rank + local_rank, local_rank, config_.spec.role, config_.host};
}

void Agent::perform(const agent_action::ReportStarted&) {
    rdzv::WorkersStarted started{};
    started.generation = state_.generation;
    send_(started);
}

// ---- what NCCL says

/// A fabric that NCCL does not use is a job that is slow without a word: the plug-in is not found, and it takes sockets.
void Agent::listen_to_nccl(WorkerPlan& plan) {
    Result<std::unique_ptr<NcclWords>> words = NcclWords::open(loop_, [this](const std::string& network) {
        const TransportVerdict verdict = judge_transport(config_.machine.fabric.fabric, network);
        if (!verdict.as_meant) log_.warning("{}", verdict.line);
        else if (order_.group_rank == 0) log_.info("{}", verdict.line);
    });
    if (!words) return log_.warning("which network NCCL takes is not looked at: {}", words.error().what);
    nccl_words_ = std::move(*words);
    plan.environment.insert(plan.environment.end(), {{"NCCL_DEBUG", "INFO"}, {"NCCL_DEBUG_SUBSYS", "INIT"}, {"NCCL_DEBUG_FILE", nccl_words_->path()}});
}

// ---- lifelines

void Agent::listen_to_lifeline(int local_rank) {
    const int fd = workers_[static_cast<std::size_t>(local_rank)].lifeline.get();
    const Status watched = loop_.watch(fd, EPOLLIN, [this, local_rank](std::uint32_t) { read_lifeline(local_rank); });
    if (!watched) log_.warning("rank {}: no lifeline: {}", order_.first_rank + local_rank, watched.error().what);
}

void Agent::read_lifeline(int local_rank) {
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    constexpr int kPacketsAtOnce = 64;  // a worker that floods us must not keep us from the others
    for (int i = 0; i < kPacketsAtOnce && worker.lifeline; ++i) {
        char packet[lifeline::kMaxPacket];
        const ssize_t n = ::recv(worker.lifeline.get(), packet, sizeof packet, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            loop_.unwatch(worker.lifeline.get());
            worker.lifeline.reset();
            return;
        }
        if (packet[0] == lifeline::kHeartbeat || packet[0] == lifeline::kReady) {
            RankLine& line = segment_->line(local_rank);
            line.progress_ns.store(MonotonicClock::now().time_since_epoch().count(), std::memory_order_relaxed);
            const Result<std::uint64_t> steps = parse_uint(std::string_view(packet + 1, static_cast<std::size_t>(n) - 1));
            if (steps) line.step.store(*steps, std::memory_order_relaxed);
        } else if (packet[0] == lifeline::kStack && worker.stacks.size() < kMaxStacks) {
            worker.stacks.append(packet + 1, static_cast<std::size_t>(n) - 1);
        }
    }
}

std::string Agent::take_stacks(int local_rank) {
    if (local_rank >= static_cast<int>(workers_.size())) return {};
    read_lifeline(local_rank);
    return std::exchange(workers_[static_cast<std::size_t>(local_rank)].stacks, {});
}

// ---- ends

void Agent::on_child_exits() {
    if (warden_ != nullptr) warden_->wake_if_stopped();
    while (const std::optional<os::ChildExit> exit = system_.next_exit()) {
        if (warden_ != nullptr && exit->pid == warden_->pid()) {
            system_.reap(exit->pid);
            const Status again = warden_->restart();
            if (again) log_.warning("the warden (pid {}) was killed; started another (pid {})", exit->pid, warden_->pid());
            else log_.warning("the warden (pid {}) was killed, and there is no other: {}", exit->pid, again.error().what);
            continue;
        }
        feed(agent_event::Exited{*exit});
    }
    send_exits();
}

void Agent::send_exits() {
    std::vector<rdzv::WorkerExited> exits = std::exchange(exits_, {});
    std::stable_sort(exits.begin(), exits.end(), [](const auto& a, const auto& b) { return likely_order(a) < likely_order(b); });
    for (const rdzv::WorkerExited& exit : exits) send_(exit);
}

// ---- workers that have failed and do not exit

void Agent::watch_error_file(int local_rank) {
    if (!error_files_) return;
    const Status watched = error_files_->add(workers_[static_cast<std::size_t>(local_rank)].error_path, [this, local_rank] { error_file_written(local_rank); });
    if (!watched) return log_.debug("rank {}: {}", order_.first_rank + local_rank, watched.error().what);
    loop_.post([this, local_rank] { error_file_written(local_rank); });  // it runs already, and may have been faster
}

void Agent::error_file_written(int local_rank) {
    if (local_rank >= static_cast<int>(workers_.size())) return;
    Worker& worker = workers_[static_cast<std::size_t>(local_rank)];
    if (worker.is_awaited || read_error_file(worker).empty()) return;
    worker.is_awaited = true;
    await_exit(local_rank, "reported an error");
}

void Agent::await_exit(int local_rank, const std::string& what_it_did) {
    const pid_t pid = state_.workers[static_cast<std::size_t>(local_rank)].pid;
    loop_.call_after(config_.spec.failure_grace, [this, local_rank, pid, what_it_did] { kill_failing(local_rank, pid, what_it_did); });
}

void Agent::kill_failing(int local_rank, pid_t pid, const std::string& what_it_did) {
    const auto index = static_cast<std::size_t>(local_rank);
    if (index >= state_.workers.size() || state_.workers[index].pid != pid || state_.workers[index].state == WorkerState::Ended) return;
    if (os::is_dumping_core(pid)) return await_exit(local_rank, what_it_did);  // it is on its way
    log_.warning("rank {} (pid {}) {} and has not exited {} later (--failure-grace); killing it", order_.first_rank + local_rank, pid, what_it_did,
                 format_duration(config_.spec.failure_grace));
    if (!workers_[index].killed_failing) workers_[index].killed_failing = signal_worker(local_rank, SIGKILL);
}

void Agent::perform(const agent_action::SignalGroup& action) {
    if (const Status sent = system_.signal_group(action.pid, action.signal); !sent) {
        log_.warning("{}; ignoring", sent.error().what);
    }
}

void Agent::perform(const agent_action::BuryGroup& action) {
    // Kill the group while its leader is still a zombie: after the reap the id may belong to someone else.
    // The warden's table first, for the same reason.
    (void)system_.signal_group(action.pid, SIGKILL);
    const auto local_rank = static_cast<std::size_t>(
        std::find_if(state_.workers.begin(), state_.workers.end(),
                     [&](const AgentState::Worker& worker) { return worker.pid == action.pid; }) - state_.workers.begin());
    if (warden_ != nullptr) warden_->set_group(static_cast<int>(local_rank), 0);
    system_.reap(action.pid);
    // It had the terminal (--attach): take it back, or our next read or write of it stops us.
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
    const std::string error_report = failed ? read_error_file(worker) : "";
    if (!error_report.empty()) {
        const TimePoint written = last_write(worker.error_path);
        report.error_age_ns = (MonotonicClock::now() - written).count();
        report.stopped_failing = worker.killed_failing || (action.by_us && written + kFileClockTick < worker.stop_asked);
        report.by_us = action.by_us && !report.stopped_failing;
    }
    if (worker.started != TimePoint{}) report.after_start_ns = (MonotonicClock::now() - worker.started).count();
    if (segment_) {
        const RankLine& line = segment_->line(action.local_rank);
        const std::uint64_t steps = line.step.load();
        if (steps > 0 || line.joined.load() != 0) report.steps = static_cast<std::int64_t>(steps);
    }
    if (failed && !report.by_us) {
        output_.read_rest_of(rank);
        report.last_stderr = output_.last_stderr(rank);
        report.error_file = readable_error_file(error_report);
        if (!report.stopped_failing && report.meaning.empty()) report.meaning = explain_death(witness_.facts(report.pid, signal_behind(report)));
        report.last_collective = describe_line(segment_->line(action.local_rank));
        log_.warning("rank {} (pid {}) {}", rank, report.pid, how_it_ended(report));
        if (!first_failure_) first_failure_ = report;
    }
    exits_.push_back(std::move(report));
}

std::string Agent::read_error_file(const Worker& worker) const {
    Result<std::string> content = read_regular_file(worker.error_path, kMaxErrorFile);
    return content ? std::move(*content) : std::string();
}

std::string Agent::error_report(int rank) const {
    const int local_rank = rank - order_.first_rank;
    if (local_rank < 0 || local_rank >= static_cast<int>(workers_.size())) return {};
    return read_error_file(workers_[static_cast<std::size_t>(local_rank)]);
}

void Agent::perform(const agent_action::Sweep&) {
    // First what a look at /proc can miss: a tree of processes that keeps forking.
    if (config_.cgroup != nullptr) config_.cgroup->kill();
    std::vector<pid_t> strays = system_.descendants();
    if (warden_ != nullptr) std::erase(strays, warden_->pid());
    for (const pid_t stray : strays) (void)system_.signal_process(stray, SIGKILL);
    if (!strays.empty()) log_.info("killing {} left behind by the workers", strays.size() == 1 ? "1 process" : fmt::format("{} processes", strays.size()));
    feed(agent_event::Swept{std::move(strays)});
}

void Agent::perform(const agent_action::SetDeadline& action) {
    loop_.cancel(deadline_timer_);
    deadline_timer_ = 0;
    if (action.when == kNever) return;
    deadline_timer_ = loop_.call_at(action.when, [this] { feed(agent_event::DeadlinePassed{}); });
}

void Agent::perform(const agent_action::ReportDrained& action) {
    send_exits();
    output_.finish_attempt();
    if (config_.pmix != nullptr) config_.pmix->end_generation();
    rdzv::GenerationDrained drained{};
    drained.generation = state_.generation;
    for (const pid_t pid : action.unkillable) {
        drained.notes.push_back(fmt::format("process {} on {} could not be killed (uninterruptible?)", pid, config_.host));
    }
    send_(drained);
}

}  // namespace ddprun
