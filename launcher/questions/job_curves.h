#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "env/clock.h"
#include "env/io/curve_file.h"
#include "env/os/event_loop.h"
#include "launcher/node/scalars.h"
#include "launcher/questions/inquiry.h"
#include "launcher/talk/job_status.h"

namespace ddprun {

/// The values of the curves at `now`, with rates since `before` (may be null): what ddprun knows about any
/// program. A value that is not known (steps, collectives, GPUs) has no entry. Pure, as the next two.
std::vector<Scalar> scalars_of(const JobStatus* before, const JobStatus& now);
/// The time between two samples of a job of this age: 1 s in the first minute, rising to 15 s.
Duration sample_pause(Duration age);
/// The directory of a run below DIR of --tensorboard, named by its id without what file names do not take.
std::string curve_directory(std::string_view directory, std::string_view run_id);

/// Writes the curves for --tensorboard: in the run's directory the numbers that workers tell, over their
/// steps, and in its folder "ddprun" the job's, for which it samples all nodes as `ddprun ps` does. Each is a
/// run to TensorBoard, because a restart drops later points of all curves of a run. An answer or a point that
/// is missing leaves a gap and never stops the job; the first loss is logged.
///
/// The steps of the job's curves are seconds since the run began: since the oldest event file in the
/// directory, so that a head that succeeds another one, or a job that is put back into its queue, goes on
/// with the same curves.
///
/// Runs on the head, on the event loop's thread. Borrows its parts for its whole life.
class JobCurves {
  public:
    using Warn = std::function<void(std::string_view why)>;

    /// Takes the first sample when the loop runs. Does not touch the file system.
    JobCurves(os::EventLoop& loop, Inquiry& inquiry, std::string directory, Warn warn);
    ~JobCurves();
    JobCurves(const JobCurves&) = delete;
    JobCurves& operator=(const JobCurves&) = delete;

    /// Numbers that rank 0 of this generation told, as rdzv::WorkerScalars has them.
    void told(std::uint64_t generation, std::string_view lines);

  private:
    void sample();
    void take(const std::string& answer);
    Status write(double wall_time, const std::vector<Scalar>& scalars);
    Status write(const std::vector<ToldScalar>& scalars);
    void warn_once(const Status& written);

    os::EventLoop& loop_;
    Inquiry& inquiry_;
    std::string directory_;
    Warn warn_;
    TimePoint begun_ = MonotonicClock::now(), gpus_due_{};
    // Null: not created yet, or that failed; the next points try again.
    std::unique_ptr<CurveFile> file_, told_;
    std::uint64_t told_generation_ = 0;
    std::optional<JobStatus> before_;
    bool has_warned_ = false;
    os::EventLoop::TimerId timer_ = 0;
    std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< open questions hold it weakly
};

}  // namespace ddprun
