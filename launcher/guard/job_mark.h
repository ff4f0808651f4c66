#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ddprun {

/// What every process of one job carries, so that it is known whatever session, parent or environment it gives itself.
struct JobMark {
    std::string variable;          ///< "DDPRUN_JOB=<id>" in the environment of workers
    /// Soft limit on file locks (RLIMIT_LOCKS) of workers, which all their descendants inherit. Linux has not looked at
    /// this limit since 2.4.25, so it can hold a number of ours. 0: theirs is another job's, around this one.
    std::uint64_t lock_limit = 0;
    bool operator==(const JobMark&) const = default;
};

/// `id`: hexadecimal digits, at least 12; `own_lock_limit`: this process's soft limit. A ddprun that a worker of another
/// one has started leaves that one's number in place: it kills all that is below it, ours too. Pure.
JobMark make_job_mark(std::string_view id, std::uint64_t own_lock_limit);
/// This process's soft limit on file locks.
std::uint64_t own_lock_limit();

/// True when the text of /proc/<pid>/environ or /proc/<pid>/limits holds the job's mark. Pure.
bool is_marked(const JobMark& mark, std::string_view environ_text, std::string_view limits_text);

/// Sends SIGKILL to every living process that we may kill and that carries the mark, except ourselves; returns how many
/// were found. One that is dead and that nobody has reaped is not living: in a container nobody may ever do so. Reads /proc.
int kill_marked_processes(const JobMark& mark);

}  // namespace ddprun
