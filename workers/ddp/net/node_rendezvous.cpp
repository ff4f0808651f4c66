#include "ddp/net/node_rendezvous.h"

#include <fmt/core.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "ddp/types.h"
#include "env/io/resolve.h"
#include "env/nodes/meeting_point.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddp::net {

using ddprun::MonotonicClock;
using ddprun::TimePoint;

namespace {

constexpr std::chrono::milliseconds kStorePoll{
    100};  ///< longest wait for a key between two checks of the launcher's abort word

std::string wait_for(const BootstrapStore& bootstrap, const Rendezvous& rendezvous, int first_rank) {
    const std::string key = key_of(rendezvous, first_rank);
    for (;;) {
        rendezvous.throw_if_lost();
        const TimePoint until =
            std::min(rendezvous.deadline, ddprun::deadline_after(MonotonicClock::now(), kStorePoll));
        if (std::string value = bootstrap.get(key, until); !value.empty()) return value;
        if (MonotonicClock::now() < rendezvous.deadline) continue;
        throw TimeoutError(fmt::format(
            "rank {}: joining a world of {}: missing after the time-out: rank {} and its node ({})",
            rendezvous.rank, rendezvous.world_size, first_rank, key));
    }
}

/// The source address of packets to MASTER_ADDR; sends nothing. "" without a route. Throws TimeoutError.
std::string source_towards_master(const ddprun::WorkerEnv& env, TimePoint deadline) {
    const ddprun::Endpoint master{env.master_addr, static_cast<std::uint16_t>(env.master_port)};
    const ddprun::Result<ddprun::SocketAddresses> found = ddprun::resolve_by(master, deadline);
    if (!found && found.error().code == ddprun::Errc::Timeout)
        throw TimeoutError(fmt::format("rank {}: looking up MASTER_ADDR={}: {}", env.rank, env.master_addr,
                                       found.error().what));
    if (!found) return "";
    for (const ddprun::SocketAddress& one : *found) {
        const ddprun::UniqueFd socket(::socket(one.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
        if (!socket || ::connect(socket.get(), one.get(), one.length) != 0) continue;
        if (const auto own = ddprun::local_endpoint(socket.get())) return own->host;
    }
    return "";
}

/// Removes the texts of a node that gave up: a node that comes later must not find them, because the link is
/// closed. The node may try again.
void withdraw(const BootstrapStore& bootstrap, const std::string& key) {
    try {
        if (bootstrap.erase) bootstrap.erase(key);
    } catch (const Error&) {
        // Ignoring: the store is gone, so no rank reads there.
    }
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

}  // namespace

std::string key_of(const Rendezvous& rendezvous, int first_rank) {
    return fmt::format("net/{}/{}/{}", rendezvous.generation, rendezvous.group, first_rank);
}

namespace {

// The lowest rank without a text is the leader of a node that was not read yet.
std::vector<RankText> read_all(const BootstrapStore& bootstrap, const Rendezvous& rendezvous,
                               const std::vector<std::string>& own_texts) {
    std::vector<std::optional<RankText>> all(static_cast<std::size_t>(rendezvous.world_size));
    for (int node = 0; node < rendezvous.world_size; ++node) {
        if (all[static_cast<std::size_t>(node)]) continue;
        const std::vector<std::string> theirs = unpack(wait_for(bootstrap, rendezvous, node));
        if (theirs.size() % 2 == 0 || theirs.front() != own_texts.front()) {
            throw MismatchError(fmt::format(
                "rank {} was started with a world of {} ranks, rank {} with {}, of which {} on its node: check "
                "WORLD_SIZE and LOCAL_WORLD_SIZE of every worker",
                rendezvous.rank, rendezvous.world_size, node, theirs.empty() ? "" : theirs.front(),
                theirs.size() / 2));
        }
        for (std::size_t i = 1; i < theirs.size(); i += 2) {
            const auto rank = static_cast<std::size_t>(ddprun::parse_int(theirs[i]).value_or(-1));
            if (rank >= all.size() || all[rank])
                throw MismatchError(fmt::format(
                    "rank {} is on the node of rank {} and on another: check RANK and LOCAL_RANK of every worker",
                    theirs[i], node));
            all[rank] = RankText{node, theirs[i + 1]};
        }
        if (!all[static_cast<std::size_t>(node)])
            throw MismatchError(fmt::format(
                "rank {} leads a node that it is not on: check RANK and LOCAL_RANK of every worker", node));
    }
    std::vector<RankText> texts;
    for (std::optional<RankText>& text : all) texts.push_back(*std::move(text));
    return texts;
}

}  // namespace

std::vector<RankText> gather_from_nodes(const BootstrapStore& bootstrap, const Rendezvous& rendezvous,
                                        const std::map<int, std::string>& ours) {
    std::vector<std::string> own_texts{std::to_string(rendezvous.world_size)};
    for (const auto& [rank, text] : ours) own_texts.insert(own_texts.end(), {std::to_string(rank), text});
    const std::string key = key_of(rendezvous, rendezvous.rank);
    bootstrap.put(key, pack(own_texts));
    try {
        return read_all(bootstrap, rendezvous, own_texts);
    } catch (const TimeoutError&) {
        withdraw(bootstrap, key);
        throw;
    }
}

std::string pack(const std::vector<std::string>& texts) {
    std::string packed;
    for (const std::string& text : texts) {
        const std::uint64_t length = text.size();
        packed.append(reinterpret_cast<const char*>(&length), sizeof length);
        packed += text;
    }
    return packed;
}

std::vector<std::string> unpack(std::string_view packed) {
    std::vector<std::string> texts;
    while (!packed.empty()) {
        std::uint64_t length = 0;
        if (packed.size() >= sizeof length) std::memcpy(&length, packed.data(), sizeof length);
        packed.remove_prefix(std::min(packed.size(), sizeof length));
        if (length > packed.size()) throw MismatchError("joining: nodes run different builds of libddp");
        texts.emplace_back(packed.substr(0, length));
        packed.remove_prefix(length);
    }
    return texts;
}

// A name that resolves to the head's own loopback (127.0.1.1 in /etc/hosts) is useless on other hosts.
std::string own_address(const ddprun::WorkerEnv& env, TimePoint deadline) {
    const std::string towards = source_towards_master(env, deadline);
    if (!towards.empty() &&
        (!is_loopback(towards) || is_loopback(env.master_addr) || env.master_addr == "localhost"))
        return towards;
    const std::vector<std::string> others = ddprun::reachable_addresses(ddprun::list_interfaces(), "");
    if (!others.empty()) return others.front();
    throw InvalidInput(
        fmt::format("rank {}: no interface of this host leads to MASTER_ADDR={}, nor to any other host",
                    env.rank, env.master_addr));
}

}  // namespace ddp::net
