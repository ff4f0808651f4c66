#include "launcher/start/meet.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <utility>

#include "env/hmac.h"
#include "env/io/background_call.h"
#include "env/io/file.h"
#include "env/io/resolve.h"
#include "env/nodes/batch_job.h"
#include "env/nodes/exchange.h"
#include "env/nodes/host_lists.h"
#include "env/nodes/launcher_families.h"
#include "env/nodes/meeting_point.h"
#include "env/text.h"
#include "launcher/plan/head_choice.h"
#include "launcher/start/job_token.h"
#include "rendezvous/client/store_client.h"

namespace ddprun {
namespace {

constexpr std::chrono::seconds kPmixTimeout{10};

TaskRole role_in(const CommandLine& line) {
    if (line.spec.per_rank) return TaskRole::Rank;
    return line.sources.contains("nproc-per-node") ? TaskRole::Node : TaskRole::Auto;
}

/// True when the user's options replace all that an outer launcher could tell.
bool ignores_launcher(const CommandLine& line) {
    if (line.spec.per_rank) return false;
    for (const char* said : {"standalone", "node-rank", "hosts", "hostfile", "start"}) {
        if (line.sources.contains(said)) return true;
    }
    return line.sources.contains("nnodes") && (line.spec.nodes.max == 1 || shared_endpoint(line.spec));
}

Status check_node_count(const CommandLine& line, const OuterTask& task) {
    const Nodes& nodes = line.spec.nodes;
    const int started = task.place.nodes;
    if (!line.sources.contains("nnodes") || (started >= nodes.min && started <= nodes.max)) return {};
    return Error{Errc::Mismatch,
                 fmt::format("--nnodes={} but {} ddpruns were started: {}; give one of the two",
                             line.values.at("nnodes"), started, task.launcher.explanation),
                 0};
}

}  // namespace

std::string describe(const OuterTask& task) {
    return fmt::format("{} {} of {}: {}", task.place.is_rank ? "rank" : "node", task.place.node_rank,
                       task.place.nodes, task.launcher.explanation);
}

Result<std::optional<OuterTask>> find_outer_task(const CommandLine& line, const EnvironmentLookup& lookup) {
    if (ignores_launcher(line)) return std::optional<OuterTask>{};
    Result<LauncherChoice> choice = choose_launcher(lookup);
    if (!choice) return choice.error();
    if (choice->placement) fill_from_apinfo(*choice->placement, lookup);
    PmixSession pmix;
    if (choice->placement && choice->has_pmix && choice->placement->family != LauncherFamily::Torchrun) {
        Result<PmixSession> filled = fill_from_pmix(*choice->placement, kPmixTimeout);
        if (!filled) return filled.error();
        pmix = *std::move(filled);
    }
    const Result<std::optional<NodePlace>> place = node_place(*choice, role_in(line));
    if (!place) return place.error();
    if (!choice->placement) return std::optional<OuterTask>{};
    OuterTask task{*std::move(choice), place->value_or(NodePlace{}), std::move(pmix)};
    if (*place) {
        if (const Status counted = check_node_count(line, task); !counted) return counted.error();
    }
    return std::optional(std::move(task));
}

Result<OuterRank> outer_rank_of(const OuterTask& task) {
    const Placement& told = *task.launcher.placement;
    if (!told.local_rank || !told.local_size) {
        return Error{
            Errc::NotFound,
            fmt::format("--per-rank: {} does not say the local rank, and no channel was asked for it: leave "
                        "--rdzv-endpoint out",
                        describe(told)),
            0};
    }
    return OuterRank{*told.local_rank, *told.local_size, told.node_rank.value_or(0), told.nodes.value_or(1)};
}

namespace {

constexpr std::size_t kMaxNodeFile = 4 << 20;
constexpr int kPortChoices = 4;

// ---- without a channel

/// Ports of the job below those that the kernel gives out (32768), above those of services.
std::vector<std::uint16_t> ports_of(std::string_view job) {
    constexpr std::uint64_t kLowest = 20000, kSpan = 12000;
    std::uint64_t hash = 14695981039346656037ull;  // FNV-1a
    for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    std::vector<std::uint16_t> ports;
    for (std::uint64_t i = 0; i < kPortChoices; ++i)
        ports.push_back(static_cast<std::uint16_t>(kLowest + (hash + i * 3001) % kSpan));
    return ports;
}

FirstHost first_host(std::string host, std::string job, std::string where) {
    std::vector<std::uint16_t> ports = ports_of(job);
    return {std::move(host), std::move(job), std::move(where), std::move(ports)};
}

Result<std::optional<FirstHost>> first_host_of_step(const Placement& task, const EnvironmentLookup& lookup) {
    const std::optional<std::string> list = lookup("SLURM_STEP_NODELIST");
    if (!list || task.job.empty()) return std::optional<FirstHost>{};
    const Result<std::vector<std::string>> hosts = expand_hostlist(*list);
    if (!hosts || hosts->empty())
        return Error{Errc::InvalidArgument,
                     fmt::format("SLURM_STEP_NODELIST={}", hosts ? "" : hosts.error().what), 0};
    const std::string own = lookup("SLURMD_NODENAME").value_or("");
    if (task.rank == 0 && !own.empty() && own != hosts->front()) {
        return Error{
            Errc::Mismatch,
            fmt::format(
                "task 0 is on {} (SLURMD_NODENAME), but the step's first host is {} (SLURM_STEP_NODELIST): "
                "give "
                "--rdzv-endpoint {}:PORT to all",
                own, hosts->front(), own),
            0};
    }
    return std::optional(
        first_host(hosts->front(), "slurm-" + task.job, "the first host of SLURM_STEP_NODELIST"));
}

// ---- with a channel

/// A job id for a launcher that tells none (Hydra, MVAPICH): of its mpiexec, else of its process where it has
/// one host, else of the batch job; "" not known.
std::string find_job(const LauncherChoice& launcher, const EnvironmentLookup& lookup) {
    const Placement& placement = *launcher.placement;
    if (!placement.job.empty()) return placement.job;
    if (std::string job = hydra_job(launcher.rank_variable); !job.empty()) return job;
    if (placement.nodes == 1) return launcher_process(launcher.rank_variable);
    const std::optional<BatchJob> batch = find_batch_job(lookup);
    return batch ? batch->id : "";
}

/// The directory that all tasks see although nobody has named one: on one host that of temporary files, in a
/// batch job the working directory; "" none.
std::string common_directory(const Placement& placement, const EnvironmentLookup& lookup) {
    std::error_code failed;
    if (placement.nodes == 1) return std::filesystem::temp_directory_path(failed).string();
    return find_batch_job(lookup) ? std::filesystem::current_path(failed).string() : "";
}

/// Chooses the channel of tasks whose launcher's own is the program's (--pass-mpi-env): a file. `task` gets
/// the job id that keeps two jobs apart.
Result<ExchangeChoice> choose_file(OuterTask& task, const EnvironmentLookup& lookup) {
    Placement& placement = *task.launcher.placement;
    placement.job = find_job(task.launcher, lookup);
    Result<ExchangeChoice> choice = choose_exchange(task.launcher, lookup, ExchangeUse::OnlyFiles);
    const std::string directory = common_directory(placement, lookup);
    const bool has_first_host = placement.family == LauncherFamily::Slurm ||
                                placement.family == LauncherFamily::Pals ||
                                placement.family == LauncherFamily::SkyPilot;
    if (!choice || directory.empty() || has_first_host) return choice;
    return or_file_in(*std::move(choice), task.launcher, lookup, directory);
}

Result<JobMeeting> listen_as_head(const std::string& own_address, const std::vector<std::uint16_t>& ports) {
    JobMeeting meeting;
    meeting.head.is_head = true;
    Error last{Errc::NotFound, "no port", 0};
    for (const std::uint16_t port : ports) {
        Result<Listener> listener = listen_tcp({own_address, port});
        if (listener) {
            meeting.listener = std::move(listener->fd);
            meeting.head.endpoint.port = listener->bound.port;
            return meeting;
        }
        last = listener.error();
    }
    return last;
}

/// The user's run id, else the outer launcher's with a random number, because a launcher may count from 1
/// again.
Result<std::string> run_id_of(const JobSpec& spec, const LauncherChoice& launcher) {
    if (spec.rendezvous.run_id != "none") return spec.rendezvous.run_id;
    Result<std::string> random = random_hex(4);
    if (!random) return random;
    const std::string& job = launcher.placement->job;
    return fmt::format("{}-{}{}", name_of(launcher.placement->family), job.empty() ? "" : job + "-", *random);
}

/// The meeting point that node 0 publishes. Its only address is --local-addr, or that of --iface, if given.
Result<MeetingPoint> make_meeting_point(const JobSpec& spec, const LauncherChoice& launcher,
                                        std::uint16_t port, const EnvironmentLookup& lookup) {
    MeetingPoint point;
    point.port = port;
    if (spec.rendezvous.local_addr) point.addresses = {*spec.rendezvous.local_addr};
    else point.addresses = reachable_addresses(list_interfaces(), lookup("NCCL_SOCKET_IFNAME").value_or(""));
    if (point.addresses.empty()) {
        return Error{
            Errc::NotFound,
            "no interface of this host has an address that the other nodes could reach: give --local-addr",
            0};
    }
    Result<std::string> job = run_id_of(spec, launcher);
    if (!job) return job.error();
    point.job = *std::move(job);
    // Use a token of this job alone, even when the user has a DDPRUN_TOKEN.
    Result<std::string> token = random_hex(16);
    if (!token) return token.error();
    point.token = *std::move(token);
    return point;
}

rdzv::ClientOptions meeting_client_options(const JobSpec& spec, std::string name) {
    rdzv::ClientOptions options;
    options.role = rdzv::Role::Tool;
    options.name = std::move(name);
    options.tls = spec.rendezvous.tls;
    return options;
}

Result<JobMeeting> meet_by(const ExchangeChoice& choice, const JobSpec& spec, OuterTask& task,
                           const EnvironmentLookup& lookup, TimePoint deadline) {
    Placement& placement = *task.launcher.placement;
    JobMeeting meeting;
    std::optional<MeetingPoint> mine;
    if (task.place.node_rank == 0) {
        // Listen before the point is published: a node that connects early waits in the backlog.
        Result<JobMeeting> head = listen_as_head(spec.rendezvous.listen_on, {0});
        if (!head) return head;
        meeting = *std::move(head);
        Result<MeetingPoint> point =
            make_meeting_point(spec, task.launcher, meeting.head.endpoint.port, lookup);
        if (!point) return point.error();
        mine = *std::move(point);
    }
    Result<std::unique_ptr<Exchange>> exchange = open_exchange(choice, placement, lookup, deadline);
    if (!exchange) return exchange.error();
    Result<Gathered> gathered =
        gather(**exchange, placement, mine, task.place.is_rank ? WhoIsWhere::Needed : WhoIsWhere::AsTold);
    if (!gathered) return gathered.error();
    placement = gathered->placement;
    MeetingPoint& point = gathered->meeting;
    if (!meeting.head.is_head) {
        const std::string name = fmt::format("node {} on {}", task.place.node_rank, host_name());
        Result<rdzv::Reached> reached =
            rdzv::reach(**exchange, point, meeting_client_options(spec, name), deadline);
        if (!reached) return reached.error().with("the first node (" + choice.why + ")");
        meeting.head.endpoint = reached->endpoint;
        meeting.elsewhere = point.endpoints();
    } else {
        meeting.head.endpoint.host = point.addresses.front();
    }
    const std::string& wanted = spec.rendezvous.run_id;
    if (wanted != "none" && wanted != point.job) {
        return Error{
            Errc::Mismatch,
            fmt::format("--rdzv-id {} here, {} on the first node: give all the same", wanted, point.job), 0};
    }
    meeting.token.token = point.token;
    meeting.run_id = point.job;
    meeting.head.why = "told by " + choice.why;
    if (meeting.head.is_head && (*exchange)->keeps_what_was_put()) meeting.channel = *std::move(exchange);
    return meeting;
}

Result<JobMeeting> meet_at(const FirstHost& first, const ExchangeChoice& choice, JobSpec spec,
                           const OuterTask& task, const EnvironmentLookup& lookup, TimePoint deadline) {
    if (spec.rendezvous.run_id == "none") spec.rendezvous.run_id = first.job;
    spec.rendezvous.endpoint = Endpoint{first.host, first.ports.front()};  // the secret is made from it
    Result<JobToken> token = choose_job_token(spec, lookup);
    if (!token) return token.error();
    JobMeeting meeting;
    if (task.place.node_rank == 0) {
        // Only a head that listens on one of its addresses must know where the others connect.
        std::vector<std::string> addresses;
        if (!spec.rendezvous.listen_on.empty()) {
            const ResolverAnswer answer =
                addresses_of_all({first.host}, deadline_after(MonotonicClock::now(), kResolverPatience))
                    .front();
            if (answer) addresses = *answer;
        }
        const Status found = check_found_at(first.host, addresses, spec.rendezvous);
        if (!found) return found.error();
        Result<JobMeeting> head = listen_as_head(spec.rendezvous.listen_on, first.ports);
        if (!head) return head.error().with("the controller's port, which follows from the job's id");
        meeting = *std::move(head);
        meeting.head.endpoint.host = spec.rendezvous.local_addr.value_or(first.host);
    } else {
        std::vector<Endpoint> candidates;
        for (const std::uint16_t port : first.ports) candidates.push_back({first.host, port});
        rdzv::ClientOptions options =
            meeting_client_options(spec, fmt::format("node {} on {}", task.place.node_rank, host_name()));
        options.job_id = spec.rendezvous.run_id;
        options.token = token->token;
        Result<rdzv::Reached> reached = rdzv::reach(candidates, options, deadline);
        if (!reached)
            return reached.error().with(
                fmt::format("the first node ({}); {}", first.where, token->when_refused));
        meeting.head.endpoint = reached->endpoint;
    }
    meeting.token = *std::move(token);
    meeting.run_id = spec.rendezvous.run_id;
    meeting.head.why = fmt::format("{}; {}", first.where, choice.why);
    return meeting;
}

Error no_meeting_point(const OuterTask& task, const std::string& why, const EnvironmentLookup& lookup) {
    // A directory helps only where a job id keeps the files of two jobs apart.
    const bool has_directory =
        !lookup("DDPRUN_EXCHANGE_DIR").value_or("").empty() || task.launcher.placement->job.empty();
    return {
        Errc::InvalidArgument,
        fmt::format("--nnodes={}: the nodes have no meeting point: {} (give --rdzv-endpoint HOST:PORT, or "
                    "--master-addr{})",
                    task.place.nodes, why,
                    has_directory ? "" : ", or DDPRUN_EXCHANGE_DIR=a directory that all nodes share"),
        0};
}

// ---- signals

/// A signalfd of the signals that the job will handle.
UniqueFd signals_to_read(const JobSpec& spec) {
    sigset_t set;
    ::sigemptyset(&set);
    for (const auto& [signal, action] : spec.signals) ::sigaddset(&set, signal);
    return UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

/// The pending signal that ends us; 0: none.
int stopping_signal(int fd, const JobSpec& spec) {
    signalfd_siginfo info{};
    while (::read(fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
        const int signal = static_cast<int>(info.ssi_signo);
        const auto found = spec.signals.find(signal);
        if (found == spec.signals.end()) continue;
        if (found->second == SignalAction::Stop || found->second == SignalAction::Preempt) return signal;
    }
    return 0;
}

/// State shared by the thread that meets and the one that waits for it; the last owner frees it.
struct SharedMeeting {
    JobSpec spec;
    EnvironmentLookup lookup;
    OuterTask task;
    UniqueFd is_over{::eventfd(0, EFD_CLOEXEC)};
    Result<JobMeeting> meeting = Error{Errc::Closed, "stopped", 0};
};

}  // namespace

Result<std::optional<FirstHost>> find_first_host(const LauncherChoice& launcher,
                                                 const EnvironmentLookup& lookup,
                                                 const std::string& node_file,
                                                 const std::optional<PalsApplication>& application) {
    const Placement task = launcher.placement.value_or(Placement{});
    if (task.family == LauncherFamily::Slurm) return first_host_of_step(task, lookup);
    if (task.family == LauncherFamily::SkyPilot) {
        const std::string addresses = lookup("SKYPILOT_NODE_IPS").value_or("");
        const std::string_view first = trim(split(trim(addresses), '\n').front());
        if (first.empty() || task.job.empty()) return std::optional<FirstHost>{};
        return std::optional(
            first_host(std::string(first), "skypilot-" + task.job, "the first of SKYPILOT_NODE_IPS"));
    }
    if (task.family != LauncherFamily::Pals || task.job.empty()) return std::optional<FirstHost>{};
    if (application) {
        const auto node = static_cast<std::size_t>(application->ranks.front().node);
        return std::optional(
            first_host(application->hosts[node], "pals-" + task.job, "the host of rank 0 in PALS_APINFO"));
    }
    // PALS's mpiexec takes the batch system's hosts in their order.
    const std::string_view first = trim(split(node_file, '\n').front());
    if (first.empty()) return std::optional<FirstHost>{};
    return std::optional(
        first_host(std::string(first), "pals-" + task.job, "the first host of PBS_NODEFILE"));
}

Result<JobMeeting> meet(const JobSpec& spec, OuterTask& task, const EnvironmentLookup& lookup) {
    const TimePoint deadline = deadline_after(MonotonicClock::now(), spec.rendezvous.join_timeout);
    const Result<ExchangeChoice> choice =
        spec.pass_mpi_env ? choose_file(task, lookup) : choose_exchange(task.launcher, lookup);
    if (!choice) return choice.error();
    if (choice->kind != ExchangeChoice::Kind::None) return meet_by(*choice, spec, task, lookup, deadline);
    const std::string node_file = read_file(lookup("PBS_NODEFILE").value_or(""), kMaxNodeFile).value_or("");
    const Result<PalsApplication> application = read_apinfo(lookup);
    const Result<std::optional<FirstHost>> first = find_first_host(
        task.launcher, lookup, node_file, application ? std::optional(*application) : std::nullopt);
    if (!first) return first.error();
    if (*first) return meet_at(**first, *choice, spec, task, lookup, deadline);
    return no_meeting_point(task, choice->why, lookup);
}

MeetingOutcome meet_unless_stopped(const JobSpec& spec, const OuterTask& task,
                                   const EnvironmentLookup& lookup) {
    auto shared = std::make_shared<SharedMeeting>();
    shared->spec = spec;
    shared->lookup = lookup;
    shared->task = task;
    const UniqueFd signals = signals_to_read(spec);
    // The launcher's library may hang beyond every timeout: the thread is then left behind, and the process
    // ends.
    call_in_background([shared] {
        shared->meeting = meet(shared->spec, shared->task, shared->lookup);
        const std::uint64_t one = 1;
        static_cast<void>(!::write(shared->is_over.get(), &one, sizeof one));
    });
    MeetingOutcome outcome;
    outcome.task = task;
    for (;;) {
        pollfd wait[] = {{shared->is_over.get(), POLLIN, 0}, {signals.get(), POLLIN, 0}};
        if (::poll(wait, 2, -1) < 0 && errno != EINTR) return outcome;
        if (wait[0].revents != 0) break;
        outcome.signal = stopping_signal(signals.get(), spec);
        if (outcome.signal != 0) return outcome;
    }
    outcome.meeting = std::move(shared->meeting);
    outcome.task = shared->task;
    return outcome;
}

}  // namespace ddprun
