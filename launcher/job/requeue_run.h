#pragma once

#include <functional>
#include <optional>
#include <string>

#include "launcher/job/requeue.h"

namespace ddprun {

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
