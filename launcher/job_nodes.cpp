#include "launcher/launch.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/os/system.h"
#include "launcher/machine/grant.h"
#include "launcher/plan/head_choice.h"
#include "launcher/start/start_plan.h"

namespace ddprun {
namespace {

/// torchrun's default port for --rdzv-endpoint without a port.
constexpr std::uint16_t kDefaultPort = 29400;

constexpr std::size_t kMostHostFileBytes = 4 << 20;
constexpr Duration kBehindStart = std::chrono::seconds(5);

/// Makes all `hosts` the job's nodes; an elastic --nnodes keeps its minimum.
void be_of_hosts(CommandLine& line, int hosts) {
    const bool is_elastic = line.sources.contains("nnodes") && line.spec.nodes.max == hosts;
    line.spec.nodes = {is_elastic ? line.spec.nodes.min : hosts, hosts};
}

/// Changes the spec into that of the head of several hosts.
std::optional<HostStart> become_head(CommandLine& line, StartPlan plan,
                                     const std::vector<std::string>& arguments, const StartFacts& facts) {
    RendezvousSpec& rendezvous = line.spec.rendezvous;
    be_of_hosts(line, static_cast<int>(plan.hosts.size()));
    if (!plan.is_apart) rendezvous.node_rank = 0;
    rendezvous.is_host = true;
    rendezvous.head_is_apart = plan.is_apart;
    const std::string own_name = plan.is_apart ? facts.host_name : plan.hosts.front().name;
    const std::string& job_id = facts.allocation->job_id;
    if (plan.kind == StartPlan::Wait) {
        if (!rendezvous.endpoint) rendezvous.endpoint = Endpoint{own_name, kDefaultPort};
        return std::nullopt;
    }
    // Keep a port that the user gave (a site may have opened it); the other hosts get our own name and
    // addresses.
    const bool has_port = line.sources.contains("rdzv-endpoint") && rendezvous.endpoint;
    if (has_port && rendezvous.endpoint->host != own_name) {
        line.remarks.push_back(
            fmt::format("--rdzv-endpoint: of {} the port is taken; the job's hosts meet at this host, {}",
                        to_string(*rendezvous.endpoint), own_name));
    }
    rendezvous.endpoint = Endpoint{own_name, has_port ? rendezvous.endpoint->port : std::uint16_t{0}};
    // By its own limit RemoteAgents reports which host is missing and why. This limit comes a little later.
    const auto waves = static_cast<int>(plan.hosts.size() / kMostStarting + 1);
    const Duration one_wave = std::min(rendezvous.join_timeout, line.spec.start.timeout);
    rendezvous.join_timeout = std::min(rendezvous.join_timeout, one_wave * waves + kBehindStart);
    if (rendezvous.run_id == "none")
        rendezvous.run_id = job_id.empty() ? random_hex(8).value_or("none") : job_id;
    HostStart start;
    start.starter = plan.starter;
    start.nodes = {plan.is_apart ? 0 : 1, static_cast<int>(plan.hosts.size()) - 1};
    start.order.arguments = arguments;
    start.order.head = own_name;
    start.order.head_is_apart = plan.is_apart;
    start.order.run_id = rendezvous.run_id;
    start.order.sends_output = !carries_output(plan.starter);
    start.call.tls = rendezvous.tls;
    for (const AllocatedHost& host : plan.hosts) {
        start.order.hosts.push_back(host.name);
        start.order.slots.push_back(host.slots.value_or(0));
    }
    start.hosts = std::move(plan.hosts);
    return start;
}

NodesSaid nodes_said(const CommandLine& line) {
    if (line.sources.contains("node-rank") || line.sources.contains("standalone")) return NodesSaid::ByOthers;
    if (!line.sources.contains("nnodes")) return NodesSaid::Nothing;
    return line.spec.nodes.max == 1 || shared_endpoint(line.spec) ? NodesSaid::ByOthers : NodesSaid::Count;
}

/// Uses a scheduler's tasks per host, or the slots of a host file, unless --nproc-per-node is given.
void default_to_slots(CommandLine& line, int slots) {
    if (slots > 1 && !line.sources.contains("nproc-per-node"))
        line.spec.workers = {WorkerCount::Kind::Number, slots};
}

}  // namespace

Result<std::optional<HostStart>> use_allocation(CommandLine& line,
                                                const std::vector<std::string>& arguments) {
    const StartSpec& asked = line.spec.start;
    const NodesSaid said = nodes_said(line);
    const bool is_asked_for =
        !asked.hosts.empty() || !asked.hostfile.empty() || line.sources.contains("start");
    if (said == NodesSaid::ByOthers && !is_asked_for) return std::optional<HostStart>();
    const Result<StartFacts> facts = look_for_hosts(asked);
    if (!facts) return facts.error();
    Result<StartPlan> plan = plan_start(line.spec, said, *facts);
    if (!plan) return plan.error();
    if (!line.spec.quiet && !facts->allocation) {
        const auto read = [](const std::string& path) { return read_regular_file(path, kMostHostFileBytes); };
        if (std::string remark = remark_on_other_scheduler(process_environment, read); !remark.empty())
            line.remarks.push_back(std::move(remark));
    }
    default_to_slots(line, plan->slots);
    if (!plan->why.empty() && !line.spec.quiet) line.remarks.push_back(plan->why);
    if (!line.spec.quiet && facts->allocation) {
        const bool is_given = line.sources.contains("nproc-per-node");
        const WorkerCount& count = line.spec.workers;
        const std::optional<int> workers =
            is_given && count.kind == WorkerCount::Kind::Number ? std::optional(count.number) : std::nullopt;
        const Grant grant = read_grant(process_environment, facts->host_name);
        const int cores =
            grant.cpus ? *grant.cpus * grant.slots : static_cast<int>(std::thread::hardware_concurrency());
        for (std::string& remark : remarks_on(*facts->allocation, is_given, workers, cores))
            line.remarks.push_back(std::move(remark));
        const bool is_counted = count.kind == WorkerCount::Kind::Number && !plan->is_apart;
        if (std::string remark = remark_on_cores(grant.by, is_counted ? count.number : 0, cores);
            !remark.empty())
            line.remarks.push_back(std::move(remark));
    }
    if (plan->kind == StartPlan::Here) return std::optional<HostStart>();
    return become_head(line, *std::move(plan), arguments, *facts);
}

Status complete_order(HostStart& start, const ResolvedProgram& program,
                      const std::vector<std::string>& asked) {
    StartOrder& order = start.order;
    std::error_code failed;
    order.directory = std::filesystem::current_path(failed);
    if (failed) return Error::system("the working directory", failed.value());
    const auto is_carried = [&](std::string_view variable) { return carries(start.starter, variable); };
    order.environment = environment_to_send(os::own_environment(), asked, is_carried);
    order.environment_is_whole = start.starter != Starter::Srun && start.starter != Starter::Mpiexec;
    Result<FileIdentity> self = identify_file(std::filesystem::read_symlink("/proc/self/exe", failed));
    if (!self) return self.error();
    order.ddprun = *std::move(self);
    if (Result<FileIdentity> file = identify_file(program_file(program))) order.program = *std::move(file);
    return {};
}

Result<CommandLine> take_order(const StartedNode& started) {
    const StartOrder& order = started.order;
    std::error_code failed;
    const Result<FileIdentity> self = identify_file(std::filesystem::read_symlink("/proc/self/exe", failed));
    if (!self) return self.error();
    if (const std::string differs = difference("ddprun", order.ddprun, *self, order.head); !differs.empty())
        return Error{Errc::Mismatch, differs, 0};
    if (::chdir(order.directory.c_str()) != 0)
        return Error::system("the working directory " + order.directory);
    const std::vector<std::string> environment =
        environment_here(order.environment, os::own_environment(), !order.environment_is_whole);
    ::clearenv();
    for (const std::string& variable : environment) {
        const std::size_t equals = variable.find('=');
        if (equals != variable.npos && equals > 0)
            ::setenv(variable.substr(0, equals).c_str(), variable.c_str() + equals + 1, 1);
    }
    Result<CommandLine> line = parse_command_line(order.arguments, process_environment);
    if (!line) return line.error();
    line->remarks.clear();  // the head has printed them
    default_to_slots(*line, order.slots[static_cast<std::size_t>(started.node)]);
    be_of_hosts(*line, static_cast<int>(order.hosts.size()));
    line->spec.rendezvous.node_rank = started.node;
    line->spec.rendezvous.is_host = false;
    line->spec.rendezvous.local_addr.reset();  // --local-addr is the head's address
    line->spec.rendezvous.head_is_apart = order.head_is_apart;
    line->spec.rendezvous.endpoint = started.head;
    line->spec.rendezvous.run_id = order.run_id;
    line->spec.rendezvous.tls = started.call.tls;
    return line;
}

Status check_same_program(const StartedNode& started, const ResolvedProgram& program) {
    if (started.order.program.path.empty()) return {};
    const Result<FileIdentity> ours = identify_file(program_file(program));
    if (!ours) return ours.error();
    const std::string differs = difference("the program", started.order.program, *ours, started.order.head);
    return differs.empty() ? Status() : Status(Error{Errc::Mismatch, differs, 0});
}

}  // namespace ddprun
