#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "ddp/ddp.h"
#include "ddp/process_group.h"

namespace ddp {

/// Lets all ranks stop after the same step, where each learns at a time of its own that it should, with or
/// without a launcher.
///
///     ddp::StopVote vote(*group);
///     for each batch:
///         if (vote.passed(model, [&] { return lifeline.preemption_requested(); })) break;   // on all ranks
///         ... backward; model.finish(); optimizer->step(model.gradients());
///
/// Once passed it stays passed. Not thread-safe; the group is borrowed.
class StopVote {
  public:
    explicit StopVote(ProcessGroup& group);

    /// Called once before each step, on every rank. Where the gradients of `model` carry the request
    /// (DistributedDataParallel::carries_stop) it costs no message, and passes one step after the first rank
    /// asks; elsewhere it is passed(wanted).
    bool passed(DistributedDataParallel& model, const std::function<bool()>& wanted);
    /// Collective, called once before each step: true on all ranks from the vote on in which `wanted` was
    /// true on one. The ranks vote about five times a second, at steps that are computed from all ranks'
    /// speed; `wanted` is called at every vote. Throws the errors of the group.
    bool passed(const std::function<bool()>& wanted);

  private:
    BorrowedGroup group_;
    bool passed_ = false;
    std::uint64_t steps_left_ = 1;
    std::uint64_t steps_between_ = 1;
    std::chrono::steady_clock::time_point last_vote_;
};

}  // namespace ddp
