#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "env/io/proc.h"

namespace ddprun {

/// What /proc/<pid>/stat says of a process (proc(5)).
struct ProcStat {
    char state = '?';  ///< of its first thread: R, S, D, T, t, Z, X ...
    pid_t parent = 0;
    std::uint64_t threads = 0;      ///< those that still run; a dead process counts as one
    std::uint64_t ticks = 0;        ///< processor time, user and system, of all threads
    std::uint64_t child_ticks = 0;  ///< the same of children waited for
    std::uint64_t rss_pages = 0;
    std::uint64_t start_ticks = 0;  ///< when it was started; of two processes with one number they differ
    /// Nothing of it runs any more. A process whose first thread has ended is a zombie too, and its others
    /// run on.
    [[nodiscard]] bool is_dead() const {
        return state == 'X' || state == 'x' || (state == 'Z' && threads <= 1);
    }
    bool operator==(const ProcStat&) const = default;
};

/// Reads the text of /proc/<pid>/stat. Pure. nullopt: malformed.
std::optional<ProcStat> parse_proc_stat(std::string_view text);
/// nullopt: there is no such process, or `proc` does not show it.
std::optional<ProcStat> proc_stat_of(pid_t pid, const std::string& proc = own_proc());

/// It has crashed, and the kernel still writes its memory to a file (Linux 4.15; before it nobody tells).
bool is_dumping_core(pid_t pid);

}  // namespace ddprun
