#include "launcher/start/host_starter.h"

#include <fmt/core.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <unistd.h>

#include <array>
#include <span>
#include <utility>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/os/system.h"
#include "env/text.h"
#include "rendezvous/client.h"

namespace ddprun {
namespace {

constexpr std::size_t kTokenBytes = 32;
constexpr std::size_t kMostSecretBytes = 4096;
constexpr Duration kPatience = std::chrono::seconds(60);
/// For one of the head's addresses; the next may be the one that is reached from here.
constexpr Duration kPerAddress = std::chrono::seconds(3);

std::string token_from_cookie(std::string_view cookie, std::string_view run_id) {
    return to_hex(hmac_sha256(cookie, fmt::format("ddprun start {}", run_id)));
}

/// Where other hosts can reach this one: not by loopback, nor by an address that only a link or a container bridge knows.
std::vector<std::string> reachable_addresses() {
    std::vector<std::string> found;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return found;
    for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
        const std::string address = numeric_host(*one->ifa_addr);
        const bool is_local = address.empty() || address.starts_with("fe80:") || address.starts_with("169.254.");
        if (!is_local && !std::string_view(one->ifa_name).starts_with("docker")) found.push_back(address);
    }
    ::freeifaddrs(list);
    return found;
}

std::vector<std::string> endpoints_of(const std::string& own_name, std::uint16_t port) {
    std::vector<std::string> endpoints{to_string(Endpoint{own_name, port})};
    for (const std::string& address : reachable_addresses()) endpoints.push_back(to_string(Endpoint{address, port}));
    return endpoints;
}

std::string path_in(const std::vector<std::string>& environment, std::string_view program) {
    for (const std::string& variable : environment) {
        if (!variable.starts_with("PATH=")) continue;
        for (const std::string_view directory : split(std::string_view(variable).substr(5), ':')) {
            std::string path = fmt::format("{}/{}", directory, program);
            if (directory.starts_with('/') && ::access(path.c_str(), X_OK) == 0) return path;
        }
    }
    return "";
}

/// Byte by byte: what follows the line is not ours to take.
Result<std::string> read_line_of_input() {
    std::string line;
    for (char c = 0; line.size() < kMostSecretBytes;) {
        const ssize_t n = ::read(0, &c, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return Error{Errc::Closed, "standard input ended before the job's secret came", 0};
        if (c == '\n') return line;
        line += c;
    }
    return Error{Errc::Limit, "standard input: too long for a secret", 0};
}

Result<std::string> read_secret(const AgentCall& call) {
    if (call.secret.kind == SecretWay::Stdin) return read_line_of_input();
    if (call.secret.kind == SecretWay::File) {
        Result<std::string> text = read_regular_file(call.secret.file, kMostSecretBytes);
        if (!text) return text.error().with("the file with the job's secret, which all hosts have to see");
        return text;
    }
    const std::optional<std::string> cookie = process_environment("PBS_JOBCOOKIE");
    if (!cookie) return Error{Errc::NotFound, "PBS_JOBCOOKIE is not set: this is no task of the PBS job", 0};
    return token_from_cookie(*cookie, call.job);
}

Result<std::unique_ptr<rdzv::StoreClient>> connect_to(const Endpoint& head, const std::string& job, const std::string& token, TimePoint deadline) {
    rdzv::ClientOptions options;
    options.role = rdzv::Role::Tool;
    options.job_id = job;
    options.token = token;
    options.name = "start of " + host_name();
    return rdzv::StoreClient::connect(head, std::move(options), deadline);
}

struct Reached {
    Endpoint head;
    std::unique_ptr<rdzv::StoreClient> client;
};

/// By whichever of its addresses; a refusal is the head's own word, and ends the search.
Result<Reached> reach_head(const AgentCall& call, const std::string& token) {
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kPatience);
    Error last{Errc::Timeout, "no answer", 0};
    do {
        for (const std::string& text : call.endpoints) {
            const Result<Endpoint> head = parse_endpoint(text, 0);
            if (!head) return head.error().with("--at");
            const TimePoint soon = std::min(deadline, deadline_after(MonotonicClock::now(), kPerAddress));
            Result<std::unique_ptr<rdzv::StoreClient>> client = connect_to(*head, call.job, token, soon);
            if (client) return Reached{*head, *std::move(client)};
            last = client.error();
            if (last.code == Errc::Refused || last.code == Errc::Mismatch) return last;
        }
    } while (MonotonicClock::now() < deadline);
    return last.with(fmt::format("cannot reach the head at {}", join(call.endpoints, ", ")));
}

}  // namespace

Result<std::string> make_start_token(Starter starter, const std::string& run_id, const EnvironmentLookup& variable) {
    const std::optional<std::string> cookie = variable("PBS_JOBCOOKIE");
    if (cookie && secret_way(starter, true) == SecretWay::Cookie) return token_from_cookie(*cookie, run_id);
    return random_hex(kTokenBytes);
}

Result<std::unique_ptr<RemoteAgents>> start_hosts(RemoteAgents::Parts parts, const HostStart& start, std::uint16_t port,
                                                  const std::string& token, Duration timeout) {
    AgentCall call;
    call.program = start.order.ddprun.path;
    call.endpoints = endpoints_of(start.hosts.front().name, port);
    call.job = start.order.run_id;
    call.secret.kind = secret_way(start.starter, process_environment("PBS_JOBCOOKIE").has_value());
    RemoteAgents::Plan plan;
    if (call.secret.kind == SecretWay::Stdin) plan.token = token;
    if (call.secret.kind == SecretWay::File) {
        const Result<std::string> name = random_hex(8);
        if (!name) return name.error();
        call.secret.file = plan.secret_file = fmt::format("{}/.ddprun-{}", start.order.directory, *name);
        if (const Status written = write_file_atomically(plan.secret_file, token, 0600); !written) return written.error().with("the job's secret, for the other hosts");
    }
    const bool by_ssh_in_job = start.starter == Starter::Ssh && process_environment("PBS_JOBID").has_value();
    for (const AllocatedHost& host : start.hosts) plan.hosts.push_back(host.name);
    plan.environment = scheduler_environment(os::own_environment(), process_environment);
    plan.commands = starter_commands(start.starter, start.hosts, std::move(call), start.job_id, by_ssh_in_job ? path_in(plan.environment, "pbs_attach") : "");
    plan.timeout = timeout;
    return std::make_unique<RemoteAgents>(std::move(parts), std::move(plan));
}

Result<StartedNode> ask_head(const AgentCall& call) {
    Result<std::string> token = read_secret(call);
    if (!token) return token.error();
    Result<Reached> reached = reach_head(call, *token);
    if (!reached) return reached.error();
    const Result<std::string> text = reached->client->get(kOrderKey, deadline_after(MonotonicClock::now(), kPatience));
    if (!text) return text.error();
    Result<StartOrder> order = decode_start_order(*text);
    if (!order) return order.error();
    StartedNode started{reached->head, *std::move(token), call.node, *std::move(order)};
    if (started.node < 0) started.node = node_of_host(started.order.hosts, host_name());
    if (started.node >= 1 && static_cast<std::size_t>(started.node) < started.order.hosts.size()) return started;
    return Error{Errc::NotFound, fmt::format("this host ({}) is none of those that the head starts ({})", host_name(), join(started.order.hosts, ", ")), 0};
}

void tell_head(const StartedNode& started, const std::string& why) {
    const TimePoint deadline = deadline_after(MonotonicClock::now(), kPerAddress);
    const Result<std::unique_ptr<rdzv::StoreClient>> client = connect_to(started.head, started.order.run_id, started.token, deadline);
    if (client) (void)(*client)->set(failure_key(started.node), why);
}

}  // namespace ddprun
