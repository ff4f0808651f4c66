#include "ddp/shm/joining.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "ddp/shm/waiting.h"
#include "ddp/worker/encoded_failure.h"
#include "env/text.h"
#include "env/unique_fd.h"

namespace ddp::cpu {

namespace {

using ddprun::MonotonicClock;
using ddprun::SegmentHeader;
using ddprun::SegmentOp;
using ddprun::TimePoint;
using ddprun::WorkerEnv;

// A process whose sizes do not fit the segment has no slot in it. It writes its claim into group 0's control
// page, which waiting peers check: bit 63 set, rank, world size.
constexpr std::uint64_t pack(std::uint32_t rank, std::uint32_t world) {
    return std::uint64_t{1} << 63 | std::uint64_t{rank} << 32 | world;
}

void throw_if_contradicted(const Arena& arena, int rank, std::uint32_t world) {
    if (const std::uint64_t claim = arena.control().foreign_claim.load(std::memory_order_acquire)) {
        throw_world_sizes(rank, world, static_cast<int>(claim >> 32 & 0x7fffffff),
                          static_cast<std::uint32_t>(claim));
    }
    for (std::uint32_t peer = 0; peer < arena.ranks(); ++peer) {
        const Identity& other = arena.identity(peer);
        if (other.joined.load(std::memory_order_acquire) == 0) continue;
        if (other.world_size != world)
            throw_world_sizes(rank, world, static_cast<int>(other.rank), other.world_size);
        if (other.layout != layout_mark()) {
            throw MismatchError(
                fmt::format("rank {} and rank {} run different builds of libddp", rank, other.rank));
        }
    }
}

std::vector<int> missing_ranks(const Arena& arena) {
    std::vector<int> missing;
    for (std::uint32_t peer = 0; peer < arena.ranks(); ++peer) {
        if (arena.identity(peer).joined.load(std::memory_order_acquire) == 0)
            missing.push_back(arena.global_rank(peer));
    }
    return missing;
}

/// A number that identifies this PID namespace among those that exist; 0 without /proc.
std::uint64_t own_pid_namespace() {
    struct stat status {};
    return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

/// For processes of this PID namespace. True for a zombie too, where the kernel can tell (Linux 5.3).
bool has_ended(std::uint32_t pid) {
#ifdef SYS_pidfd_open
    const ddprun::UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
    if (process) {
        pollfd entry{.fd = process.get(), .events = POLLIN, .revents = 0};
        return ::poll(&entry, 1, 0) == 1;
    }
#endif
    return ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
}

void write_identity(Arena& arena, const WorkerEnv& env) {
    Identity& mine = arena.identity(arena.rank());
    mine.rank = static_cast<std::uint32_t>(env.rank);
    mine.world_size = static_cast<std::uint32_t>(env.world_size);
    set_presence_mark(arena);
    mine.layout = layout_mark();
    CPU_ZERO(&mine.cpus);
    ::sched_getaffinity(0, sizeof mine.cpus, &mine.cpus);
    mine.joined.store(1, std::memory_order_release);
    ddprun::RankLine& line = arena.segment().line(static_cast<std::uint32_t>(env.local_rank));
    line.pid.store(mine.pid, std::memory_order_relaxed);
    line.joined.store(1, std::memory_order_relaxed);
    arena.control().joined.fetch_add(1);
    futex_wake_all(arena.control().joined);
}

void wait_for_all(Arena& arena, const WorkerEnv& env, TimePoint deadline) {
    std::atomic<std::uint32_t>& joined = arena.control().joined;
    for (;;) {
        const std::uint32_t seen = joined.load(std::memory_order_acquire);
        throw_if_contradicted(arena, env.rank, static_cast<std::uint32_t>(env.world_size));
        const std::vector<int> missing = missing_ranks(arena);
        if (missing.empty()) return;
        throw_if_lost(arena.segment().header(), fmt::format("rank {}: joining", env.rank));
        if (MonotonicClock::now() >= deadline) {
            throw TimeoutError(
                fmt::format("rank {}: joining a world of {}: missing after the time-out: rank {}", env.rank,
                            env.world_size, ddprun::format_ranges(missing)));
        }
        futex_wait(joined, seen, kSleepSlice);
    }
}

std::string one_message(const Arena& arena, std::uint32_t rank, ddprun::TimePoint now) {
    const MessageLine& line = arena.message_line(rank);
    const auto operation = static_cast<SegmentOp>(line.operation.load(std::memory_order_acquire));
    const std::uint32_t peer = line.peer.load(std::memory_order_relaxed);
    if (operation == SegmentOp::None || peer >= arena.ranks()) return "";
    return fmt::format("rank {} is in {} #{} ({}, {} rank {}) since {}", arena.global_rank(rank),
                       segment_op_name(operation), line.seq.load(std::memory_order_relaxed),
                       ddprun::format_bytes(line.bytes.load(std::memory_order_relaxed)),
                       operation == SegmentOp::Send ? "to" : "from", arena.global_rank(peer),
                       age(line.since_ns.load(std::memory_order_relaxed), now));
}

}  // namespace

void throw_world_sizes(int rank, std::uint32_t size, int other_rank, std::uint32_t other) {
    throw MismatchError(
        fmt::format("rank {} was started with a world of {} ranks, rank {} with {}: "
                    "check WORLD_SIZE and LOCAL_WORLD_SIZE of every worker",
                    rank, size, other_rank, other));
}

void post_claim(SegmentMap& segment, int rank, int world_size) {
    // A world that has not formed yet waits in the first group.
    Control& control = Arena::first_control(segment);
    std::uint64_t none = 0;
    control.foreign_claim.compare_exchange_strong(
        none, pack(static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(world_size)));
    futex_wake_all(control.joined);
}

void check_claim(SegmentMap& segment, const WorkerEnv& env) {
    const SegmentHeader& header = segment.header();
    const bool fits = header.world_size == static_cast<std::uint32_t>(env.world_size) &&
                      header.local_world_size == static_cast<std::uint32_t>(env.local_world_size) &&
                      env.local_rank >= 0 && env.local_rank < env.local_world_size;
    if (fits) {
        const std::uint32_t there = segment.line(static_cast<std::uint32_t>(env.local_rank)).pid.load();
        if (there != 0 && there != static_cast<std::uint32_t>(::getpid())) {
            throw MismatchError(fmt::format(
                "rank {} is already taken by pid {}: two workers were given the same rank", env.rank, there));
        }
        return;
    }
    post_claim(segment, env.rank, env.world_size);
    throw MismatchError(fmt::format(
        "rank {} was started with a world of {} ranks, {} on this node; the segment of its "
        "node was made for {} and {}: check WORLD_SIZE and LOCAL_WORLD_SIZE of every worker",
        env.rank, env.world_size, env.local_world_size, header.world_size, header.local_world_size));
}

void join(Arena& arena, const WorkerEnv& env, TimePoint deadline) {
    write_identity(arena, env);
    wait_for_all(arena, env, deadline);
}

NodeCpus read_node_cpus(const Arena& arena) {
    NodeCpus node_cpus{.ranks = static_cast<int>(arena.ranks())};
    cpu_set_t together;
    CPU_ZERO(&together);
    for (std::uint32_t peer = 0; peer < arena.ranks(); ++peer)
        CPU_OR(&together, &together, &arena.identity(peer).cpus);
    const auto launcher_cpus = static_cast<int>(arena.segment().header().cpus);
    node_cpus.cpus = std::max(1, CPU_COUNT(&together));
    if (launcher_cpus > 0) node_cpus.cpus = std::min(node_cpus.cpus, launcher_cpus);
    node_cpus.ranks_share_cores = node_cpus.ranks > node_cpus.cpus;
    return node_cpus;
}

void set_presence_mark(Arena& arena) {
    Identity& mine = arena.identity(arena.rank());
    mine.pid = static_cast<std::uint32_t>(::getpid());
    mine.pid_namespace = own_pid_namespace();
    mine.has_mark = arena.segment().mark_present(arena.members()[arena.rank()]) ? 1 : 0;
}

bool is_gone(const Arena& arena, std::uint32_t rank) {
    const Identity& who = arena.identity(rank);
    if (who.joined.load(std::memory_order_acquire) == 0) return false;
    if (who.pid_namespace == arena.identity(arena.rank()).pid_namespace) return has_ended(who.pid);
    return who.has_mark != 0 && !arena.segment().is_marked(arena.members()[rank]);
}

std::string describe_activities(const Arena& arena, const std::vector<std::uint32_t>& ranks,
                                ddprun::TimePoint now) {
    std::vector<std::string> clauses;
    for (const std::uint32_t rank : ranks) {
        const std::string message = one_message(arena, rank, now);
        clauses.push_back(
            !message.empty() ? message : describe_activity(arena.line(rank), arena.global_rank(rank), now));
    }
    return ddprun::join(clauses, "; ");
}

void post_failure(Control& control, const std::string& text) {
    std::uint32_t none = 0;
    if (!control.failure_state.compare_exchange_strong(none, 1)) return;
    std::snprintf(control.failure_text, sizeof control.failure_text, "%s", text.c_str());
    control.failure_state.store(2, std::memory_order_release);
}

std::string posted_failure(const Control& control) {
    return control.failure_state.load(std::memory_order_acquire) == 2 ? control.failure_text + 1 : "";
}

void throw_posted_failure(const Control& control, const std::string& attempt) {
    if (control.failure_state.load(std::memory_order_acquire) == 2)
        throw_encoded_failure(control.failure_text, attempt + ": the group has failed: ");
}

}  // namespace ddp::cpu
