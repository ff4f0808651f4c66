#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "env/clock.h"
#include "env/nodes/batch_job.h"
#include "launcher/batch/run_state.h"
#include "launcher/job_spec.h"
#include "launcher/report/report.h"

namespace ddprun {

/// Runs in a row that got nowhere after which a job is not put back, though time was all that it lacked.
inline constexpr int kStuckRuns = 2;

/// How a run ended, as far as it matters for another.
struct RunEnd {
    enum class Kind : std::uint8_t {
        Succeeded,
        TimeUp,   ///< preempted by a notice, or ended at its walltime
        Stopped,  ///< by a signal, long before it: by its user, or by a scheduler that puts it back by itself
        Failed,
        Final,  ///< failed so that another run would fail alike
    } kind = Kind::Failed;
    std::string what;  ///< of Stopped, Failed and Final
    std::int64_t generation = 0;
    int restarts_used = 0;
    std::int64_t steps = -1;  ///< the furthest that a worker told; -1 none did
    Duration ran{};
};
/// `at_walltime`: it ended from outside, at the end of its walltime. Pure.
RunEnd run_end(const JobEnd& end, bool at_walltime);

struct RequeueDecision {
    bool requeue = false;
    std::string why;  ///< "" after a success
    RunState state;   ///< what this run leaves
};
/// Whether the job goes back into the queue. `stop_file`: where a file is that ends the chain; "" there is
/// none. Pure.
RequeueDecision decide_requeue(const RequeueSpec& spec, RunState state, const RunEnd& end,
                               const std::string& stop_file);

/// How this job can be put back into its queue.
struct RequeueWay {
    std::vector<std::string> command;
    std::string directory;  ///< in which it has to run; "" any
};
/// `script`: --requeue-script as an absolute path, "" none given. Pure.
/// Error: InvalidArgument: it cannot be, and why, with the remedy.
Result<RequeueWay> requeue_way(const std::optional<BatchJob>& job, const std::string& script);

}  // namespace ddprun
