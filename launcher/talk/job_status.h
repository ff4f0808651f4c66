#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "env/result.h"
#include "launcher/machine/gpu/gpu_usage.h"

namespace ddprun {

/// One worker, at one moment. It has totals; rates come from two of them (rates_between).
struct WorkerStatus {
    int node = 0;  ///< index in JobStatus::hosts
    int rank = 0;
    int local_rank = 0;
    int pid = 0;             ///< 0: not started yet
    std::string state;       ///< "waiting" "running" "stopping" "killed" "ended"
    double seconds = 0;      ///< since it was started
    double cpu_seconds = 0;  ///< of the process and all its threads
    std::uint64_t rss_bytes = 0;
    bool reports_steps = false;  ///< by libddp, `ddprun.step` or the lifeline; `step` is valid
    std::uint64_t step = 0;
    bool uses_libddp = false;  ///< `comm_seconds` and `collective` are valid
    double comm_seconds = 0;   ///< inside collectives
    WorkerGpus gpus;           ///< indices into the GPUs of its host, by their numbers
    std::string collective;    ///< "in all_reduce #812 (25 MiB)"; "" not known
    double quiet_seconds = 0;  ///< since it last wrote to stdout or stderr
    /// Spent on steps that its rank has committed, in all its processes; nullopt: it commits none.
    std::optional<double> useful_seconds;
    bool operator==(const WorkerStatus&) const = default;
};

/// One node of the job.
struct HostStatus {
    std::string host;
    int pid = 0;                 ///< of its ddprun
    std::string phase;           ///< of the node: "idle" "starting" "running" "stopping" "killing" "sweeping"
    std::string log_directory;   ///< of this attempt, on that host; "" none
    std::vector<GpuUsage> gpus;  ///< only if the request asked for them
    std::string trouble;         ///< why nothing else is known: "no answer in 2 s"; "" none
    bool operator==(const HostStatus&) const = default;
};

/// The status of a job: of one node, or by the head of all nodes (see merge_status).
struct JobStatus {
    std::string job;              ///< DDPRUN_JOB
    std::optional<unsigned> uid;  ///< owner by the kernel; set by the asker, not by the answer
    std::string run_id;
    std::string program;
    std::string host;
    int pid = 0;           ///< of ddprun
    bool is_head = false;  ///< only the head knows the job's phase and restarts
    /// "joining" "running" "ending" "stopping" "backing off" "finished"; on other nodes the node's phase.
    std::string phase;
    std::uint64_t generation = 0;
    int restarts_used = 0;
    int max_restarts = 0;
    int recoveries = 0;  ///< in place
    double useful_before =
        0;  ///< seconds of the steps that earlier starts of all ranks committed, and that count
    // Seconds lost so far (LostTime).
    double lost_to_failures = 0, lost_to_restarts = 0, lost_to_rehearsals = 0;
    std::string recovery;  ///< whether a failure is recovered in place, or why not; "" not known
    int world_size = 0;
    int nodes = 1;
    double seconds = 0;         ///< since ddprun was started
    std::string log_directory;  ///< of this attempt; "" none
    std::uint64_t lost_output_bytes = 0;
    std::vector<HostStatus> hosts;  ///< in order of group rank
    std::vector<WorkerStatus> workers;
    bool operator==(const JobStatus&) const = default;
};

/// The status of the whole job: the head's facts about the job, and the workers and hosts of all nodes in the
/// given order. A node that did not answer has only a host with its `trouble`.
JobStatus merge_status(JobStatus head, const std::vector<JobStatus>& nodes);

/// The indices of one answer per job among those of several ddpruns on one host. A job's first answer counts.
/// A node that has not reached its head yet answers under its own id: it is left out when a head of the same
/// run id has answered.
std::vector<std::size_t> one_answer_each(const std::vector<std::optional<JobStatus>>& answers);

/// One worker's rates.
struct WorkerRates {
    double cpu_percent = 0;  ///< 100 is one CPU
    double steps_per_second = 0;
    double comm_percent = 0;  ///< share of the time inside collectives
    bool operator==(const WorkerRates&) const = default;
};
/// The rates since `before` (may be null); over the worker's whole life when `before` has another process or
/// no time has passed.
WorkerRates rates_between(const JobStatus* before, const WorkerStatus& worker);

/// The status as one line of JSON, with newline.
std::string to_json(const JobStatus& status);
/// Error: Refused with the job's reason, Protocol.
Result<JobStatus> job_status_from_json(std::string_view line);

/// "job 5f3a (run none): running, generation 2, 1 of 3 restarts, 4 workers on 1 node, 12 s, ./train" and a
/// table of the workers. To fit `width` (0: unlimited) the title is wrapped and the least important columns
/// are left out. `before` may be null.
std::string render_status(const JobStatus* before, const JobStatus& now, int width);

/// The status as Prometheus text, version 0.0.4.
std::string render_metrics(const JobStatus& status);

}  // namespace ddprun
