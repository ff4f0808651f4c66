#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/unique_fd.h"
#include "launcher/ends/report.h"
#include "launcher/machine/grant.h"

namespace ddprun {

/// The probable meaning of a worker's end, from its exit code, signal and last lines of stderr; "" when they
/// tell nothing more. The caller adds facts from the system (cgroup events, kernel log).
std::string explain_end(const WorkerEnd& end);

/// Names the ranks that ended with 0 before `cause` failed for want of a peer, and how long before; ""
/// otherwise.
std::string explain_early_end(const WorkerEnd& cause, std::span<const WorkerEnd> workers);

/// Names the Python that ran when `cause` failed for want of a module; "" otherwise. `how` is
/// ResolvedProgram's.
std::string explain_python(const WorkerEnd& cause, const std::string& program, const std::string& how);

/// The system's facts about the death of a worker. Facts that cannot be read are absent.
struct DeathFacts {
    pid_t pid = 0;
    int signal = 0;                                   ///< the signal that killed it; 0: it exited by itself
    std::uint64_t cgroup_oom_kills = 0;               ///< OOM kills in our cgroup since the last death
    std::optional<std::uint64_t> memory_limit;        ///< of our cgroup, in bytes
    std::vector<std::string> kernel_lines;            ///< of the kernel's log since the start
    std::optional<std::uint64_t> shm_free, shm_size;  ///< bytes of /dev/shm
    std::optional<std::uint64_t> cpu_limit;  ///< hard limit on CPU time that workers inherit, in seconds
    std::optional<Duration> walltime_left;   ///< of the scheduler's allocation; negative: over
};

/// "out of memory: the cgroup's limit of 64 GiB was hit (it held 61 GiB)"; "" when the facts explain nothing.
/// Pure.
std::string explain_death(const DeathFacts& facts);

/// The kernel's line about a process that it killed for want of memory.
struct OomKill {
    pid_t pid = 0;
    std::string program;
    std::uint64_t rss_bytes = 0;
    bool by_cgroup = false;  ///< the cgroup's limit, not the machine's memory
};
/// nullopt: the line is about something else.
std::optional<OomKill> parse_oom_kill(std::string_view line);
/// The number after `key` in a file of "key number" lines: memory.events, memory.oom_control.
std::optional<std::uint64_t> parse_counter(std::string_view text, std::string_view key);

/// Gathers the facts. Never blocks; costs a few system calls at construction and some more per death.
class DeathWitness {
  public:
    /// Reads the counters as they are now.
    DeathWitness();
    [[nodiscard]] DeathFacts facts(pid_t pid, int signal);

  private:
    [[nodiscard]] std::uint64_t oom_kills() const;
    [[nodiscard]] std::vector<std::string> new_kernel_lines();

    CgroupPlaces memory_;
    std::uint64_t oom_kills_seen_ = 0;
    UniqueFd kernel_log_;  ///< invalid when we may not read it
};

}  // namespace ddprun
