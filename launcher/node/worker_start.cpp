#include "launcher/node/worker_start.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "env/io/file.h"
#include "env/io/proc.h"
#include "env/io/socket.h"
#include "env/os/keepalive.h"
#include "env/text.h"
#include "launcher/guard/descriptors.h"
#include "launcher/machine/fabric/fabric.h"

namespace ddprun {
namespace {

std::string_view name_of(std::string_view variable) { return variable.substr(0, variable.find('=')); }

constexpr std::size_t kMostOfALine = 4096;  ///< longer lines are not about the network

}  // namespace

WorkerStarter::WorkerStarter(Parts parts)
    : parts_(parts),
      workers_(parts.workers),
      config_(parts.config),
      null_(::open("/dev/null", O_RDWR | O_CLOEXEC)) {}

void WorkerStarter::plan(Worker& worker, WorkerPlan plan) {
    worker = Worker{};
    worker.plan = std::move(plan);
    if (worker.plan.asks_network) listen_to_nccl(worker.plan);
}

/// Reads the network that NCCL names: without its plug-in NCCL uses sockets, slowly, and reports nothing.
void WorkerStarter::listen_to_nccl(WorkerPlan& plan) {
    Result<std::unique_ptr<NcclWords>> words =
        NcclWords::open(parts_.loop, [this](const std::string& network) {
            const TransportVerdict verdict = judge_transport(config_.machine.fabric.fabric, network);
            if (!verdict.as_meant) parts_.log.warning("{}", verdict.line);
            else if (workers_.order.group_rank == 0) parts_.log.info("{}", verdict.line);
        });
    if (!words)
        return parts_.log.warning("which network NCCL takes is not looked at: {}", words.error().what);
    nccl_words_ = std::move(*words);
    plan.environment.insert(
        plan.environment.end(),
        {{"NCCL_DEBUG", "INFO"}, {"NCCL_DEBUG_SUBSYS", "INIT"}, {"NCCL_DEBUG_FILE", nccl_words_->path()}});
}

Result<pid_t> WorkerStarter::start(int local_rank) {
    const os::BlockingCall opens_files_and_executes(parts_.loop.keepalive());
    Worker& worker = workers_.at(local_rank);
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
    if (const Status given = give_descriptors(worker, local_rank, spec, childs); !given) return given.error();
    spec.environment = all_variables(worker);

    Result<pid_t> pid = parts_.system.spawn(spec);
    if (!pid) return pid;
    if (parts_.warden != nullptr) parts_.warden->set_group(local_rank, *pid);
    worker.started = MonotonicClock::now();
    return pid;
}

Status WorkerStarter::connect_stdin(const WorkerPlan& plan, os::SpawnSpec& spec,
                                    std::vector<UniqueFd>& childs) {
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
    stdin_relay_ = std::make_unique<StdinRelay>(parts_.loop, 0, std::move(ours));
    return {};
}

Status WorkerStarter::connect_streams(int local_rank, os::SpawnSpec& spec, std::vector<UniqueFd>& childs) {
    const WorkerPlan& plan = workers_.at(local_rank).plan;
    if (plan.attached) return {};  // the terminal itself
    if (const Status input = connect_stdin(plan, spec, childs); !input) return input;
    const StreamOwner owner{workers_.logged_rank_of(local_rank), local_rank, config_.spec.role, config_.host};
    for (const Output::Stream stream : {Output::Stream::Out, Output::Stream::Err}) {
        if (const Status connected = connect_stream(owner, stream, spec, childs); !connected)
            return connected;
    }
    return {};
}

Status WorkerStarter::connect_stream(const StreamOwner& owner, Output::Stream stream, os::SpawnSpec& spec,
                                     std::vector<UniqueFd>& childs) {
    const int childs_fd = stream == Output::Stream::Out ? 1 : 2;
    if (!parts_.output.needs_pipe(owner, stream)) {
        // Without the file (a full disk) use a pipe: the loss is reported, and the last lines of stderr are
        // kept.
        if (Result<UniqueFd> file = parts_.output.direct_file(owner, stream); file) {
            spec.descriptors.push_back({file->get(), childs_fd});
            childs.push_back(std::move(*file));
            return {};
        }
    }
    Result<os::System::Pipe> pipe = parts_.system.make_pipe(pipe_bytes(workers_.size()));
    if (!pipe) return pipe.error();
    if (const Status added = parts_.output.add(std::move(pipe->read), owner, stream); !added) return added;
    spec.descriptors.push_back({pipe->write.get(), childs_fd});
    childs.push_back(std::move(pipe->write));
    return {};
}

Status WorkerStarter::give_descriptors(Worker& worker, int local_rank, os::SpawnSpec& spec,
                                       std::vector<UniqueFd>& childs) {
    Result<os::System::SocketPair> lifeline = parts_.system.make_socket_pair();
    if (!lifeline) return lifeline.error();
    worker.lifeline = std::move(lifeline->ours);
    const InheritedNumbers numbers = inherited_numbers(config_.open_files);
    // With one ddprun per rank a node has several agents; their workers share memory without our segment.
    if (!config_.spec.outer_rank) spec.descriptors.push_back({workers_.segment->fd(), numbers.segment});
    if (workers_.kept) spec.descriptors.push_back({workers_.kept->fd(), numbers.kept});
    if (config_.passed_descriptor)
        spec.descriptors.push_back({*config_.passed_descriptor, *config_.passed_descriptor});
    spec.descriptors.push_back({lifeline->theirs.get(), numbers.lifeline});
    spec.descriptors.push_back({config_.store, numbers.store});
    childs.push_back(std::move(lifeline->theirs));

    return place_error_file(worker, local_rank);
}

/// Chooses the path of the worker's error report. It is no descriptor of ours in /proc, because a worker in
/// another user or PID namespace (a container) could not open that.
Status WorkerStarter::place_error_file(Worker& worker, int local_rank) const {
    if (const std::string directory = parts_.output.attempt_directory(); !directory.empty()) {
        worker.error_path = fmt::format("{}/{}/error.json", directory, workers_.logged_rank_of(local_rank));
        if (workers_.order.in_place)
            ::unlink(worker.error_path.c_str());  // the report of the one that it replaces
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

WorkerEnv WorkerStarter::environment_of(const Worker& worker) const {
    WorkerEnv env = worker.plan.env;
    const InheritedNumbers numbers = inherited_numbers(config_.open_files);
    env.error_file = worker.error_path;
    env.generation = workers_.order.generation;
    env.store = fmt::format("unix:/proc/self/fd/{}", numbers.store);
    env.token = config_.token;
    env.segment_fd = config_.spec.outer_rank ? -1 : numbers.segment;
    env.segment = fmt::format("/proc/{}/fd/{}", own_number_in_proc(), workers_.segment->fd());
    env.lifeline_fd = numbers.lifeline;
    env.kept_fd = workers_.kept ? numbers.kept : -1;
    return env;
}

std::vector<std::string> WorkerStarter::all_variables(const Worker& worker) const {
    std::vector<std::string> result;
    result.reserve(config_.environment.size() + 40);
    for (const auto& [name, value] : to_environment(environment_of(worker)))
        result.push_back(name + '=' + value);
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

void WorkerStarter::add_pmix_variables(int local_index, std::vector<std::string>& environment) const {
    for (std::string& variable : config_.pmix->environment(local_index)) {
        const std::string_view name = name_of(variable);
        const bool is_set_by_user = name.starts_with("OMPI_MCA_") && this->variable(local_index, name);
        if (!is_set_by_user) environment.push_back(std::move(variable));
    }
}

std::optional<std::string> WorkerStarter::variable(int local_rank, std::string_view name) const {
    if (local_rank < workers_.size()) {
        const WorkerPlan& plan = workers_.at(local_rank).plan;
        for (const auto& [key, value] : plan.environment) {
            if (key == name) return value;
        }
        if (std::find(plan.removed.begin(), plan.removed.end(), name) != plan.removed.end())
            return std::nullopt;
    }
    const std::string start = std::string(name) + '=';
    for (const std::string& entry : config_.environment) {
        if (entry.starts_with(start)) return entry.substr(start.size());
    }
    return std::nullopt;
}

Result<std::unique_ptr<NcclWords>> NcclWords::open(os::EventLoop& loop,
                                                   std::function<void(const std::string&)> found) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) return Error::system("pipe2");
    UniqueFd read(ends[0]), write(ends[1]);
    if (::fcntl(read.get(), F_SETFL, O_NONBLOCK) != 0) return Error::system("fcntl");
    std::unique_ptr<NcclWords> words(
        new NcclWords(loop, std::move(read), std::move(write), std::move(found)));
    const Status watched =
        loop.watch(words->read_.get(), EPOLLIN, [raw = words.get()](std::uint32_t) { raw->on_readable(); });
    if (!watched) return watched.error();
    return words;
}

NcclWords::NcclWords(os::EventLoop& loop, UniqueFd read, UniqueFd write,
                     std::function<void(const std::string&)> found)
    : loop_(loop), read_(std::move(read)), write_(std::move(write)), found_(std::move(found)) {}

NcclWords::~NcclWords() { loop_.unwatch(read_.get()); }

std::string NcclWords::path() const {
    return fmt::format("/proc/{}/fd/{}", own_number_in_proc(), write_.get());
}

void NcclWords::on_readable() {
    char bytes[16 * 1024];
    const ssize_t n = ::read(read_.get(), bytes, sizeof bytes);
    if (n > 0) take({bytes, static_cast<std::size_t>(n)});
}

void NcclWords::take(std::string_view bytes) {
    for (const char c : bytes) {
        if (c != '\n') {
            if (line_.size() < kMostOfALine) line_ += c;
            continue;
        }
        const std::optional<std::string> network = network_in(line_);
        line_.clear();
        if (network && found_) std::exchange(found_, nullptr)(*network);
    }
}

}  // namespace ddprun
