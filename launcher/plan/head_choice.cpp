#include "launcher/plan/head_choice.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "env/io/resolve.h"
#include "env/nodes/meeting_point.h"
#include "env/text.h"
#include "launcher/spec/signals.h"

namespace ddprun {
namespace {

constexpr std::uint16_t kStaticPort = 29500;  // torchrun's default --master-port

Result<HeadChoice> head_at(const Endpoint& endpoint, const JobSpec& spec, const HostFacts& facts,
                           std::string why) {
    if (const Status found = check_found_at(endpoint.host, facts.endpoint_addresses, spec.rendezvous); !found)
        return found.error();
    return HeadChoice{true, {spec.rendezvous.listen_on, endpoint.port}, std::move(why)};
}

bool is_alone(const JobSpec& spec) { return spec.nodes.max == 1 && !spec.rendezvous.head_is_apart; }

/// A socket bound to `port` on all IPv4 interfaces, as servers bind it.
Result<UniqueFd> bind_port(int port) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!fd) return Error::system("socket");
    const int on = 1;
    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        return Error::system("bind");
    return fd;
}

}  // namespace

bool is_this_host(const std::string& name, const HostFacts& facts) {
    if (name == "localhost" || name == facts.host_name) return true;
    const auto ours = [&](const std::string& address) {
        return stays_on_host(address) ||
               std::count(facts.addresses.begin(), facts.addresses.end(), address) > 0;
    };
    return ours(name) || std::any_of(facts.endpoint_addresses.begin(), facts.endpoint_addresses.end(), ours);
}

std::optional<Endpoint> shared_endpoint(const JobSpec& spec) {
    if (is_alone(spec)) return std::nullopt;
    const RendezvousSpec& rendezvous = spec.rendezvous;
    if (rendezvous.endpoint) return rendezvous.endpoint;
    if (!rendezvous.master_addr) return std::nullopt;
    return Endpoint{*rendezvous.master_addr,
                    static_cast<std::uint16_t>(rendezvous.master_port.value_or(kStaticPort))};
}

Result<HeadChoice> choose_head(const JobSpec& spec, const HostFacts& facts) {
    if (is_alone(spec)) return HeadChoice{true, {"127.0.0.1", 0}, "one node"};
    const std::optional<Endpoint> endpoint = shared_endpoint(spec);
    if (!endpoint) {
        return Error{
            Errc::InvalidArgument,
            fmt::format("--nnodes={}: nothing says where the nodes meet (give --rdzv-endpoint HOST:PORT or "
                        "--master-addr, or name "
                        "the hosts by --hosts; in a PBS, Slurm or LSF job they are known)",
                        to_string(spec.nodes)),
            0};
    }
    if (const std::optional<bool> configured = spec.rendezvous.is_host) {
        if (*configured) return head_at(*endpoint, spec, facts, "is_host=true");
        return HeadChoice{false, *endpoint, "is_host=false"};
    }
    // torchrun's c10d knows no node rank, so nodes may have any. It counts only where the name tells nothing.
    const bool name_tells = spec.rendezvous.backend == "c10d" &&
                            (is_this_host(endpoint->host, facts) || !facts.endpoint_addresses.empty());
    if (spec.rendezvous.node_rank && !name_tells) {
        const bool is_elsewhere = !facts.endpoint_addresses.empty() && !is_this_host(endpoint->host, facts);
        const std::string doubt =
            is_elsewhere
                ? fmt::format(", though {} is not this host: others look for it there", endpoint->host)
                : "";
        if (*spec.rendezvous.node_rank == 0) return head_at(*endpoint, spec, facts, "node rank 0" + doubt);
        return HeadChoice{false, *endpoint, fmt::format("node rank {}", *spec.rendezvous.node_rank)};
    }
    if (is_this_host(endpoint->host, facts)) {
        Result<HeadChoice> choice = head_at(*endpoint, spec, facts, endpoint->host + " is this host");
        if (choice) choice->contested = true;
        return choice;
    }
    return HeadChoice{false, *endpoint, endpoint->host + " is not this host"};
}

Status check_found_at(const std::string& host, const std::vector<std::string>& addresses,
                      const RendezvousSpec& rendezvous) {
    const std::string& own = rendezvous.listen_on;
    if (own.empty() || addresses.empty() || std::count(addresses.begin(), addresses.end(), own) > 0)
        return {};
    const bool is_local_name = std::all_of(addresses.begin(), addresses.end(), stays_on_host) &&
                               host != "localhost" && !stays_on_host(host);
    if (is_local_name) return {};
    return Error{
        Errc::Mismatch,
        fmt::format(
            "--iface={} is {} here, where the other nodes would not look: they know this host as {} ({}); "
            "let --rdzv-endpoint be {}",
            rendezvous.iface, own, host, join(addresses, ", "), own),
        0};
}

Status check_local_address(const std::string& local_addr, const std::vector<std::string>& addresses) {
    const std::string_view address = std::string_view(local_addr).substr(0, local_addr.find('%'));
    std::array<char, 16> ignored{};
    const bool is_numeric = ::inet_pton(AF_INET, local_addr.c_str(), ignored.data()) == 1 ||
                            ::inet_pton(AF_INET6, std::string(address).c_str(), ignored.data()) == 1;
    const auto is_it = [&](std::string_view own) { return own.substr(0, own.find('%')) == address; };
    if (!is_numeric || stays_on_host(local_addr) || std::any_of(addresses.begin(), addresses.end(), is_it))
        return {};
    std::vector<std::string> others;
    std::copy_if(addresses.begin(), addresses.end(), std::back_inserter(others),
                 [](const std::string& own) { return !stays_on_host(own); });
    constexpr std::size_t kMostNamed = 4;
    if (others.size() > kMostNamed) others.resize(kMostNamed);
    return Error{
        Errc::InvalidArgument,
        fmt::format(
            "--local-addr={}: no address of this host ({}); leave it out, or name an interface by --iface",
            excerpt(local_addr),
            others.empty() ? "it has the loopback only" : "it has " + join(others, ", ")),
        0};
}

Endpoint own_endpoint(const RendezvousSpec& rendezvous, std::uint16_t port) {
    return {rendezvous.listen_on.empty() ? "127.0.0.1" : rendezvous.listen_on, port};
}

std::string master_host(const JobSpec& spec, bool first_node_is_here,
                        const std::vector<std::string>& first_node) {
    const RendezvousSpec& rendezvous = spec.rendezvous;
    if (rendezvous.master_addr) return *rendezvous.master_addr;
    if (!first_node_is_here && !first_node.empty()) return first_node.front();
    if (rendezvous.local_addr) return *rendezvous.local_addr;
    const std::optional<Endpoint> endpoint = shared_endpoint(spec);
    return endpoint ? endpoint->host : "127.0.0.1";
}

MasterChoice choose_master(const JobSpec& spec, bool serves_torch, std::uint16_t controller_port,
                           bool met_elsewhere, bool first_node_is_here,
                           const std::vector<std::string>& first_node) {
    if (serves_torch) return {master_host(spec, true, {}), controller_port};
    const bool is_controllers = shared_endpoint(spec).has_value() && !met_elsewhere;
    const int port = is_controllers ? 0 : spec.rendezvous.master_port.value_or(0);
    return {master_host(spec, first_node_is_here, first_node), port};
}

namespace {

/// Why the controller cannot be PyTorch's store at the workers' MASTER_ADDR and MASTER_PORT; "": it can.
std::string torch_store_obstacle(const JobSpec& spec) {
    const RendezvousSpec& rendezvous = spec.rendezvous;
    if (rendezvous.tls && !is_alone(spec))
        return "PyTorch's clients speak no TLS, and with --tls nothing leaves a host without it";
    const std::optional<Endpoint> endpoint = shared_endpoint(spec);
    if (!endpoint) {
        const std::string host = rendezvous.master_addr.value_or("localhost");
        if (host == "localhost" || stays_on_host(host)) return "";
        return fmt::format(
            "the controller of a job of one node listens on the loopback, and --master-addr is {}", host);
    }
    const bool is_there = rendezvous.master_addr.value_or(endpoint->host) == endpoint->host &&
                          rendezvous.master_port.value_or(endpoint->port) == endpoint->port;
    if (is_there) return "";
    return fmt::format("--master-addr and --master-port name another place than {}, where the controller is",
                       to_string(*endpoint));
}

}  // namespace

Result<TorchStoreChoice> choose_torch_store(const JobSpec& spec, bool is_python) {
    if (spec.torch_store == TorchStoreUse::Off) return TorchStoreChoice{false, "--torch-store off"};
    const std::string obstacle = torch_store_obstacle(spec);
    if (spec.torch_store == TorchStoreUse::On) {
        if (obstacle.empty()) return TorchStoreChoice{true, "--torch-store on"};
        return Error{Errc::InvalidArgument, "--torch-store on: " + obstacle, 0};
    }
    if (!is_python) return TorchStoreChoice{false, "the program is not run by Python"};
    return TorchStoreChoice{obstacle.empty(), obstacle.empty() ? "the program is run by Python" : obstacle};
}

rdzv::Heartbeats heartbeats_of(const RendezvousSpec& rendezvous) {
    if (rendezvous.heartbeat_timeout) return {*rendezvous.heartbeat_timeout};
    if (!rendezvous.keep_alive_interval && !rendezvous.keep_alive_attempts) return {};
    constexpr Duration kTorchrunsInterval = std::chrono::seconds(5);
    constexpr int kTorchrunsAttempts = 3;
    const Duration interval = rendezvous.keep_alive_interval.value_or(kTorchrunsInterval);
    const Duration timeout = interval * rendezvous.keep_alive_attempts.value_or(kTorchrunsAttempts);
    // With one attempt a heartbeat would be late as soon as it is due.
    return {timeout, std::min(interval, timeout / 2)};
}

std::vector<std::string> interface_addresses() {
    std::vector<std::string> found;
    for (InterfaceAddress& one : list_interfaces()) found.push_back(std::move(one.address));
    return found;
}

HostFacts detect_host(const std::optional<Endpoint>& endpoint) {
    HostFacts facts;
    facts.host_name = host_name();
    if (!endpoint) return facts;
    facts.addresses = interface_addresses();
    const StoppableWait wait;
    const ResolverAnswer answer =
        addresses_of_all({endpoint->host}, deadline_after(MonotonicClock::now(), kResolverPatience)).front();
    if (answer) facts.endpoint_addresses = *answer;
    else if (answer.error().code == Errc::Timeout)
        facts.unanswered = fmt::format("{} did not answer within {} for {}", name_servers(),
                                       format_duration(kResolverPatience), endpoint->host);
    return facts;
}

Result<int> MasterPort::reserve() {
    Result<UniqueFd> fd = bind_port(0);
    if (!fd) return fd.error().with("a port for MASTER_PORT");
    held_ = *std::move(fd);
    return static_cast<int>(local_endpoint(held_.get()).value_or({}).port);
}

Status MasterPort::check(int port) {
    const Result<UniqueFd> fd = bind_port(port);
    if (fd) return {};
    Error error = fd.error();
    error.what = fmt::format("--master-port: {}: {}", port, ::strerror(error.sys));
    return error;
}

}  // namespace ddprun
