#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

/// What every process of one job carries, so that it is known whatever session, parent or environment it
/// gives itself.
struct JobMark {
    std::string variable;  ///< "DDPRUN_JOB=<id>" in the environment of workers
    /// Soft limit on file locks (RLIMIT_LOCKS) of workers, which all their descendants inherit. Linux has not
    /// looked at this limit since 2.4.25, so it can hold a number of ours. 0: theirs is another job's, around
    /// this one.
    std::uint64_t lock_limit = 0;
    bool operator==(const JobMark&) const = default;
};

/// `id`: hexadecimal digits, at least 12; `own_lock_limit`: this process's soft limit. A ddprun that a worker
/// of another one has started leaves that one's number in place: it kills all that is below it, ours too.
/// Pure.
JobMark make_job_mark(std::string_view id, std::uint64_t own_lock_limit);
/// This process's soft limit on file locks.
std::uint64_t own_lock_limit();

/// True when the text of /proc/<pid>/environ or /proc/<pid>/limits holds the job's mark. Pure.
bool is_marked(const JobMark& mark, std::string_view environ_text, std::string_view limits_text);

/// The first 12 digits of the id of the job whose mark is in the text of /proc/<pid>/limits; "" there is
/// none. Pure.
std::string job_in_limits(std::string_view limits_text);

/// A living process that one of some job's workers has started, or a worker.
struct MarkedProcess {
    pid_t pid = 0;
    pid_t parent = 0;
    uid_t user = 0;   ///< whose process it is (its real user id)
    std::string job;  ///< the first 12 digits of the id
};
/// All of them on this host. Only the limit counts, which nothing but fork hands on: a scheduler may give an
/// environment to another job. Empty where /proc does not show our pid namespace.
std::vector<MarkedProcess> processes_of_all_jobs();

/// The living processes, except this one, that carry the mark. One that is dead and that nobody has reaped is
/// not living: in a container nobody may ever do so. Reads /proc; where it does not show our pid namespace,
/// asks the kernel for the limit of every process number.
std::vector<pid_t> marked_processes(const JobMark& mark);
/// Sends SIGKILL to each of them that we may kill; returns how many.
int kill_marked_processes(const JobMark& mark);

}  // namespace ddprun
