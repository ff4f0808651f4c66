#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

/// The mark by which every process of a job is found, whatever session, parent or environment it gives
/// itself.
struct JobMark {
    std::string variable;  ///< "DDPRUN_JOB=<id>" in the environment of workers
    /// Soft limit on file locks (RLIMIT_LOCKS) of workers, which all their descendants inherit. Linux has not
    /// used this limit since 2.4.25, so it can hold a number of ours. 0: the limit already marks an outer
    /// job.
    std::uint64_t lock_limit = 0;
    bool operator==(const JobMark&) const = default;
};

/// `id` has at least 12 hexadecimal digits; `own_lock_limit` is this process's soft limit. A ddprun below a
/// worker of another ddprun keeps that one's number, because that one kills all processes below it, ours too.
/// Pure.
JobMark make_job_mark(std::string_view id, std::uint64_t own_lock_limit);
/// One worker's descendants, whatever session and parent they have.
struct WorkerMark {
    JobMark job;
    std::string error_path;  ///< of its error file, which is no other worker's of the node; "" unknown
    std::uint64_t generation =
        0;  ///< the last one in which the worker lived; its replacement has a later one
};
/// True when the text of /proc/<pid>/environ is that of a descendant of the worker. Pure.
bool is_marked(const WorkerMark& mark, std::string_view environ_text);
/// Those of the processes that descend from the worker.
std::vector<pid_t> marked_among(const std::vector<pid_t>& processes, const WorkerMark& mark);

/// This process's soft limit on file locks.
std::uint64_t own_lock_limit();

/// True when the text of /proc/<pid>/environ or /proc/<pid>/limits holds the job's mark. Pure.
bool is_marked(const JobMark& mark, std::string_view environ_text, std::string_view limits_text);

/// The first 12 digits of the job's id by the mark in the text of /proc/<pid>/limits; "" no mark. Pure.
std::string job_in_limits(std::string_view limits_text);

/// A living worker of a job, or a process that a worker has started.
struct MarkedProcess {
    pid_t pid = 0;
    pid_t parent = 0;
    uid_t user = 0;   ///< real user id
    std::string job;  ///< the first 12 digits of the id
};
/// All marked processes of this host. Only the limit counts, because only fork hands it on, while a scheduler
/// may give an environment to another job. Empty where /proc does not show our pid namespace.
std::vector<MarkedProcess> processes_of_all_jobs();

/// The living processes with the mark, except this one. Zombies do not count: in a container they may never
/// be reaped. Reads /proc; where that does not show our pid namespace, asks the kernel for the limit of every
/// process number.
std::vector<pid_t> marked_processes(const JobMark& mark);
/// Sends SIGKILL to each of them that we may kill; returns how many.
int kill_marked_processes(const JobMark& mark);

}  // namespace ddprun
