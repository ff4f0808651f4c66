#include "launcher/start/host_starter.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "env/hmac.h"
#include "env/io/file.h"
#include "env/io/socket.h"
#include "env/nodes/batch_job.h"
#include "env/nodes/meeting_point.h"
#include "env/os/system.h"
#include "env/print.h"
#include "env/text.h"
#include "rendezvous/client/store_client.h"

namespace ddprun {
namespace {

constexpr std::size_t kTokenBytes = 32;
constexpr std::size_t kMostSecretBytes = 4096;
constexpr Duration kHeadTimeout = std::chrono::seconds(60);
/// A started ddprun that has waited this long says what it waits for.
constexpr Duration kQuiet = std::chrono::seconds(3);
constexpr Duration kFarewellTimeout = std::chrono::seconds(3);

std::string token_from_cookie(std::string_view cookie, std::string_view salt, std::string_view run_id) {
    return to_hex(hmac_sha256(cookie, fmt::format("ddprun start {} {}", salt, run_id)));
}

/// Reads byte by byte, because the bytes after the line are not ours.
Result<std::string> read_line_of_input() {
    std::string line;
    if (const Result<bool> is_there = wait_readable(0, deadline_after(MonotonicClock::now(), kQuiet));
        is_there && !*is_there) {
        ddprun::print(
            stderr,
            "ddprun: {}: the job's secret has not arrived on standard input (does a login file of this "
            "host read it?)\n",
            host_name());
    }
    for (char c = 0; line.size() < kMostSecretBytes;) {
        const ssize_t n = ::read(0, &c, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return Error{Errc::Closed, "standard input ended before the job's secret arrived", 0};
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
    return token_from_cookie(*cookie, call.secret.salt, call.job);
}

rdzv::ClientOptions start_client_options(const AgentCall& call, const std::string& token) {
    rdzv::ClientOptions options;
    options.role = rdzv::Role::Tool;
    options.job_id = call.job;
    options.token = token;
    options.name = "start of " + host_name();
    options.tls = call.tls;
    return options;
}

Result<std::vector<Endpoint>> parse_endpoints(const AgentCall& call) {
    std::vector<Endpoint> candidates;
    for (const std::string& text : call.endpoints) {
        Result<Endpoint> head = parse_endpoint(text, 0);
        if (!head) return head.error().with("--at");
        candidates.push_back(*std::move(head));
    }
    return candidates;
}

/// Tries all addresses of the head. Prints the obstacle once, soon: the starter carries the line to the head,
/// which may not wait as long as we do.
Result<rdzv::Reached> reach_head(const std::vector<Endpoint>& places, const AgentCall& call,
                                 const std::string& token) {
    const TimePoint begin = MonotonicClock::now();
    Result<rdzv::Reached> reached =
        rdzv::reach(places, start_client_options(call, token), deadline_after(begin, kQuiet));
    if (!reached && reached.error().code == Errc::Timeout) {
        ddprun::print(
            stderr,
            "ddprun: {} cannot reach the head: {} (a firewall? --rdzv-endpoint=HOST:PORT takes a port that "
            "is open)\n",
            host_name(), printable(reached.error().what));
        reached = rdzv::reach(places, start_client_options(call, token), deadline_after(begin, kHeadTimeout));
    }
    return reached ? std::move(reached) : Result<rdzv::Reached>(reached.error().with("the head"));
}

}  // namespace

Result<std::string> make_start_token(HostStart& start, const EnvironmentLookup& variable) {
    Result<std::string> random = random_hex(kTokenBytes);
    const Result<std::string> name = random_hex(8);
    if (!random || !name) return random ? name : random;
    const std::optional<std::string> cookie = variable("PBS_JOBCOOKIE");
    SecretWay& secret = start.call.secret;
    secret.kind = secret_way(start.starter, cookie.has_value());
    if (secret.kind == SecretWay::File)
        secret.file = fmt::format("{}/.ddprun-{}", start.order.directory, *name);
    if (secret.kind != SecretWay::Cookie) return random;
    secret.salt = *std::move(random);
    return token_from_cookie(*cookie, secret.salt, start.order.run_id);
}

std::vector<std::string> endpoints_of_head(const std::string& own_name, const std::string& listens_on,
                                           std::uint16_t port) {
    if (!listens_on.empty()) return {to_string(Endpoint{listens_on, port})};
    std::vector<std::string> endpoints{to_string(Endpoint{own_name, port})};
    for (const std::string& address : reachable_addresses(list_interfaces(), ""))
        endpoints.push_back(to_string(Endpoint{address, port}));
    return endpoints;
}

Result<std::unique_ptr<RemoteAgents>> start_hosts(RemoteAgents::Parts parts, const HostStart& start,
                                                  const std::string& token, Duration timeout) {
    AgentCall call = start.call;
    call.program = start.order.ddprun.path;
    call.job = start.order.run_id;
    RemoteAgents::Plan plan;
    if (call.secret.kind == SecretWay::Stdin) plan.token = token;
    if (call.secret.kind == SecretWay::File) {
        plan.secret_file = call.secret.file;
        if (const Status written = write_file_atomically(plan.secret_file, token, 0600); !written)
            return written.error().with(
                "the job's secret, for the other hosts (start in a directory with room that all of them "
                "see, or with --start=ssh)");
    }
    const std::string pbs_job =
        start.starter == Starter::Ssh ? process_environment("PBS_JOBID").value_or("") : "";
    plan.environment = scheduler_environment(os::own_environment(), process_environment);
    std::erase_if(plan.environment,
                  [](const std::string& entry) { return entry.starts_with("DDPRUN_TOKEN="); });
    plan.path = scheduler_search_path(process_environment);
    const std::string pbs_attach = pbs_job.empty() ? "" : find_executable("pbs_attach", plan.path);
    plan.start = begin_start(
        starter_commands(start.starter, start.hosts, start.nodes, std::move(call), pbs_job, pbs_attach),
        timeout);
    return std::make_unique<RemoteAgents>(std::move(parts), std::move(plan));
}

Result<StartedNode> ask_head(const AgentCall& call) {
    Result<std::string> token = read_secret(call);
    if (!token) return token.error();
    Result<std::vector<Endpoint>> places = parse_endpoints(call);
    if (!places) return places.error();
    Result<rdzv::Reached> reached = reach_head(*places, call, *token);
    if (!reached) return reached.error();
    const Result<std::string> text =
        reached->client->get(kOrderKey, deadline_after(MonotonicClock::now(), kHeadTimeout));
    if (!text) return text.error();
    Result<StartOrder> order = unseal_order(*text, *token);
    if (!order) return order.error();
    StartedNode started{reached->endpoint, *std::move(places), *std::move(token), call.node, call,
                        *std::move(order)};
    if (started.node < 0) started.node = node_of_host(started.order.hosts, host_name());
    const int first = started.order.head_is_apart ? 0 : 1;
    if (started.node >= first && static_cast<std::size_t>(started.node) < started.order.hosts.size())
        return started;
    return Error{Errc::NotFound,
                 fmt::format("this host ({}) is none of those that the head starts ({})", host_name(),
                             join(started.order.hosts, ", ")),
                 0};
}

void tell_head(const StartedNode& started, const std::string& why) {
    const rdzv::ClientOptions options = start_client_options(started.call, started.token);
    const auto client = rdzv::StoreClient::connect(started.head, options,
                                                   deadline_after(MonotonicClock::now(), kFarewellTimeout));
    if (client) (void)(*client)->set(failure_key(started.node), why);
}

}  // namespace ddprun
