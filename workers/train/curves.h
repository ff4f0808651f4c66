#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "compute.h"
#include "ddp/scalars.h"
#include "env/clock.h"
#include "report.h"

namespace train {

/// Rank 0's curves for --tensorboard. A point that cannot be written is lost, and the training goes on: the
/// first loss is printed.
class Curves {
  public:
    using Print = std::function<void(const std::string&)>;

    /// Throws ddp::FileError when the directory cannot be written.
    Curves(const std::string& directory, Print print)
        : directory_(directory), print_(std::move(print)), scalars_(directory) {}

    /// The training begins or goes on after a pause: the next step's time counts from `now`.
    void begin(ddprun::TimePoint now) { last_step_ = now; }
    /// The step that ended at `now`. `score` is rank 0's of `own_samples` samples; all ranks had `samples`.
    void step(std::uint64_t step, ddprun::TimePoint now, const Score& score, std::size_t own_samples,
              std::size_t samples, double learning_rate);
    /// The epoch that ended with this step.
    void epoch(std::uint64_t step, const EpochResult& result, double learning_rate);
    /// Writes what waits. Call it before a checkpoint: a run that resumes from there has no gap.
    void flush();

  private:
    void report_failure();

    std::string directory_;
    Print print_;
    ddp::Scalars scalars_;
    ddprun::TimePoint last_step_{};
    bool is_reported_ = false;
};

}  // namespace train
