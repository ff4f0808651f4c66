#include "ddp/shm/segment.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/shm/joining.h"
#include "ddp/types.h"
#include "ddp/worker/stacks.h"
#include "env/io/socket.h"
#include "env/text.h"

namespace ddp {

namespace {

using ddprun::MonotonicClock;
using ddprun::TimePoint;
using ddprun::UniqueFd;
using ddprun::WorkerEnv;

constexpr std::chrono::milliseconds kConnectAgain{10};
constexpr std::chrono::seconds kAfterMismatch{2};     // so that all ranks that disagree learn of it
constexpr std::uint64_t kGreeting = 0x3148535044ull;  // "DPSH1"

struct Hello {
    std::uint64_t greeting = kGreeting;
    std::int32_t rank = 0;  ///< on its node
    std::int32_t world_size = 0;
};

[[noreturn]] void throw_system(int rank, const char* attempt) {
    throw Error(fmt::format("rank {}: sharing the segment: {}: {}", rank, attempt, std::strerror(errno)));
}

[[noreturn]] void throw_world_sizes(const Hello& a, const Hello& b) {
    cpu::throw_world_sizes(a.rank, static_cast<std::uint32_t>(a.world_size), b.rank,
                           static_cast<std::uint32_t>(b.world_size));
}

struct Address {
    sockaddr_un name{};
    socklen_t length = 0;
    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

Address address_of(const WorkerEnv& env) {
    const std::string key = fmt::format("{}|{}|{}|{}|{}|{}", env.master_addr, env.master_port, env.run_id,
                                        env.generation, env.restart_count, env.group_rank);
    std::uint64_t hash = 14695981039346656037ull;  // FNV-1a: a name of fixed length; it is not a secret
    for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    const std::string text = fmt::format("ddp-segment-{}-{:016x}", ::getuid(), hash);

    Address address;
    address.name.sun_family = AF_UNIX;
    std::memcpy(address.name.sun_path + 1, text.data(), text.size());  // the leading zero makes it abstract
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    return address;
}

UniqueFd make_socket(int rank) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) throw_system(rank, "socket");
    return fd;
}

bool is_ours(int socket) {
    const ddprun::Result<ddprun::UnixPeer> peer = ddprun::unix_peer(socket);
    return peer && peer->uid == ::getuid();
}

bool is_readable_by(int fd, TimePoint deadline) {
    return ddprun::wait_readable(fd, deadline).value_or(false);
}

void send_with_fd(int socket, const Hello& hello, int fd) {
    // Joining detects a rank that has gone meanwhile; ignoring it here.
    (void)!ddprun::send_packet(socket, {reinterpret_cast<const char*>(&hello), sizeof hello}, fd);
}

UniqueFd receive_with_fd(int socket, Hello& hello) {
    UniqueFd fd;
    const ssize_t n = ddprun::receive_packet(socket, {reinterpret_cast<char*>(&hello), sizeof hello}, fd);
    return n == static_cast<ssize_t>(sizeof hello) ? std::move(fd) : UniqueFd();
}

/// Serves one connection. False when the peer is not a rank of this node.
bool serve(int listener, const Hello& mine, int segment, TimePoint deadline, Hello& peer) {
    const UniqueFd connection(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection || !is_ours(connection.get())) return false;
    if (!is_readable_by(connection.get(), deadline)) return false;
    if (::recv(connection.get(), &peer, sizeof peer, 0) != static_cast<ssize_t>(sizeof peer)) return false;
    // A rank number that is invalid in the peer's own world would be counted as one of the expected ranks.
    if (peer.greeting != kGreeting || peer.rank < 1 || peer.rank >= peer.world_size) return false;
    send_with_fd(connection.get(), mine, segment);
    return true;
}

/// "1-3", as ranks of the world, assuming that the ranks of a node are consecutive.
std::string ranks_not_in(const std::set<int>& served, const WorkerEnv& env) {
    std::vector<int> missing;
    for (int rank = 1; rank < env.local_world_size; ++rank) {
        if (!served.contains(rank)) missing.push_back(env.rank + rank);
    }
    return ddprun::format_ranges(missing);
}

UniqueFd hand_out(const WorkerEnv& env, TimePoint deadline) {
    const UniqueFd listener = make_socket(env.rank);
    const Address address = address_of(env);
    if (::bind(listener.get(), address.get(), address.length) != 0) {
        if (errno != EADDRINUSE) throw_system(env.rank, "bind");
        throw InvalidInput(
            fmt::format("rank {} of run '{}' at {}:{} is already there: give this job another MASTER_PORT",
                        env.rank, env.run_id, env.master_addr, env.master_port));
    }
    if (::listen(listener.get(), SOMAXCONN) != 0) throw_system(env.rank, "listen");

    UniqueFd segment = make_segment({.local_world_size = static_cast<std::uint32_t>(env.local_world_size),
                                     .world_size = static_cast<std::uint32_t>(env.world_size),
                                     .first_rank = static_cast<std::uint32_t>(env.rank),
                                     .generation = env.generation});
    const bool is_one_node = env.local_world_size == env.world_size;
    const Hello mine{.rank = env.local_rank, .world_size = env.world_size};
    std::set<int> served;
    Hello other = mine;  // the first that disagrees
    int expected = env.local_world_size - 1;
    while (static_cast<int>(served.size()) < expected) {
        if (!is_readable_by(listener.get(), deadline)) break;
        Hello peer;
        if (!serve(listener.get(), mine, segment.get(), deadline, peer)) continue;
        served.insert(peer.rank);
        if (peer.world_size == mine.world_size || other.world_size != mine.world_size) continue;
        other = peer;
        if (is_one_node) expected = std::max(expected, peer.world_size - 1);
        deadline = std::min(deadline, ddprun::deadline_after(MonotonicClock::now(), kAfterMismatch));
    }
    if (other.world_size != mine.world_size) {
        SegmentMap map(std::move(segment));
        cpu::post_claim(map, other.rank,
                        other.world_size);  // for ranks that agree with this one and wait already
        throw_world_sizes(mine, other);
    }
    if (static_cast<int>(served.size()) < expected) {
        throw TimeoutError(fmt::format("rank {}: joining a world of {}: missing after the time-out: rank {}",
                                       env.rank, env.world_size, ranks_not_in(served, env)));
    }
    return segment;
}

UniqueFd connect_until(const WorkerEnv& env, TimePoint deadline) {
    const Address address = address_of(env);
    for (;;) {
        UniqueFd fd = make_socket(env.rank);
        if (::connect(fd.get(), address.get(), address.length) == 0) return fd;
        if (errno != ECONNREFUSED && errno != EAGAIN) throw_system(env.rank, "connect");
        if (MonotonicClock::now() >= deadline) {
            throw TimeoutError(
                fmt::format("rank {}: joining a world of {}: rank {} did not arrive within the time-out",
                            env.rank, env.world_size, env.rank - env.local_rank));
        }
        // No event tells that an abstract name appears, so try again at intervals.
        ::poll(nullptr, 0, static_cast<int>(kConnectAgain.count()));
    }
}

UniqueFd fetch(const WorkerEnv& env, TimePoint deadline) {
    const UniqueFd connection = connect_until(env, deadline);
    if (!is_ours(connection.get())) {
        throw InvalidInput(
            fmt::format("rank {}: the segment's socket belongs to another user: give this job another "
                        "MASTER_PORT",
                        env.rank));
    }
    const Hello mine{.rank = env.local_rank, .world_size = env.world_size};
    if (::send(connection.get(), &mine, sizeof mine, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof mine)) {
        throw_system(env.rank, "send");
    }
    if (!is_readable_by(connection.get(), deadline)) {
        throw TimeoutError(fmt::format("rank {}: rank {} did not hand the segment out within the time-out",
                                       env.rank, env.rank - env.local_rank));
    }
    Hello theirs;
    UniqueFd segment = receive_with_fd(connection.get(), theirs);
    if (!segment)
        throw PeerLostError(fmt::format("rank {}: rank {} ended before it handed the segment out", env.rank,
                                        env.rank - env.local_rank));
    if (theirs.world_size != mine.world_size) throw_world_sizes(mine, theirs);
    return segment;
}

}  // namespace

UniqueFd share_segment(const WorkerEnv& env, TimePoint deadline) {
    return env.local_rank == 0 ? hand_out(env, deadline) : fetch(env, deadline);
}

namespace {

// The variable stays set, and the program may make a second group, so this is a duplicate. The program's own
// children do not need the original.
UniqueFd inherited_segment(int fd) {
    UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!own) throw InvalidInput(fmt::format("DDPRUN_SEGMENT_FD={}: {}", fd, std::strerror(errno)));
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return own;
}

UniqueFd segment_for(const WorkerEnv& env, ddprun::TimePoint deadline) {
    if (env.segment_fd >= 0) return inherited_segment(env.segment_fd);
    if (env.local_world_size == 1) {
        return make_segment({.world_size = static_cast<std::uint32_t>(env.world_size),
                             .first_rank = static_cast<std::uint32_t>(env.rank),
                             .generation = env.generation});
    }
    return share_segment(env, deadline);
}

}  // namespace

std::shared_ptr<SegmentMap> open_segment(const WorkerEnv& env, ddprun::TimePoint deadline) {
    auto segment = std::make_shared<SegmentMap>(segment_for(env, deadline));
    if (env.segment_fd >= 0 && env.lifeline_fd >= 0) {
        answer_stack_requests(segment, static_cast<std::uint32_t>(env.local_rank), env.lifeline_fd);
    }
    return segment;
}

}  // namespace ddp
