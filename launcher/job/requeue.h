#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/nodes/batch_job.h"
#include "launcher/ends/report.h"
#include "launcher/job/run_state.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// After this many runs in a row without progress a job is not put back, even if it only ran out of time.
inline constexpr int kStuckRuns = 2;

/// The end of a run, for the decision on another one.
struct RunEnd {
    enum class Kind : std::uint8_t {
        Succeeded,
        TimeUp,      ///< preempted by a notice, or ended at its walltime
        Stopped,     ///< by a signal, long before it: by its user, or by a scheduler that requeues it itself
        Unfinished,  ///< a worker that was asked to stop ended with 75
        Failed,
        Final,  ///< failed in a way that another run would repeat
    } kind = Kind::Failed;
    std::string what;  ///< the reason for Stopped, Unfinished, Failed and Final
    std::int64_t generation = 0;
    int restarts_used = 0;
    std::int64_t steps = -1;  ///< the highest step that a worker reported; -1: none
    Duration ran{};
};
/// `at_walltime` tells that the job was ended from outside at the end of its walltime. Pure.
RunEnd run_end(const JobEnd& end, bool at_walltime);

struct RequeueDecision {
    bool requeue = false;
    std::string why;  ///< "" after a success
    RunState state;   ///< the state after this run
};
/// Decides whether the job goes back into the queue. `stop_file` is the path of a file that ends the chain;
/// "" none exists. Pure.
RequeueDecision decide_requeue(const RequeueSpec& spec, RunState state, const RunEnd& end,
                               const std::string& stop_file);

/// The command that puts this job back into its queue.
struct RequeueWay {
    std::vector<std::string> command;
    std::string directory;  ///< working directory of the command; "" any
};
/// `script` is --requeue-script as an absolute path; "" not given. Pure.
/// Error: InvalidArgument with the reason and the remedy.
Result<RequeueWay> requeue_way(const std::optional<BatchJob>& job, const std::string& script);

}  // namespace ddprun
