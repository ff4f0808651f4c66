#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ddprun {

/// "/proc" when its pids are those of our pid namespace, so that they can be signalled.
///
/// Otherwise a path with nothing below it: /proc may belong to another pid namespace (`unshare --pid` without
/// --mount-proc shows the outer one, whose pids name strangers here) or not be mounted. Every reader of
/// /proc/<pid> begins with it; /proc/self and files without a pid are always right.
const std::string& own_proc();

/// True where own_proc() is "/proc".
bool has_own_proc();

/// The pid under which /proc shows this process, even of another namespace; getpid() when /proc does not
/// tell.
pid_t own_number_in_proc();

/// The kernel's id of this boot: equal for all processes of a running host, also in containers. "" when /proc
/// does not tell.
std::string boot_id();

/// Fields of /proc/<pid>/stat (proc(5)).
struct ProcStat {
    char state = '?';  ///< of its first thread: R, S, D, T, t, Z, X ...
    pid_t parent = 0;
    std::uint64_t threads = 0;      ///< running threads; 1 for a dead process
    std::uint64_t ticks = 0;        ///< CPU time, user and system, of all threads
    std::uint64_t child_ticks = 0;  ///< CPU time of children waited for
    std::uint64_t rss_pages = 0;
    std::uint64_t start_ticks = 0;  ///< start time, which differs between two processes with one pid
    /// True when no thread runs. (The state is Z also when only the first thread has ended.)
    [[nodiscard]] bool is_dead() const {
        return state == 'X' || state == 'x' || (state == 'Z' && threads <= 1);
    }
    [[nodiscard]] bool is_stopped() const {
        return state == 'T' || state == 't';
    }  ///< SIGSTOP, or a debugger
    bool operator==(const ProcStat&) const = default;
};

/// Parses the text of /proc/<pid>/stat; nullopt: malformed. Pure.
std::optional<ProcStat> parse_proc_stat(std::string_view text);
/// Reads a process's fields; nullopt: there is no such process, or `proc` does not show it.
std::optional<ProcStat> proc_stat_of(pid_t pid, const std::string& proc = own_proc());

/// True while the kernel writes the memory of a crashed process to a file (not known before Linux 4.15).
bool is_dumping_core(pid_t pid);

}  // namespace ddprun
