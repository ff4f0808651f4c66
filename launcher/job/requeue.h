#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/nodes/batch_job.h"
#include "env/result.h"
#include "launcher/ends/report.h"
#include "launcher/spec/job_spec.h"

namespace ddprun {

/// The state that one run of a batch job leaves for the next: a job that is put back into the queue, by us
/// (--requeue) or by the scheduler, goes on counting. One file; docs/batch.md has its fields.
struct RunState {
    std::string job;                ///< the scheduler's id of the job that reads or writes this
    std::string first_job;          ///< id of the first run
    int run = 1;                    ///< of this job, from 1 on
    std::int64_t generation = 0;    ///< of the run's last world
    int restarts_used = 0;          ///< in the run
    std::int64_t last_step = -1;    ///< the highest step reported in any run; -1: none
    int runs_without_progress = 0;  ///< in a row
    std::string phase = "running";  ///< running, queued (for the next run), ended
    std::string why;                ///< the reason for queued or ended
    bool operator==(const RunState&) const = default;
};

std::string render_run_state(RunState state);
/// Error: Protocol, InvalidArgument; in one line.
Result<RunState> parse_run_state(std::string_view text);

/// "DIR/ddprun-12.pbs01.json"; each element of an array has its own file.
std::string run_state_path(const std::string& directory, std::string_view job);

/// The state at the beginning of a run; `before` is the last run's, nullopt at the first.
RunState next_run(const std::optional<RunState>& before, const std::string& job);
/// The state of a run that goes on under another head; `before` is the lost head's, nullopt when it wrote
/// none.
RunState same_run(const std::optional<RunState>& before, const std::string& job);

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

/// One run of a batch job with --requeue, on the head: reads the last run's state, and at the end puts the
/// job back into its queue, or logs why not.
class RequeueRun {
  public:
    using Say = std::function<void(const std::string& line)>;

    enum class Head { First, Successor };
    /// `log_directory` holds the state; "" is the directory where the job was submitted. A successor goes on
    /// with the lost head's run. nullopt: we do not put this job back (--requeue=no, or auto when it cannot
    /// be, with the reason to `say`). Error: InvalidArgument (--requeue=self when it cannot be), NotFound (no
    /// such script).
    static Result<std::optional<RequeueRun>> begin(const RequeueSpec& spec, const std::string& log_directory,
                                                   Head head, const Say& say);

    /// Call it last, because Slurm ends the job at once. Blocks until the scheduler has answered.
    void finish(const JobEnd& end, bool at_walltime, const Say& say);

  private:
    RequeueRun(RequeueSpec spec, RequeueWay way, std::string directory, RunState state)
        : spec_(std::move(spec)),
          way_(std::move(way)),
          directory_(std::move(directory)),
          state_(std::move(state)) {}
    void put_back(RequeueDecision decision, const Say& say);
    void keep(const RunState& state, const Say& say) const;

    RequeueSpec spec_;
    RequeueWay way_;
    std::string directory_;
    RunState state_;
};

}  // namespace ddprun
