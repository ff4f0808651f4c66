#include "ddp/roster.h"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "ddp/diagnose.h"
#include "ddp/futex.h"
#include "env/text.h"

namespace ddp::cpu {

namespace {

using ddprun::MonotonicClock;
using ddprun::SegmentHeader;
using ddprun::TimePoint;
using ddprun::WorkerEnv;

[[noreturn]] void throw_world_sizes(int rank, std::uint32_t size, int other_rank, std::uint32_t other) {
    throw MismatchError(
        fmt::format("rank {} was started with a world of {} ranks, rank {} with {}: "
                    "check WORLD_SIZE and LOCAL_WORLD_SIZE of every worker",
                    rank, size, other_rank, other));
}

// A process whose sizes do not fit the segment has no slot in it. It leaves its claim in group 0's control
// page, where waiting peers look: bit 63 set, rank, world size.
constexpr std::uint64_t pack(std::uint32_t rank, std::uint32_t world) {
    return std::uint64_t{1} << 63 | std::uint64_t{rank} << 32 | world;
}

void throw_if_contradicted(const Arena& arena, int rank, std::uint32_t world) {
    if (const std::uint64_t claim = arena.control().stranger.load(std::memory_order_acquire)) {
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

void write_identity(Arena& arena, const WorkerEnv& env) {
    Identity& mine = arena.identity(arena.rank());
    mine.rank = static_cast<std::uint32_t>(env.rank);
    mine.world_size = static_cast<std::uint32_t>(env.world_size);
    mine.pid = static_cast<std::uint32_t>(::getpid());
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

bool can_see(std::uint32_t pid) { return ::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM; }

Roster read_roster(const Arena& arena) {
    Roster roster;
    cpu_set_t together;
    CPU_ZERO(&together);
    roster.pids_are_visible = true;
    for (std::uint32_t peer = 0; peer < arena.ranks(); ++peer) {
        CPU_OR(&together, &together, &arena.identity(peer).cpus);
        roster.pids_are_visible = roster.pids_are_visible && can_see(arena.identity(peer).pid);
    }
    const auto told = static_cast<int>(arena.segment().header().cpus);
    roster.cpus = std::max(1, CPU_COUNT(&together));
    if (told > 0) roster.cpus = std::min(roster.cpus, told);
    roster.ranks_share_cores = static_cast<int>(arena.ranks()) > roster.cpus;
    return roster;
}

}  // namespace

void leave_claim(SegmentMap& segment, int rank, int world_size) {
    // In the first group: that is where a world that has not formed yet is waiting.
    Control& control = Arena::first_control(segment);
    std::uint64_t none = 0;
    control.stranger.compare_exchange_strong(
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
    leave_claim(segment, env.rank, env.world_size);
    throw MismatchError(fmt::format(
        "rank {} was started with a world of {} ranks, {} on this node; the segment of its "
        "node was made for {} and {}: check WORLD_SIZE and LOCAL_WORLD_SIZE of every worker",
        env.rank, env.world_size, env.local_world_size, header.world_size, header.local_world_size));
}

Roster join(Arena& arena, const WorkerEnv& env, TimePoint deadline) {
    write_identity(arena, env);
    wait_for_all(arena, env, deadline);
    return read_roster(arena);
}

}  // namespace ddp::cpu
