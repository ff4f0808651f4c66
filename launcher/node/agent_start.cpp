// How the agent starts workers, a few at a time, and what each worker gets.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_set>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "launcher/guard/descriptors.h"
#include "launcher/machine/fabric/transport.h"
#include "launcher/node/agent.h"

namespace ddprun {
namespace {

/// The number of workers started before the loop handles signals, pipes and exits again: 16 take some 5 ms.
constexpr int kSpawnSlice = 16;
/// The time after which a slice ends early, as when a slow file system has the program: a node that is silent
/// for seconds is lost.
constexpr Duration kSpawnSliceTime = std::chrono::milliseconds(100);

/// The delay after which error files are watched; before, a report is seen when its worker exits. Closing the
/// watch costs 4 to 16 ms (file_watch.h), which a short job need not pay.
constexpr Duration kErrorWatchDelay = std::chrono::seconds(1);

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

}  // namespace

/// Makes the segment of the generation that is ordered.
Result<std::unique_ptr<SegmentFile>> Agent::make_segment(std::size_t workers) const {
    return SegmentFile::create(system_, {static_cast<int>(workers), order_.world_size, order_.first_rank,
                                         order_.generation, cpus_in_quota(config_.machine)});
}

Status Agent::prepare(const rdzv::StartGeneration& order) {
    order_ = order;
    first_logged_rank_ = order.first_rank;
    first_failure_.reset();
    absent_rank_ = -1;
    error_clock_lead_.reset();
    if (warden_ != nullptr && warden_->has_killed()) {
        warden_->forget_kill();
        if (config_.cgroup != nullptr) config_.cgroup->was_killed();
    }
    {
        const os::BlockingCall makes_directory(loop_.keepalive());
        output_.begin_attempt(static_cast<int>(order.generation) -
                              1);  // also counts generations that used up no restart
    }

    Result<std::vector<WorkerPlan>> plans =
        plan_workers(config_.spec, config_.program, config_.machine, order);
    if (!plans) return plans.error();
    Result<std::unique_ptr<SegmentFile>> segment = make_segment(plans->size());
    if (!segment) return segment.error();
    segment_ = std::move(*segment);
    if (reads_scalars()) segment_->scalars(0)->is_read.store(1, std::memory_order_release);
    if (const Status kept = make_kept_memory(segment_->size()); !kept) return kept;
    if (config_.cgroup != nullptr) {
        if (const Status renewed = config_.cgroup->renew(); !renewed)
            log_.warning("{}: the workers start in our own cgroup", renewed.error().what);
    }

    for (const Worker& worker : workers_) {
        if (worker.lifeline) loop_.unwatch(worker.lifeline.get());
    }
    workers_.clear();
    if (error_files_) error_files_->clear();
    loop_.cancel(watch_timer_);
    watch_timer_ = 0;
    for (WorkerPlan& plan : *plans) {
        workers_.emplace_back();
        workers_.back().plan = std::move(plan);
        if (workers_.back().plan.asks_network) listen_to_nccl(workers_.back().plan);
    }
    return config_.pmix == nullptr ? Status{} : config_.pmix->begin(order);
}

/// Reads the network that NCCL names: without its plug-in NCCL uses sockets, slowly, and reports nothing.
void Agent::listen_to_nccl(WorkerPlan& plan) {
    Result<std::unique_ptr<NcclWords>> words = NcclWords::open(loop_, [this](const std::string& network) {
        const TransportVerdict verdict = judge_transport(config_.machine.fabric.fabric, network);
        if (!verdict.as_meant) log_.warning("{}", verdict.line);
        else if (order_.group_rank == 0) log_.info("{}", verdict.line);
    });
    if (!words) return log_.warning("which network NCCL takes is not looked at: {}", words.error().what);
    nccl_words_ = std::move(*words);
    plan.environment.insert(
        plan.environment.end(),
        {{"NCCL_DEBUG", "INFO"}, {"NCCL_DEBUG_SUBSYS", "INIT"}, {"NCCL_DEBUG_FILE", nccl_words_->path()}});
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
        const Result<pid_t> pid = spawn(local_rank);
        if (pid) feed(agent_event::Spawned{local_rank, *pid});
        else feed(agent_event::SpawnFailed{local_rank, pid.error().what});
    }
    slice_posted_ = pending_spawn_ >= 0 && state_.phase == AgentState::Phase::Starting;
    if (slice_posted_) loop_.post([this] { spawn_slice(); });
    send_exits();
}

Result<pid_t> Agent::spawn(int local_rank) {
    const os::BlockingCall opens_files_and_executes(loop_.keepalive());
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
    stdin_relay_.reset();  // end the last generation's relay before the terminal is watched again
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
            // Without the file (a full disk) use a pipe: the loss is reported, and the last lines of stderr
            // are kept.
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

Status Agent::give_descriptors(Worker& worker, WorkerEnv& env, os::SpawnSpec& spec,
                               std::vector<UniqueFd>& childs) {
    Result<os::System::SocketPair> lifeline = system_.make_socket_pair();
    if (!lifeline) return lifeline.error();
    worker.lifeline = std::move(lifeline->ours);
    const InheritedNumbers numbers = inherited_numbers(config_.open_files);
    // With one ddprun per rank a node has several agents; their workers share memory without our segment.
    if (!config_.spec.outer_rank) spec.descriptors.push_back({segment_->fd(), numbers.segment});
    if (kept_) spec.descriptors.push_back({kept_->fd(), numbers.kept});
    if (config_.passed_descriptor)
        spec.descriptors.push_back({*config_.passed_descriptor, *config_.passed_descriptor});
    spec.descriptors.push_back({lifeline->theirs.get(), numbers.lifeline});
    spec.descriptors.push_back({config_.store, numbers.store});
    childs.push_back(std::move(lifeline->theirs));

    if (const Status placed = place_error_file(worker, env.rank - order_.first_rank); !placed) return placed;
    complete(worker, env);
    return {};
}

/// Chooses the path of the worker's error report. It is no descriptor of ours in /proc, because a worker in
/// another user or PID namespace (a container) could not open that.
Status Agent::place_error_file(Worker& worker, int local_rank) const {
    if (const std::string directory = output_.attempt_directory(); !directory.empty()) {
        worker.error_path = fmt::format("{}/{}/error.json", directory, first_logged_rank_ + local_rank);
        if (order_.in_place) ::unlink(worker.error_path.c_str());  // the report of the one that it replaces
        return {};
    }
    worker.error_path = fmt::format("{}-{}.json", config_.error_files, local_rank);
    ::unlink(worker.error_path.c_str());  // the report of the last generation
    const UniqueFd file(::open(worker.error_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!file) return Error::system("open " + worker.error_path);
    // Root's workers can change their user; nobody else can know the name.
    if (::geteuid() == 0) (void)::fchmod(file.get(), 0622);
    return {};
}

/// Adds what the plan does not know.
void Agent::complete(const Worker& worker, WorkerEnv& env) const {
    const InheritedNumbers numbers = inherited_numbers(config_.open_files);
    env.error_file = worker.error_path;
    env.generation = order_.generation;
    env.store = fmt::format("unix:/proc/self/fd/{}", numbers.store);
    env.token = config_.token;
    env.segment_fd = config_.spec.outer_rank ? -1 : numbers.segment;
    env.segment = fmt::format("/proc/{}/fd/{}", own_number_in_proc(), segment_->fd());
    env.lifeline_fd = numbers.lifeline;
    env.kept_fd = kept_ ? numbers.kept : -1;
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
    // The user's own variables come first in `env`; ours come last, as if exported later.
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

/// A worker's output goes on under the number of its predecessor, also where the ranks have changed since.
StreamOwner Agent::owner_of(int local_rank) const {
    return {first_logged_rank_ + local_rank, local_rank, config_.spec.role, config_.host};
}

void Agent::watch_error_files() {
    watch_timer_ = 0;
    if (!error_files_) {
        Result<std::unique_ptr<FileWatch>> watch = FileWatch::open(loop_);
        if (!watch)
            return log_.debug("error reports are seen when their worker exits: {}", watch.error().what);
        error_files_ = std::move(*watch);
    }
    for (int local_rank = 0; local_rank < static_cast<int>(workers_.size()); ++local_rank) {
        const os::BlockingCall looks_at_file(loop_.keepalive());
        const Status watched = error_files_->add(workers_[static_cast<std::size_t>(local_rank)].error_path,
                                                 [this, local_rank] { error_file_written(local_rank); });
        if (!watched) log_.debug("rank {}: {}", order_.first_rank + local_rank, watched.error().what);
        else error_file_written(local_rank);  // the worker may have written already
    }
}

void Agent::perform(const agent_action::ReportStarted&) {
    rdzv::WorkersStarted started{};
    started.generation = state_.generation;
    send_(started);
    if (order_.in_place)
        log_.debug("{} after the end of a worker was seen, all run again",
                   format_duration(MonotonicClock::now() - end_seen_));
    loop_.cancel(watch_timer_);
    watch_timer_ = loop_.call_after(kErrorWatchDelay, [this] { watch_error_files(); });
    if (reads_scalars()) send_scalars_later();
}

}  // namespace ddprun
