#include "launcher/head.h"

#include <arpa/inet.h>
#include <fmt/core.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>

#include "env/text.h"

namespace ddprun {

namespace {

constexpr std::uint16_t kStaticPort = 29500;  // torchrun's default --master-port

std::string numeric(const sockaddr* address) {
    char text[INET6_ADDRSTRLEN] = {};
    if (address->sa_family == AF_INET) {
        ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
    } else if (address->sa_family == AF_INET6) {
        ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
    }
    return text;
}

std::vector<std::string> interface_addresses() {
    std::vector<std::string> found;
    ifaddrs* list = nullptr;
    if (::getifaddrs(&list) != 0) return found;
    for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr) continue;
        std::string text = numeric(one->ifa_addr);
        if (!text.empty()) found.push_back(std::move(text));
    }
    ::freeifaddrs(list);
    return found;
}

std::vector<std::string> resolve(const std::string& host) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* list = nullptr;
    if (::getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return {};
    std::vector<std::string> found;
    for (const addrinfo* one = list; one != nullptr; one = one->ai_next) found.push_back(numeric(one->ai_addr));
    ::freeaddrinfo(list);
    return found;
}

bool is_this_host(const std::string& name, const HostFacts& facts) {
    if (name == "localhost" || name == facts.host_name) return true;
    const auto ours = [&](const std::string& address) {
        return std::count(facts.addresses.begin(), facts.addresses.end(), address) > 0;
    };
    return ours(name) || std::any_of(facts.endpoint_addresses.begin(), facts.endpoint_addresses.end(), ours);
}

HeadChoice head_at(const Endpoint& endpoint, std::string why) { return {true, {"", endpoint.port}, std::move(why)}; }

}  // namespace

std::optional<Endpoint> shared_endpoint(const JobSpec& spec) {
    if (spec.nodes.max == 1) return std::nullopt;
    const RendezvousSpec& rendezvous = spec.rendezvous;
    if (rendezvous.endpoint) return rendezvous.endpoint;
    if (!rendezvous.master_addr) return std::nullopt;
    return Endpoint{*rendezvous.master_addr, static_cast<std::uint16_t>(rendezvous.master_port.value_or(kStaticPort))};
}

Result<HeadChoice> choose_head(const JobSpec& spec, const HostFacts& facts) {
    if (spec.nodes.max == 1) return HeadChoice{true, {"127.0.0.1", 0}, "one node"};
    const std::optional<Endpoint> endpoint = shared_endpoint(spec);
    if (!endpoint) {
        return Error{Errc::InvalidArgument,
                     fmt::format("--nnodes={}: nothing says where the nodes meet (give --rdzv-endpoint HOST:PORT, or "
                                 "--master-addr)", spec.nodes.max), 0};
    }
    if (const std::optional<bool> configured = spec.rendezvous.is_host) {
        if (*configured) return head_at(*endpoint, "is_host=true");
        return HeadChoice{false, *endpoint, "is_host=false"};
    }
    // torchrun's c10d knows no node rank: it may be that of any order. It counts where the name tells nothing.
    const bool name_tells = spec.rendezvous.backend == "c10d" && (is_this_host(endpoint->host, facts) || !facts.endpoint_addresses.empty());
    if (spec.rendezvous.node_rank && !name_tells) {
        if (*spec.rendezvous.node_rank == 0) return head_at(*endpoint, "node rank 0");
        return HeadChoice{false, *endpoint, fmt::format("node rank {}", *spec.rendezvous.node_rank)};
    }
    if (is_this_host(endpoint->host, facts)) {
        HeadChoice choice = head_at(*endpoint, endpoint->host + " is this host");
        choice.contested = true;
        return choice;
    }
    return HeadChoice{false, *endpoint, endpoint->host + " is not this host"};
}

std::string master_host(const JobSpec& spec, bool first_node_is_here, const std::vector<std::string>& first_node) {
    const RendezvousSpec& rendezvous = spec.rendezvous;
    if (rendezvous.master_addr) return *rendezvous.master_addr;
    if (!first_node_is_here && !first_node.empty()) return first_node.front();
    if (rendezvous.local_addr) return *rendezvous.local_addr;
    const std::optional<Endpoint> endpoint = shared_endpoint(spec);
    return endpoint ? endpoint->host : "127.0.0.1";
}

HeartbeatSpec heartbeat_of(const RendezvousSpec& rendezvous) {
    HeartbeatSpec heartbeat;
    const bool told = rendezvous.keep_alive_interval || rendezvous.keep_alive_attempts;
    if (!told) return heartbeat;
    constexpr int kTorchrunsAttempts = 3;
    heartbeat.interval = rendezvous.keep_alive_interval.value_or(heartbeat.interval);
    heartbeat.timeout = heartbeat.interval * rendezvous.keep_alive_attempts.value_or(kTorchrunsAttempts);
    // With one attempt a heartbeat would be late as soon as it is due.
    heartbeat.interval = std::min(heartbeat.interval, heartbeat.timeout / 2);
    return heartbeat;
}

HostFacts look_at_host(const std::optional<Endpoint>& endpoint) {
    HostFacts facts;
    facts.host_name = host_name();
    if (!endpoint) return facts;
    facts.addresses = interface_addresses();
    facts.endpoint_addresses = resolve(endpoint->host);
    return facts;
}

}  // namespace ddprun
